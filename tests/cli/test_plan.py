"""`async-emb plan`. That jobs allocate what it says is for test_jobs_run.py and tests/multiprocess/test_jobs.py."""

from __future__ import annotations

import json

import pytest

from jax_bridge.processes import traffic

from .test_check import BROKEN, JOBS

JOB = """
table_axis = "table"
tokens_per_batch = {tokens}
processes = {processes}
staleness = {staleness}
mesh.table = {ranks}
[tables.words]
rows = 1_000_000
width = {width}
dtype = "bfloat16"
optimizer.learning_rate = 0.1
"""
DEFAULTS = {"tokens": 8192, "processes": 4, "staleness": 1, "ranks": 8, "width": 128}


@pytest.fixture
def plan(async_emb):
    def run(*options, **changes):
        status, out, err = async_emb("plan", "-", *options, stdin=JOB.format(**(DEFAULTS | changes)).encode())
        assert (status, err) == (0, "")
        return json.loads(out) if "--json" in options else out

    return run


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1", "1e300", "x"])
@pytest.mark.parametrize(
    "option", ["--bandwidth", "--latency", "--memory-bandwidth", "--dense", "--forward-share", "--unique-share"]
)
def test_a_number_that_is_none_is_refused(option, value, async_emb):
    status, out, err = async_emb("plan", "-", option, value, stdin=JOB.format(**DEFAULTS).encode())
    assert (status, out) == (2, "")
    assert f"Invalid value for '{option}': " in err
    assert value == "x" or f"{float(value):g} is not a number between" in err


def test_the_largest_numbers_give_a_picture_and_json(plan):
    for least, most in (("--bandwidth", "--dense"), ("--memory-bandwidth", "--latency")):
        options = (least, 1e-6, most, 1e9)
        assert "exposed" in plan(*options)
        assert plan("--json", *options)["columns"]["exposed_seconds"] >= 0


def test_bytes_are_those_of_the_model_that_runs_are_held_to(plan):
    columns = plan("--json", "--unique-share", 0.5)["columns"]
    expected = traffic.column_sharded(
        processes=4, ranks_per_process=2, tokens_per_rank=1024, width=128, itemsize=2, unique=4096
    )
    assert (columns["lookup_bytes"], columns["update_bytes"]) == (expected.lookup_bytes, expected.update_bytes)


def test_memory_of_a_rank_is_weights_state_and_its_part_of_the_arena(plan):
    table = plan("--json")["tables"]["words"]
    assert table["weights_bytes"] == 1_000_000 * 16 * 2
    assert table["state_bytes"] == 1_000_000 * 4
    assert table["bytes_of_rank"] == 36_000_000 + -(-table["arena_bytes_of_process"] // 2)


def test_time_follows_bandwidth_and_latency(plan):
    base = plan("--json", "--latency", 0, "--memory-bandwidth", 1e6)["columns"]["lookup_seconds"]
    assert plan("--json", "--latency", 0, "--memory-bandwidth", 1e6, "--bandwidth", 1.25)["columns"][
        "lookup_seconds"
    ] == pytest.approx(10 * base, rel=1e-3)
    late = plan("--json", "--latency", 500, "--memory-bandwidth", 1e6)["columns"]["lookup_seconds"]
    assert late - base == pytest.approx(2 * 500e-6), "two messages wait for one another"


def test_nothing_is_hidden_with_staleness_0_and_what_fits_behind_the_dense_part_with_1(plan):
    options = ("--json", "--bandwidth", 0.1, "--dense", 3.0)
    exact, late = plan(*options, staleness=0)["columns"], plan(*options)["columns"]
    total = exact["lookup_seconds"] + exact["update_seconds"]
    assert exact["exposed_seconds"] == pytest.approx(total)
    assert late["exposed_seconds"] == pytest.approx(total - 3e-3)
    assert plan("--json", "--dense", 1e4)["columns"]["exposed_seconds"] == pytest.approx(0, abs=1e-12)


def test_a_lookup_waits_for_the_forward_and_for_the_update(plan):
    late = plan("--json", "--dense", 1.0)["columns"]
    dense = 1e3 * (late["update_seconds"] + late["lookup_seconds"])

    def exposed(share):
        found = plan("--json", "--dense", dense, "--forward-share", share)["columns"]["exposed_seconds"]
        return pytest.approx(found, abs=1e-12)

    of_update = late["update_seconds"] / (dense * 1e-3)
    assert exposed(0.0) == exposed(of_update) == 0
    assert exposed(1.0) == late["lookup_seconds"]


@pytest.mark.parametrize(
    ("changes", "options", "layout", "reason"),
    [
        ({"processes": 1}, (), "columns", "nothing is sent"),
        ({"processes": 2, "ranks": 2, "width": 512}, (), "columns", "a step against"),
        ({"processes": 64, "ranks": 64, "width": 64, "tokens": 64 * 4096}, (), "rows", "by columns"),
        ({}, ("--unique-share", 0.1), "rows", "by columns"),
    ],
    ids=["one process", "wide and distinct", "many and narrow", "ids that repeat"],
)
def test_the_cheaper_layout_is_chosen_and_why_is_said(plan, changes, options, layout, reason):
    data = plan("--json", *options, **changes)
    assert data["choice"] == layout
    assert reason in data["because"]
    assert not data["rows_are_built"]
    out = plan(*options, **changes)
    assert f"Choice: {layout}, because {data['because']}." in out
    assert "Row sharding is not built yet" in out


def test_the_text_has_a_table_and_a_picture_and_pipes_well(plan):
    out = plan("--dense", 1.0, "--bandwidth", 1.0)
    assert "\x1b" not in out
    assert "  words  30.5 MiB  3.8 MiB" in out
    assert "█" in out
    assert "!" in out, "something is exposed"
    assert max(map(len, out.splitlines())) < 250


def test_the_picture_is_a_png_too(plan, tmp_path):
    pytest.importorskip("matplotlib")
    plan("--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_not_drawn_over_a_job(async_emb, tmp_path):
    job = tmp_path / "job.toml"
    job.write_bytes(good_job := (BROKEN[0].parent.parent / "good" / "axis_of_size_one.toml").read_bytes())
    status, _, error = async_emb("plan", "job.toml", "--plot", "job.toml", folder=tmp_path)
    assert status == 2
    assert "its name must end in .png" in error
    assert job.read_bytes() == good_job


def test_a_job_with_problems_gets_the_report_of_check(async_emb):
    path = BROKEN[0]
    status, out, _ = async_emb("plan", path.name, folder=path.parent)
    assert status == 1
    assert out == path.with_suffix(".txt").read_text()


def test_every_good_job_has_a_plan(async_emb):
    for path in (JOBS / "good").glob("*.toml"):
        assert async_emb("plan", path).status == 0, path.name
