"""A job goes on as if nothing had been: after one process was replaced, and after all of them were killed."""

from __future__ import annotations

import signal

import pytest

from jax_bridge import Checkpoints
from tests.jax_bridge import _training as training

from . import _recovery as program

pytestmark = pytest.mark.multiprocess

PROGRAM = "tests.multiprocess._recovery"


def uninterrupted(ranks: int) -> str:
    """What a run in one process ends with to which nothing happens."""
    with training.shared_step(ranks, 1) as step:
        return program.finish(step, training.start(step))


def test_survivors_and_a_process_in_the_place_of_a_dead_one_end_with_the_bits_of_an_uninterrupted_run(start, tmp_path):
    job = start(f"{PROGRAM}:replaced", processes=3, directory=str(tmp_path))
    for number in (0, 2):
        job.wait_for_file(f"closed {number}", 90)
    one = {"processes": 1, "first": 1, "size": 3, "port": job.port, "rejoin": True}
    (newcomer,) = start(f"{PROGRAM}:replaced", **one, directory=str(tmp_path)).wait(90)
    first, _, third = job.wait(90, may_die=[1])
    for survivor in (first, third):
        assert "rank 1 (device 2048, process 1)" in survivor["told"]
    wanted = uninterrupted(3)
    for result in (first, newcomer, third):
        assert result["found"] == [program.AT]
        assert result["from_checkpoint"] == wanted
        assert result["from_snapshot"] == wanted


def test_a_job_that_was_killed_in_the_middle_of_a_step_resumes_to_the_bits_of_one_that_was_not(start, tmp_path):
    sizes = {"processes": 2, "devices": 2, "directory": str(tmp_path / "checkpoints")}
    job = start(f"{PROGRAM}:train_for_ever", **sizes)
    for number in range(2):
        job.wait_for_file(f"has gone on {number}")
    for number in range(2):
        job.signal(number, signal.SIGKILL)
    wanted = uninterrupted(4)
    # At once, on the same port: a process that is being cleared away may still hold it.
    for result in start(f"{PROGRAM}:resume", **sizes, port=job.port).wait(90):
        assert result == [program.AT, wanted]
    with training.shared_step(4, 1) as step:  # in one process with the same devices
        checkpoints = Checkpoints(sizes["directory"], step)
        assert program.finish(step, checkpoints.restore(program.PARAMS)) == wanted
