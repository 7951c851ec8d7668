"""A checkpoint is on the disk as a whole or not at all, fits or is refused, and a run goes on from it bit for bit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_bridge import CheckpointError, Checkpoints, ContextError, PipelineError, RowwiseAdagrad

from . import _training as training

BATCHES = training.make_batches(6)
AT = 3  # steps before the checkpoint
PARAMS = {"shift": np.float32(0)}


def pairs(batches: list[Any], last: Any = None) -> list[Any]:
    return [*zip(batches, [*batches[1:], last], strict=True)]


def to_the_middle(step: Any, start: Any = training.start) -> Any:
    """Gradients are staged, and the next batch is being looked up."""
    return training.train(step, start(step), pairs(BATCHES[:AT], BATCHES[AT]))[0]


def finish(step: Any, state: Any) -> Any:
    state, _ = training.train(step, state, pairs(BATCHES[AT:]))
    return training.arrays_of(step, step.flush(state)), int(state.step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> tuple[Path, Any]:
    """(directory with one checkpoint, what the run that wrote it ended with)."""
    directory = tmp_path_factory.mktemp("saved")
    with training.shared_step(4, 1) as step:
        state = to_the_middle(step)
        assert Checkpoints(directory, step).save(state) == AT
        return directory, finish(step, state)


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Path:
    """The directory, to be changed."""
    return Path(shutil.copytree(saved[0], tmp_path / "copied"))


@pytest.fixture
def step() -> Any:
    with training.shared_step(4, 1) as step:
        yield step


def refusal(call: Any, *args: Any, kind: Any = CheckpointError) -> str:
    """What a refused call says, with its notes."""
    with pytest.raises(kind) as raised:
        call(*args)
    assert "\n" not in str(raised.value)
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


# ---- going on


def test_saving_disturbs_nothing_and_a_run_goes_on_bit_for_bit(saved, step):
    training.assert_same_arrays(finish(step, to_the_middle(step)), saved[1])
    training.assert_same_arrays(finish(step, Checkpoints(saved[0], step).restore(PARAMS)), saved[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_devices_goes_on_too(saved, ranks):
    with training.shared_step(ranks, 1) as step:
        training.assert_same_arrays(finish(step, Checkpoints(saved[0], step).restore(PARAMS)), saved[1])


def test_after_a_flush_any_number_of_devices_has_the_same_tables(saved, step, tmp_path):
    state = step.flush(to_the_middle(step))
    Checkpoints(tmp_path, step).save(state)
    wanted = training.arrays_of(step, state)
    with training.make_step(5, 1) as other:
        text = refusal(Checkpoints(saved[0], other).restore, PARAMS, kind=ContextError)
        assert "is of 24 tokens, which 5 ranks cannot share evenly" in text
        assert "flush before the checkpoint" in text
        training.assert_same_arrays(training.arrays_of(other, Checkpoints(tmp_path, other).restore(PARAMS)), wanted)


def test_a_table_is_saved_without_its_padding(saved, step):
    tree = json.loads((saved[0] / str(AT) / "manifest.json").read_text())["tree"]
    assert step.tables["users"].padded_width > training.WIDTH["users"]
    for name in training.NAMES:
        assert tree["tables"][name]["weights"]["shape"] == [training.ROWS[name], training.WIDTH[name]]
        assert tree["staged"][name]["grads"]["shape"] == [training.TOKENS[name], training.WIDTH[name]]


def test_the_announced_batch_is_still_expected(saved, step):
    state = Checkpoints(saved[0], step).restore(PARAMS)
    with pytest.raises(PipelineError, match="was given another batch"):
        step(state, BATCHES[AT + 1])
    training.assert_same_arrays(finish(step, state), saved[1])


def test_every_array_of_every_optimizer_survives(tmp_path):
    optimizer = RowwiseAdagrad(learning_rate=0.1, half_life=7, lazy=True, rounding="stochastic", seed=3)
    tables = {"optimizer": optimizer, "dtype": "bfloat16"}
    with training.make_step(2, 1, tables=tables, optimizer=optax.adam(0.125)) as step:
        state = to_the_middle(step)
        checkpoints = Checkpoints(tmp_path, step)
        checkpoints.save(state)
        wanted = finish(step, state)
        training.assert_same_arrays(finish(step, checkpoints.restore(PARAMS)), wanted)


def test_the_newest_are_kept_and_the_latest_is_restored(step, tmp_path):
    checkpoints = Checkpoints(tmp_path, step, max_to_keep=2)
    assert checkpoints.latest() is None
    state = training.start(step)
    for batch, upcoming in pairs(BATCHES[:3]):
        state, _ = step(state, batch, upcoming)
        checkpoints.save(state)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.latest() == 3
    assert int(checkpoints.restore(PARAMS).step) == 3
    assert int(checkpoints.restore(PARAMS, which=2).step) == 2
    assert "has no complete checkpoint of step 1: there are [2, 3]" in refusal(checkpoints.restore, PARAMS, 1)
    checkpoints.delete(3)
    assert checkpoints.steps() == [2]


@pytest.mark.filterwarnings("error::jax_bridge.ContextWarning")
def test_gradients_that_a_checkpoint_has_are_not_lost(tmp_path):
    with training.shared_step(4, 1) as step:
        Checkpoints(tmp_path, step).save(to_the_middle(step))


# ---- what is refused, before anything is dropped


def test_a_directory_without_a_checkpoint_says_what_it_has(step, tmp_path):
    checkpoints = Checkpoints(tmp_path / "new", step)
    assert "has no complete checkpoint: it does not exist" in refusal(checkpoints.restore, PARAMS)
    (tmp_path / "new").mkdir()
    assert "has no complete checkpoint: it is empty" in refusal(checkpoints.restore, PARAMS)
    (tmp_path / "new" / "3.orbax-checkpoint-tmp").mkdir()
    text = refusal(checkpoints.restore, PARAMS)
    assert "has no complete checkpoint: it has ['3.orbax-checkpoint-tmp']" in text


OF_ORBAX = ("_CHECKPOINT_METADATA", "commit_success.txt")  # nobody needs them to read a checkpoint


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    at = len(data) // 2
    if how == "missing":
        path.unlink()
    elif how == "altered":
        path.write_bytes(altered(data, at))
    else:
        path.write_bytes(data[: at if how == "truncated" else 0])


def altered(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def entries_of(tree: Any) -> list[Any]:
    """All arrays of a manifest."""
    if not isinstance(tree, dict):
        return []
    return [tree] if "array" in tree else [entry for part in tree.values() for entry in entries_of(part)]


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "altered"])
def test_damage_to_any_file_is_named_and_the_run_goes_on_from_what_it_has(saved, step, copied, how):
    state = to_the_middle(step)
    checkpoint = copied / str(AT)
    entries = entries_of(json.loads((checkpoint / "manifest.json").read_text())["tree"])
    folders = {checkpoint / "arrays" / f"{entry['array']:04}": entry["name"] for entry in entries}
    checkpoints = Checkpoints(copied, step)
    seen = set()
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        whose = next((folder for folder in folders if path.is_relative_to(folder)), path.name)
        if whose in OF_ORBAX or (how == "altered" and path.name == "zarr.json"):  # see the next test
            continue
        intact = path.read_bytes()
        damage(path, how)
        text = refusal(checkpoints.restore, PARAMS)
        if whose == "manifest.json":
            assert f"the checkpoint {checkpoint} {'was not written by' if how == 'missing' else 'is damaged'}" in text
        else:
            assert f"{folders[whose]} of the checkpoint {checkpoint} cannot be read" in text
            assert str(path) in text
        assert f"Complete checkpoints: [{AT}]" in text
        path.write_bytes(intact)
        seen.add(whose)
    assert seen == {*folders, "manifest.json"}
    training.assert_same_arrays(finish(step, state), saved[1])


def test_a_description_of_an_array_that_was_altered_is_refused_or_changes_nothing(copied):
    from jax_bridge.saving import checkpoint_files

    checkpoint = copied / str(AT)
    entry = json.loads((checkpoint / "manifest.json").read_text())["tree"]["tables"]["users"]["weights"]
    path = checkpoint / "arrays" / f"{entry['array']:04}" / "zarr.json"
    wanted, intact = checkpoint_files.read(checkpoint, entry), path.read_bytes()
    refusals = []
    for at in range(len(intact)):
        path.write_bytes(altered(intact, at))
        try:
            np.testing.assert_array_equal(checkpoint_files.read(checkpoint, entry), wanted)
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > len(intact) / 2
    assert all(entry["name"] in text for text in refusals)


def test_another_programs_checkpoints_are_refused_and_left_alone(step, tmp_path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave({"weights": np.ones(3)}))
    checkpoints = Checkpoints(tmp_path, step, max_to_keep=1)
    wanted = f"the checkpoint {tmp_path}/7 was not written by jax_bridge.Checkpoints: it has no manifest.json"
    assert wanted in refusal(checkpoints.restore, PARAMS)
    text = refusal(checkpoints.save, to_the_middle(step))
    assert wanted in text
    assert "Give it a directory of its own" in text
    assert checkpoints.steps() == [7]


def test_a_newer_format_is_refused_by_its_version(step, copied):
    path = copied / str(AT) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2, "async_emb": "9.1"}))
    text = refusal(Checkpoints(copied, step).restore, PARAMS)
    assert "has version 2 of the format, but this async_emb reads up to 1: it was written by async_emb 9.1" in text


def test_every_difference_of_another_run_is_listed(saved, copied):
    lazy = RowwiseAdagrad(learning_rate=0.1, lazy=True)
    tables = {"optimizer": lazy, "dtype": "bfloat16"}
    with training.make_step(4, 0, tables=tables, optimizer=optax.adam(0.125)) as step:
        other = {"shift": np.zeros(2, np.float32), "scale": np.float32(1)}
        with pytest.raises(ContextError) as raised:
            Checkpoints(copied, step).restore(other)
        problems = "\n".join(raised.value.problems)
        for text in [
            "params['shift'] is float32[], but what was given as params needs float32[2]",
            "the checkpoint has no params['scale'], but what was given as params needs it: float32[]",
            "the checkpoint has no opt_state[0].mu['scale'], but the step's optimizer needs it",
            "checkpoint['tables']['users']['weights'] is float32[31, 10], but the table 'users' needs bfloat16[31, 10]",
            "checkpoint['tables']['items']['optimizer'] is {'accumulator': 'float32[19]'}, but RowwiseAdagrad(",
            "the checkpoint was taken with staleness 1 and holds gradients that are staged, which staleness 0 has no",
        ]:
            assert text in problems
        assert f"The checkpoint is {copied / str(AT)}." in raised.value.__notes__
        with pytest.raises(ContextError) as raised:
            Checkpoints(copied, step).save(step.init(other, jax.random.key(0)))
        assert "Give it a directory of its own." in raised.value.__notes__[-1]
    assert Checkpoints(copied, step).steps() == [AT]


def test_other_tables_rows_and_widths_are_refused(saved):
    with training.shared_step(2, 1) as step:
        tables = dict(step.tables)
        try:
            users, items = step.tables["users"], step.tables["items"]
            step.tables = {"users": items, "things": users}
            text = refusal(Checkpoints(saved[0], step).restore, PARAMS, kind=ContextError)
        finally:
            step.tables = tables
    assert "the checkpoint has tables ['items', 'users'], but the step has ['things', 'users']" in text
    assert (
        "checkpoint['tables']['users']['weights'] is float32[31, 10], but the table 'items' needs float32[19, 6]"
        in text
    )


def test_another_kind_of_optimizer_is_refused_though_its_arrays_are_the_same(step, copied):
    class Other(RowwiseAdagrad):
        pass

    with training.make_step(4, 1, tables={"optimizer": Other(learning_rate=0.1)}) as other:
        text = refusal(Checkpoints(copied, other).restore, PARAMS, kind=ContextError)
    assert "checkpoint['tables']['users'] was trained by RowwiseAdagrad, but the table's optimizer is Other" in text


def test_nothing_is_written_over(step, tmp_path):
    checkpoints = Checkpoints(tmp_path, step)
    state = to_the_middle(step)
    checkpoints.save(state)
    text = refusal(checkpoints.save, state)
    assert "there is a checkpoint of step 3" in text
    assert "checkpoints.delete(3) removes it" in text
    checkpoints.delete(3)
    assert checkpoints.save(state) == 3


def test_a_state_that_is_not_the_last_is_not_saved(step, tmp_path):
    state = to_the_middle(step)
    step(state, BATCHES[AT], BATCHES[AT + 1])
    with pytest.raises(PipelineError, match="this is not the state that the last call returned"):
        Checkpoints(tmp_path, step).save(state)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_said_and_leaves_what_is_there(step, tmp_path, monkeypatch):
    from jax_bridge.saving import checkpoint_files

    checkpoints = Checkpoints(tmp_path, step)
    state, _ = step(training.start(step), BATCHES[0], BATCHES[1])
    checkpoints.save(state)
    state, _ = step(state, BATCHES[1])
    with monkeypatch.context() as patched:

        def full(*args: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(checkpoint_files, "_write_array", full)
        text = refusal(checkpoints.save, state)
    assert "cannot be written: [Errno 28] No space left on device" in text
    assert checkpoints.steps() == [1]
    assert checkpoints.save(state) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_wrong_arguments_are_listed(step):
    with pytest.raises(ContextError) as raised:
        Checkpoints("gs://bucket/run", object(), max_to_keep=0)  # type: ignore[arg-type]
    assert [problem.split(":")[1].split("=")[0].strip() for problem in raised.value.problems] == [
        "directory",
        "step",
        "max_to_keep",
    ]


def test_without_orbax_the_command_that_installs_it_is_named(step, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install orbax-checkpoint, or pip install 'async-emb\[checkpoint\]'"):
        Checkpoints(tmp_path, step)
