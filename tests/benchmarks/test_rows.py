"""The benchmarks' own arithmetic: what a goal means, what a row says, and that nothing is lost on the way to a file."""

from __future__ import annotations

import json

import pytest

from benchmarks.cpu.row import Options, Row, as_json, at_most, faster, from_json, within
from benchmarks.cpu.table import BEGIN, END, HEADERS, as_markdown, in_short, summary, write_into
from benchmarks.timing import Times, alternately


def row(ours: float = 10.0, theirs: float = 40.0, **changes) -> Row:
    values = {
        "work": "update",
        "setting": "1M x 64",
        "peer": "somebody",
        "ours": Times(ours, ours * 1.5, 50),
        "theirs": Times(theirs, theirs * 1.5, 50),
        "checked": "bit for bit",
    }
    return Row(**values | changes)


@pytest.mark.parametrize(
    ("goal", "ours", "theirs", "met", "value", "text"),
    [
        (at_most(1.0), 10, 10, True, 1.0, "≤ 1.00 × its time"),
        (at_most(0.25), 3, 10, False, 0.3, "≤ 0.25 × its time"),
        (faster(10), 1, 10, True, 10.0, "≥ 10 × faster"),
        (faster(10), 1, 9, False, 9.0, "≥ 10 × faster"),
        (within(8), 18, 10, True, 8.0, "≤ 8.0 µs more"),
        (within(8), 19, 10, False, 9.0, "≤ 8.0 µs more"),
    ],
)
def test_a_goal_bounds_ours_beside_theirs(goal, ours, theirs, met, value, text):
    measured = row(ours, theirs, goal=goal)
    assert measured.is_met is met
    assert measured.value == pytest.approx(value)
    assert goal.text("µs") == text


def test_without_a_goal_a_row_says_how_much_faster_and_is_neither_met_nor_missed():
    assert row().is_met is None
    assert row().value == 4.0


def test_the_share_of_a_copy_is_of_the_bytes_that_must_move():
    assert row(ours=100.0, moved=400_000, copy=8e9).share_of_copy == pytest.approx(0.5)
    assert row(moved=400_000).share_of_copy is None


def test_a_row_survives_its_way_through_a_file():
    for goal in (None, at_most(1.0), faster(3)):
        before = row(goal=goal, moved=8, copy=1e9, note="a note")
        assert from_json(json.loads(json.dumps(as_json(before)))) == before


def test_the_table_has_a_line_for_each_row_and_marks_what_was_missed():
    table = as_markdown([row(goal=faster(2)), row(goal=faster(5)), row(ours=2500, theirs=5000)]).splitlines()
    assert table[0].count("|") == len(HEADERS) + 1
    assert "| 4 × faster | ≥ 2 × faster |" in table[2]
    assert "| **4 × faster** | ≥ 5 × faster |" in table[3]
    assert "2.5 ms (3.75)" in table[4]
    assert summary([row(goal=faster(2)), row(goal=faster(5)), row()]).startswith("1 of 2 rows with a goal reach it\n")


def test_in_short_there_is_a_line_for_each_work_with_its_worst_and_best_result():
    gathers = [row(ours, 10, work="gather", goal=at_most(1.0)) for ours in (9, 12, 5)]
    updates = [row(4, 40, goal=faster(10))]
    lines = in_short([*gathers, row(), *updates, row(1, 2, work="add")]).splitlines()
    assert lines[2:] == [
        "| gather | somebody | 1.20 × its time to 0.50 × its time | ≤ 1.00 × its time | 2 of 3 |",
        "| update | somebody | 10 × faster | ≥ 10 × faster | yes |",
    ]


def test_the_table_goes_between_the_marks_of_a_file_and_nowhere_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(readme, "new\n")
    assert readme.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    readme.write_text(f"{END} {BEGIN}")
    with pytest.raises(ValueError, match="needs one line"):
        write_into(readme, "new\n")
    assert readme.read_text() == f"{END} {BEGIN}"


def test_runs_take_turns_and_each_comes_first_equally_often():
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = alternately(runs, 4, warm_up=2, before={"b": lambda: calls.append("before b")})
    rounds = [calls[i : i + 4] for i in range(0, len(calls), 4)]
    assert [next(x for x in one if x != "before b") for one in rounds] == list("abcabc")
    assert all(one[one.index("b") - 1] == "before b" for one in rounds)
    assert {name: found.count for name, found in times.items()} == {"a": 4, "b": 4, "c": 4}
    with pytest.raises(ValueError, match="no runs named d to prepare; there are a, b, c"):
        alternately(runs, 1, before={"d": lambda: None})


def test_fifty_iterations_count_and_a_quick_run_has_fewer():
    assert Options().repetitions >= 50 > Options(quick=True).repetitions
