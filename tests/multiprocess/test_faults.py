"""A process comes to harm: every other one ends by itself, and says who it was, in which call, of which step."""

from __future__ import annotations

import os
import signal
import time

import pytest

from . import _faulty, faults

pytestmark = pytest.mark.multiprocess

TIMEOUT = {"ASYNC_EMB_TIMEOUT_SECONDS": "3"}
# One of each kind of fault at every point between them, by both programs; `faults.py` runs all.
REDUCED = [
    faults.Cell("own_step", "kill", "lookup wait"),
    faults.Cell("own_step", "kill", "checkpoint"),
    faults.Cell("own_step", "link", "lookup start"),
    faults.Cell("own_step", "configuration", "learning rate"),
    faults.Cell("train", "kill", "update wait"),
    faults.Cell("train", "stop", "lookup start"),
]


@pytest.mark.parametrize("cell", REDUCED, ids=" ".join)
def test_a_fault_is_named_by_everybody_else(cell, tmp_path):
    for outcome in faults.measure(cell, 2, 3.0, tmp_path):
        assert not outcome.problems, "\n".join(outcome.problems)


def interrupt(start, which: signal.Signals):
    job = start("tests.multiprocess._faulty:interrupted", processes=2, stop_seconds=60)
    job.wait_for_file("waits 0", 60)
    time.sleep(0.5)
    begin = time.monotonic()
    job.signal(0, which)
    job.processes[0].join(30)
    return job, time.monotonic() - begin


def test_ctrl_c_ends_a_wait_for_a_missing_process(start):
    job, seconds = interrupt(start, signal.SIGINT)
    assert job.processes[0].exitcode == 1
    assert "KeyboardInterrupt" in job.outputs[0].read_text()
    assert seconds < 10, "the default timeout is half an hour"


def test_sigterm_ends_a_process_at_once(start):
    job, seconds = interrupt(start, signal.SIGTERM)
    assert job.processes[0].exitcode == -signal.SIGTERM
    assert seconds < 2


def test_a_process_that_is_stuck_is_named_and_one_that_is_late_is_awaited(start):
    stuck = start(
        "tests.multiprocess._faulty:late", processes=2, devices=2, seconds=1000, environment=lambda number: TIMEOUT
    )
    (told, _) = stuck.wait(60, may_die=[1])
    assert told["type"] == "FailedContextError"
    assert "timed out after 3 s in update start of step 3: missing rank 2 (device 2048, process 1)" in told["text"]
    slow = start(
        "tests.multiprocess._faulty:late",
        processes=2,
        devices=2,
        seconds=4,
        environment=lambda number: {"ASYNC_EMB_TIMEOUT_SECONDS": "30"},
    )
    assert [told["type"] for told in slow.wait(60)] == [None, None]


def test_contexts_that_come_and_go_leave_nothing(start):
    for seen in start("tests.multiprocess._faulty:many_contexts", processes=2).wait(90):
        files, threads, kib = zip(*seen, strict=True)
        assert files[-1] <= files[4], seen
        assert threads[-1] <= threads[4] + 2, seen
        assert kib[-1] < kib[4] + 8 * 1024, seen


def test_a_job_starts_again_at_once_after_it_was_killed(start, tmp_path):
    job = start("tests.multiprocess._faulty:late", processes=2, devices=1, seconds=60)
    deadline = time.monotonic() + 60
    while not (job.directory / "hurt").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for number in (0, 1):
        job.signal(number, signal.SIGKILL)
    for process in job.processes:
        process.join(30)  # the system takes a moment to clear away a dead process and its sockets
    again = start("tests.multiprocess._faulty:late", processes=2, devices=1, seconds=0, port=job.port)
    assert [told["type"] for told in again.wait(90)] == [None, None]


def test_survivors_go_on_with_a_process_that_takes_the_place_of_a_dead_one(start):
    job = start("tests.multiprocess._faulty:recover", processes=3)
    job.wait_for_file("closed 0", 90)
    (newcomer,) = start(
        "tests.multiprocess._faulty:recover",
        processes=1,
        first=1,
        size=3,
        port=job.port,
        rejoin=True,
        directory=str(job.directory),
    ).wait(90)
    first, _, third = job.wait(90, may_die=[1])
    for survivor in (first, third):
        assert "rank 1 (device 2048, process 1)" in survivor["told"]
        assert survivor["digest"] == newcomer["digest"]


def test_every_point_of_the_matrix_is_known():
    assert set(_faulty.CALLS) == set(_faulty.POINTS) - {"checkpoint"}
    assert os.path.isdir("/dev/shm")
