"""A process comes to harm: every other one ends by itself, and says who it was, in which call, of which step."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of two repetitions. Two jobs run side by side: mostly they wait."""
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(2) as pool:
        yield {cell: pool.submit(faults.measure, cell, 2, 3.0, folder) for cell in REDUCED}


@pytest.mark.parametrize("cell", REDUCED, ids=" ".join)
def test_a_fault_is_named_by_everybody_else(cell, outcomes):
    for outcome in outcomes[cell].result():
        assert not outcome.problems, "\n".join(outcome.problems)


NAMED = {
    "before start": r"ContextError: async_emb context '\w+' cannot be opened: within 3 s process 1 \(.*\) did not come",
    # By the context, or, where one of XLA's collectives was the first to notice, by the roll that was called then.
    "between start and done": r"FailedContextError: async_emb '\w+' lost "
    r"(rank 1 \(device 2048, process 1\)|process 1 \(rank 1; device 2048\)) in .*step \d",
}


@pytest.mark.parametrize("point", NAMED)
def test_when_one_process_exits_every_other_one_names_it_and_ends_too(start, point):
    before = faults.shared_memory()
    program, sizes = "tests.multiprocess._faulty:exits", (2, 4)
    jobs = [start(program, processes=size, environment=lambda _: TIMEOUT, point=point) for size in sizes]
    for size, job in zip(sizes, jobs, strict=True):
        assert job.wait_for_ends() == [3 if number == 1 else 1 for number in range(size)], job.all_output()
        for number in set(range(size)) - {1}:
            text = job.outputs[number].read_text()
            assert re.search(rf"^[\w.]+\.{NAMED[point]}", text, re.MULTILINE), text
        assert_nothing_is_left(job, before)


def assert_nothing_is_left(job, before) -> None:
    assert faults.shared_memory() == before
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", job.port))


def test_a_signal_ends_a_wait_for_another_process_and_everybody_is_told(start):
    """Process 2 stops in the middle of a lookup, or of an update; process 1 waits for it, and so does process 0."""
    seconds = 12
    environment = {"ASYNC_EMB_TIMEOUT_SECONDS": str(seconds)}
    jobs = {
        (which, point): start(
            "tests.multiprocess._faulty:interrupted", processes=3, environment=lambda _: environment, point=point
        )
        for which, point in [
            (signal.SIGINT, "lookup wait"),
            (signal.SIGINT, "update start"),
            (signal.SIGTERM, "update start"),
        ]
    }
    for (which, _), job in jobs.items():
        job.wait_for_file("hurt", 60)
        time.sleep(0.5)  # until the others wait
        job.signal(1, which)
        begin = time.monotonic()
        if which == signal.SIGTERM:
            job.processes[1].join(10)
            assert job.processes[1].exitcode == -which
        else:
            while "\nKeyboardInterrupt" not in job.outputs[1].read_text():
                assert time.monotonic() - begin < seconds / 2, job.all_output()
                time.sleep(0.02)
    for (which, _), job in jobs.items():
        told = job.wait_for_result(0, 60)
        assert told["type"] == "FailedContextError"
        words = (
            r"process 1 was interrupted \(KeyboardInterrupt\) in step \d" if which == signal.SIGINT else "process [12]"
        )
        assert re.search(words, told["text"]), told
        job.processes[1].join(30)
        assert job.processes[1].exitcode == (1 if which == signal.SIGINT else -which)


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


def test_every_point_of_the_matrix_is_known():
    assert set(_faulty.CALLS) == set(_faulty.POINTS) - {"checkpoint"}
    assert os.path.isdir("/dev/shm")
