"""The programs in the documentation run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from jax_bridge.jobs.checking import check_job
from jax_bridge.jobs.document import Document

ROOT = Path(__file__).resolve().parent.parent
HOST_DEVICES = "--xla_force_host_platform_device_count=4"


def blocks_of(document: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(program: str, folder: Path) -> str:
    """What a program prints that is started in an empty folder, as a file that somebody has copied it into."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": HOST_DEVICES, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def block_with(document: str, text: str) -> str:
    (block,) = [block for block in blocks_of(document) if text in block]
    return block


def test_the_example_of_the_readme_runs_and_learns(tmp_path: Path) -> None:
    (example,) = blocks_of("README.md")
    loss, shape = run(example, tmp_path).split(maxsplit=1)
    assert float(loss) < 0.2  # the mean square of the targets is 0.5
    assert shape.strip() == "(3, 16)"


def test_a_step_of_ones_own_runs_and_learns(tmp_path: Path) -> None:
    loss, norm = run(block_with("docs/step.md", "ae.lookup_start("), tmp_path).split()
    assert float(loss) < 2  # a row of zeros has 8: half of its 16 columns
    assert float(norm) > 0


def test_a_run_that_was_saved_goes_on_on_another_mesh(tmp_path: Path) -> None:
    steps, loss = run(block_with("docs/step.md", "pickle.load("), tmp_path).split()
    assert int(steps) == 20
    assert float(loss) > 0
    assert [file.name for file in tmp_path.iterdir()] == ["run.pickle"]


def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    (example,) = blocks_of("docs/checkpoints.md")
    assert run(example, tmp_path).splitlines() == ["20 ['15', '20']", "the same bits: True"]


def test_the_quick_start_runs_and_learns(tmp_path: Path) -> None:
    (example,) = blocks_of("docs/index.md")
    loss, updates = run(example, tmp_path).split()
    assert float(loss) < 0.2  # the mean square of the targets is 0.5
    assert float(updates) == 200


def test_a_wrong_configuration_is_reported_and_corrected_as_written(tmp_path: Path) -> None:
    (example,) = blocks_of("docs/errors.md")
    lines = run(example, tmp_path).splitlines()
    assert lines[0].startswith("async_emb axis 'tabel' is not a mesh axis of ")
    assert lines[-1] == "16", "62 columns, padded for four ranks"


def test_the_job_of_the_documentation_has_nothing_wrong() -> None:
    (job,) = blocks_of("docs/command-line.md", "toml")
    checked = check_job(Document(job, "job.toml"))
    assert (checked.findings, checked.warnings) == ((), ())


def test_the_timeline_is_recorded_as_written(tmp_path: Path) -> None:
    assert run(block_with("docs/step.md", "start_timeline()"), tmp_path) == "", "no step has run in between"


def test_torch_borrows_a_table_as_written(tmp_path: Path) -> None:
    assert run(block_with("docs/torch.md", "dlpack.view("), tmp_path).splitlines() == [
        "async_emb ...",
        "async_emb view: the view of the array float32[1000, 16] has ended",
        "row 7 is zeros: True",  # as torch has left it: its gradient was zeros
    ]


def test_jax_adopts_the_batches_of_a_loader_as_written(tmp_path: Path) -> None:
    *sums, refusal, advice = run(block_with("docs/torch.md", "dlpack.adopt("), tmp_path).splitlines()
    assert sums == ["2016", "6112", "10208", "14304"]
    assert refusal == "async_emb adopt: the tensor float32[4, 8] has the strides (1, 4): it is not contiguous"
    assert advice.startswith("Make it contiguous: ")


def test_a_table_is_handed_over_as_written(tmp_path: Path) -> None:
    assert run(block_with("docs/torch.md", "to_embedding("), tmp_path).split() == ["True", "True", "True"]
    assert [file.name for file in tmp_path.iterdir()] == ["words.safetensors"]


def test_the_loop_of_torch_runs_and_learns(tmp_path: Path) -> None:
    loss, valid, shape = run(block_with("docs/torch_module.md", "users.prefetch("), tmp_path).split(maxsplit=2)
    assert float(loss) < 0.2  # the mean square of the targets is 1
    assert (valid, shape.strip()) == ("True", "torch.Size([3, 16])")


def test_threads_as_ranks_print_what_is_written(tmp_path: Path) -> None:
    printed = run(block_with("docs/torch_module.md", "ThreadRanks(3)"), tmp_path)
    assert printed == "True ['weight', 'accumulator', 'step']\n"


def test_every_program_of_the_documentation_has_a_test() -> None:
    once = {"README.md": 1, "docs/checkpoints.md": 1, "docs/errors.md": 1, "docs/index.md": 1}
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {str(path.relative_to(ROOT)): len(blocks_of(str(path.relative_to(ROOT)))) for path in documents}
    assert {document: count for document, count in found.items() if count} == once | {
        "docs/step.md": 3,
        "docs/torch.md": 3,
        "docs/torch_module.md": 2,
    }


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}, (
        "nav of mkdocs.yml"
    )
