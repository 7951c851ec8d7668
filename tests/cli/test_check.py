"""`async-emb check` on a corpus of job files: tests/jobs/broken, each with its report beside it, and tests/jobs/good.

In a broken file `# <-` marks every line that must be reported, and no other may be.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_bridge.jobs.checking import check_job
from jax_bridge.jobs.corrections import correct
from jax_bridge.jobs.document import Document

JOBS = Path(__file__).parents[1] / "jobs"
BROKEN = sorted((JOBS / "broken").glob("*.toml"))
GOOD = sorted((JOBS / "good").glob("*.toml"))


def names(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def marked_lines(text):
    return {number for number, line in enumerate(text.splitlines(), start=1) if "# <-" in line}


@names(BROKEN)
def test_a_broken_job_gets_its_report(path, async_emb):
    status, out, err = async_emb("check", path.name, folder=path.parent)
    assert (status, err) == (1, "")
    assert out == path.with_suffix(".txt").read_text()
    places = re.findall(rf"^{re.escape(path.name)}:(\d+):\d+:", out, re.MULTILINE)
    assert {int(line) for line in places} == marked_lines(path.read_text())


@names(BROKEN)
def test_a_correction_passes_or_says_what_is_left(path, async_emb, tmp_path):
    fixed = tmp_path / "fixed.toml"
    report = path.with_suffix(".txt").read_text()
    async_emb("check", path, "--fix", fixed)
    if "the job passes (checked)" in report:
        assert async_emb("check", fixed).status == 0
    else:
        assert not fixed.exists()


@names(GOOD)
def test_a_good_job_passes(path, async_emb):
    status, out, err = async_emb("check", path.name, folder=path.parent)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith(f"{path.name}: ok: ")


def test_the_corpus_is_as_large_as_promised():
    assert len(BROKEN) >= 60
    assert len(GOOD) >= 40
    assert all(path.with_suffix(".txt").exists() for path in BROKEN)


def test_an_axis_may_bear_the_name_of_a_key(async_emb):
    job = (
        WIDTH.format("width = 8\noptimizer.learning_rate = 1")
        .replace('"t"', '"processes"')
        .replace("t = 4", "processes = 4")
    )
    assert async_emb("check", "-", stdin=job.encode()).status == 0


# ---- corrected files


WIDTH = 'table_axis = "t"\ntokens_per_batch = 8\n[mesh]\nt = 4\n[tables.a]\nrows = 1000\n{}\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "width = 6 # kept\noptimizer.learning_rate = 1",
            "width = 8 # kept\nlogical_width = 6\noptimizer.learning_rate = 1",
        ),
        ("  width=6\noptimizer = {learning_rate=1}", "  width=8\n  logical_width = 6\noptimizer = {learning_rate=1}"),
        (
            "width = 8\nlogical_width = 9 # gone\npadding_id = -1\noptimizer = {learning_rate=1, hlaf_life = 3 }",
            "width = 12\nlogical_width = 9 # gone\npadding_id = -1\noptimizer = {learning_rate=1, half_life = 3 }",
        ),
    ],
    ids=["comment", "indentation", "renamed"],
)
def test_a_corrected_file_keeps_what_is_right_as_it_was(before, after):
    correction = correct(check_job(Document(WIDTH.format(before), "job.toml")))
    assert correction is not None
    assert correction.checked.document.text == WIDTH.format(after)


def test_padding_says_what_it_costs(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        WIDTH.format("width = 6\ndtype = 'bfloat16'\noptimizer.learning_rate = 1").replace("t = 4", "t = 4\nc = 2")
    )
    out = async_emb("check", job).out
    # 2 more columns of 1,000 rows of 2 bytes: 4,000 bytes, a quarter of them on each rank; the axis c holds copies.
    cost = "3.9 KiB of weights in each of 2 copies (33.3 % more), 1000 B on each device"
    assert f"a: padding from 6 to 8 columns costs {cost}\n" in out


def test_a_file_that_exists_is_not_replaced_unless_asked(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(text := WIDTH.format("width = 6\noptimizer.learning_rate = 1"))
    status, out, err = async_emb("check", job, "--fix", job)
    assert (status, out) == (2, "")
    assert "exists already; choose another name, or add --overwrite" in err
    assert job.read_text() == text
    assert async_emb("check", job, "--fix", job, "--overwrite").status == 1, "there were problems"
    assert tomllib.loads(job.read_text())["tables"]["a"]["width"] == 8


def test_a_corrected_file_goes_through_a_pipe(async_emb, tmp_path):
    job = WIDTH.format("width = 6 # \u00fc\noptimizer.learning_rate = 1").replace("\n", "\r\n")
    status, out, err = async_emb("check", "-", "--fix", "-", stdin=job.encode(), folder=tmp_path)
    assert status == 1, "there were problems"
    assert out == job.replace("width = 6 # \u00fc", "width = 8 # \u00fc\r\nlogical_width = 6")
    assert err.startswith("<stdin>:7:9: width = 6 # \u00fc\n"), "the report goes where it is in nobody's way"
    assert list(tmp_path.iterdir()) == []
    assert async_emb("check", "-", "--fix", "-", stdin=out.encode()).out == out, "what is right passes through"


@pytest.mark.parametrize("job", ["rows = ", WIDTH.format("width = 'x'")], ids=["no TOML", "cannot be guessed"])
def test_nothing_goes_through_a_pipe_where_no_file_passes(job, async_emb):
    status, out, err = async_emb("check", "-", "--fix", "-", stdin=job.encode())
    assert (status, out) == (1, "")
    assert err.startswith("<stdin>:")


def test_a_corrected_file_and_json_do_not_share_a_pipe(async_emb):
    status, out, err = async_emb("check", "-", "--fix", "-", "--json", stdin=b"rows = 1")
    assert (status, out) == (2, "")
    assert "--fix - and --json would both write to the standard output" in err


def test_lines_end_as_they_did(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_bytes(WIDTH.format("width = 6\noptimizer.learning_rate = 1").replace("\n", "\r\n").encode())
    async_emb("check", job, "--fix", tmp_path / "fixed.toml")
    fixed = (tmp_path / "fixed.toml").read_bytes()
    assert b"width = 8\r\nlogical_width = 6\r\n" in fixed
    assert b"\n" not in fixed.replace(b"\r\n", b"")


# ---- what is given and what comes out


def test_a_job_may_come_through_a_pipe(async_emb):
    status, out, _ = async_emb("check", "-", stdin=WIDTH.format("width = 6").encode())
    assert status == 1
    assert "<stdin>:7:9: width = 6\n" in out


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("command", ["check", "plan"])
@names(BROKEN)
def test_whatever_is_found_comes_as_json_with_the_same_status(command, path, async_emb):
    status, out, err = async_emb(command, path.name, "--json", folder=path.parent)
    assert (status, err) == (1, "")
    data = json.loads(out, parse_constant=no_constant)
    report = path.with_suffix(".txt").read_text()
    places = re.findall(rf"^{re.escape(path.name)}:(\d+):(\d+):", report, re.MULTILINE)
    assert [(str(problem["line"]), str(problem["column"])) for problem in data["problems"]] == places
    assert all(problem["message"] in report for problem in data["problems"])
    assert not data["ok"]


def test_json_is_read_alike_in_any_encoding(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('"gr\u00f6\u00dfe" = 1\n', encoding="utf-8")
    out = async_emb("check", job, "--json").out
    assert out.isascii()
    assert "gr\u00f6\u00dfe" in json.dumps(json.loads(out), ensure_ascii=False)


def test_findings_come_as_json_too(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(WIDTH.format("width = 6\noptimizer.learning_rate = 1"))
    status, out, _ = async_emb("check", job, "--json")
    data = json.loads(out)
    assert status == 1
    assert not data["ok"]
    (problem,) = data["problems"]
    assert (problem["line"], problem["column"], problem["key"]) == (7, 9, "tables.a.width")
    assert problem["message"] == "async_emb emb_width=6 does not shard evenly over the 4-rank communicator"
    assert data["correction"]["passes"]
    assert {"key": "tables.a.width", "old": "6", "new": "8"} in data["correction"]["changes"]


def test_more_room_for_unique_ids_than_a_batch_can_need_is_a_warning(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(WIDTH.format("width = 8\nnum_unique = 100\noptimizer.learning_rate = 1"))
    status, out, _ = async_emb("check", job)
    assert status == 0
    assert f"{job}:8:14: warning: async_emb num_unique=100 is above tokens_per_batch + 1 = 9" in out


NOT_TOML = {
    "utf-16": (b"\xff\xfea\0", (1, 1), "this is not UTF-8, as TOML must be: the byte 0xff cannot stand here"),
    "latin-1": ("a = 1\n\u00fc\u00fc = '".encode() + b"\xe9'", (2, 7), "the byte 0xe9 cannot stand here"),
    "latin-1 after a mark": (b"\xef\xbb\xbfa = '\xe9'", (1, 6), "the byte 0xe9 cannot stand here"),
    "value": (b"\n a = 1 2", (2, 8), "this is not TOML: Expected newline or end of document"),
    "end": (b"a = 1\nb = [2,\n", (3, 1), "this is not TOML: Invalid value"),
    "number": (b"a = 1\nb = " + b"9" * 5000, (2, 5005), "this is not TOML: Exceeds the limit"),
    "depth": (b"a = " + b"[" * 5000, (1, 5005), "this is not TOML: "),
}


@pytest.mark.parametrize(("content", "place", "said"), NOT_TOML.values(), ids=NOT_TOML.keys())
def test_what_is_not_toml_is_shown_at_its_place(content, place, said, async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_bytes(content)
    status, out, err = async_emb("check", job)
    assert (status, err) == (1, "")
    assert out.startswith(f"{job}:{place[0]}:{place[1]}:")
    assert out.splitlines()[-1].startswith("    ")
    assert said in out
    (problem,) = json.loads(async_emb("check", job, "--json").out)["problems"]
    assert ((problem["line"], problem["column"]), problem["key"]) == (place, "")
    assert said in problem["message"]


def test_a_wrong_call_is_told_apart_from_a_wrong_job(async_emb, tmp_path):
    assert async_emb("check", tmp_path / "missing.toml").status == 2
    assert async_emb("check", tmp_path).status == 2
    assert async_emb("check").status == 2
    assert async_emb("chekc").status == 2


def test_checking_imports_neither_jax_nor_torch():
    """It answers in half a second because of that."""
    program = (
        "import sys; sys.argv = ['async-emb', 'check', sys.argv[1]]\n"
        "from jax_bridge.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: print('status', exit.code, sorted({'jax', 'jaxlib', 'torch'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, GOOD[0]], capture_output=True, text=True, cwd=JOBS.parents[1], check=True
    )
    assert result.stdout.splitlines()[-1] == "status 0 []"
    assert "\x1b" not in result.stdout, "no colours off a terminal"


def test_without_typer_the_command_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('none', name='typer')")
    result = subprocess.run(
        [sys.executable, "-m", "jax_bridge", "check", GOOD[0]],
        capture_output=True,
        text=True,
        cwd=JOBS.parents[1],
        env={"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == (
        'async-emb: the command line needs typer, which is not installed: python -m pip install "async-emb[cli]"\n'
    )
