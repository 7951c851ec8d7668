"""A killed job goes on from its checkpoint as if nothing had been, and a save that is killed was never there."""

from __future__ import annotations

import signal

import pytest

from jax_bridge import Checkpoints
from tests.jax_bridge import _training as training

from . import _checkpoints as program

pytestmark = pytest.mark.multiprocess

PROGRAM = "tests.multiprocess._checkpoints"


@pytest.fixture(scope="module")
def wanted() -> str:
    """What a run that nobody interrupts ends with."""
    with training.shared_step(4, 1) as step:
        return program.finish(step, training.start(step))


def restored(directory: str, wanted_step: int) -> str:
    """What a run in this process ends with that goes on from the latest checkpoint."""
    with training.shared_step(4, 1) as step:
        checkpoints = Checkpoints(directory, step)
        assert checkpoints.latest() == wanted_step
        return program.finish(step, checkpoints.restore(program.PARAMS))


def test_a_killed_job_resumes_to_the_bits_of_one_that_was_not(start, tmp_path, wanted):
    sizes = {"processes": 2, "devices": 2, "directory": str(tmp_path / "checkpoints")}
    job = start(f"{PROGRAM}:train_until_killed", **sizes)
    for number in range(2):
        job.wait_for_file(f"has gone on {number}")
    for number in range(2):
        job.signal(number, signal.SIGKILL)
    for result in start(f"{PROGRAM}:resume", **sizes).wait(90):
        assert result == [program.AT, wanted]
    assert restored(sizes["directory"], program.AT) == wanted  # in one process with the same devices


@pytest.mark.parametrize("point", ["arrays", "manifest"])
def test_a_save_that_is_killed_leaves_the_last_complete_checkpoint(start, tmp_path, wanted, point):
    directory = tmp_path / "checkpoints"
    job = start(f"{PROGRAM}:killed_during_a_save", processes=1, devices=4, directory=str(directory), point=point)
    job.processes[0].join(60)
    assert job.processes[0].exitcode == -signal.SIGKILL, job.all_output()
    left = sorted(path.name for path in directory.iterdir())
    assert left[0] == str(program.AT)
    assert left[1].startswith(f"{program.AT + 1}.orbax-checkpoint-tmp")
    assert restored(str(directory), program.AT) == wanted
    # What the killed save has left goes with the next one.
    with training.shared_step(4, 1) as step:
        checkpoints = Checkpoints(directory, step)
        state = checkpoints.restore(program.PARAMS)
        state, _ = training.train(step, state, [(training.make_batches(4)[3], None)])
        checkpoints.save(state)
    assert sorted(path.name for path in directory.iterdir()) == [str(program.AT), str(program.AT + 1)]


def test_a_process_that_fails_or_dies_during_a_save_is_named_in_time(start, tmp_path, wanted):
    directory, seconds = str(tmp_path / "checkpoints"), 6
    job = start(
        f"{PROGRAM}:faults",
        processes=2,
        devices=2,
        directory=directory,
        environment=lambda number: {"ASYNC_EMB_TIMEOUT_SECONDS": str(seconds)},
    )
    results = job.wait(90, may_die=[1])[0]
    call = f"async_emb Checkpoints.save of step 4 in {directory}"
    peer = "process 1 (ranks 2, 3; devices 2048, 2049)"

    assert results["another call"]["type"] == "ContextError"
    assert results["another call"]["text"].startswith(
        f"{call}: {peer} is in another call, Checkpoints.restore of the latest in {directory}"
    )
    fails = results["fails"]
    assert fails["text"].startswith(f"{call}: {peer} has failed: async_emb: ")
    assert fails["text"].endswith("cannot be written: [Errno 28] No space left on device")
    assert fails["seconds"] < seconds
    # The next save goes well, and the one after it is cut short.
    assert results["steps"] == [3, 4]
    dies = results["dies"]
    assert dies["type"] == "CheckpointError"
    assert dies["text"] == (
        f"async_emb Checkpoints.save of step 5 in {directory}: within {seconds} s {peer} did not finish writing"
    )
    assert dies["seconds"] < seconds + 10
    assert results["steps after"] == [3, 4]
    assert restored(directory, 4) == wanted


def test_processes_agree_whoever_came_alone_left_or_was_replaced(start):
    first, second, third = start(f"{PROGRAM}:agreements", processes=3).wait(90)
    wanted = [{"0": 0, "1": 1, "2": 2}, {"0": [10], "1": [11], "2": [12]}]
    for results in (first, second, third):
        assert results["many"] == [wanted] * 20
        assert results["after"] == wanted
    assert "async_emb a call: within 0.5 s process 2 (rank 2; device 4096) did not come" in first["alone"][0]["text"]
    for results in (first, third):
        assert results["left"]["text"] == "async_emb a call: process 1 (rank 1; device 2048) has failed: 'the reason'"
