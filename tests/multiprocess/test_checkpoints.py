"""A save in which somebody comes to harm was never there, and everybody else says who it was."""

from __future__ import annotations

import re
import signal

import pytest

from jax_bridge import Checkpoints
from tests.jax_bridge import _training as training

from . import _recovery as recovery

pytestmark = pytest.mark.multiprocess

PROGRAM = "tests.multiprocess._checkpoints"


SECONDS = 5  # of ASYNC_EMB_TIMEOUT_SECONDS, in those jobs in which somebody is missing


@pytest.fixture(scope="module")
def wanted() -> str:
    """What a run that nobody interrupts ends with."""
    with training.shared_step(4, 1) as step:
        return recovery.finish(step, training.start(step))


def restored(directory: str) -> list[str]:
    """What runs in this process end with that go on from each of the checkpoints that are taken for whole."""
    with training.shared_step(4, 1) as step:
        checkpoints = Checkpoints(directory, step)
        assert recovery.AT in checkpoints.steps()
        return [recovery.finish(step, checkpoints.restore(recovery.PARAMS, which)) for which in checkpoints.steps()]


def short(number: int) -> dict[str, str]:
    return {"ASYNC_EMB_TIMEOUT_SECONDS": str(SECONDS)}


@pytest.mark.parametrize("point", ["arrays", "manifest"])
def test_a_save_that_is_killed_leaves_the_last_complete_checkpoint(start, tmp_path, wanted, point):
    directory = tmp_path / "checkpoints"
    job = start(
        f"{PROGRAM}:hurt_during_a_save",
        processes=1,
        devices=4,
        directory=str(directory),
        fault="kill",
        victim=0,
        point=point,
    )
    job.processes[0].join(60)
    assert job.processes[0].exitcode == -signal.SIGKILL, job.all_output()
    left = sorted(path.name for path in directory.iterdir())
    assert left[0] == str(recovery.AT)
    assert left[1].startswith(f"{recovery.AT + 1}.orbax-checkpoint-tmp")
    assert restored(str(directory)) == [wanted]
    # What the killed save has left goes with the next one.
    with training.shared_step(4, 1) as step:
        checkpoints = Checkpoints(directory, step)
        checkpoints.save(recovery.go_on(step, checkpoints.restore(recovery.PARAMS), recovery.AT + 1))
    assert sorted(path.name for path in directory.iterdir()) == [str(recovery.AT), str(recovery.AT + 1)]


STOPPED = {
    (1, "arrays"): r"process 1 \(ranks 2, 3; devices 2048, 2049\) did not finish writing",
    # The other one may not have heard yet that the folder is there, or that both have finished.
    (0, "arrays"): r"process 0 \(ranks 0, 1; devices 0, 1\) did not (finish writing|make the folder of the checkpoint)",
    (0, "manifest"): r"process 0 \(ranks 0, 1; devices 0, 1\) did not (finish writing|complete the checkpoint)",
}


def test_a_process_that_is_stopped_during_a_save_is_named_in_time(start, tmp_path, wanted):
    jobs = {
        (victim, point): start(
            f"{PROGRAM}:hurt_during_a_save",
            processes=2,
            devices=2,
            directory=str(tmp_path / f"{victim} {point}"),
            environment=short,
            fault="stop",
            victim=victim,
            point=point,
        )
        for victim, point in STOPPED
    }
    for (victim, point), job in jobs.items():
        directory = str(tmp_path / f"{victim} {point}")
        result = job.wait_for_result(1 - victim)
        assert result["type"] == "CheckpointError"
        call = re.escape(f"async_emb Checkpoints.save of step {recovery.AT + 1} in {directory}")
        assert re.fullmatch(f"{call}: within {SECONDS} s {STOPPED[victim, point]}", result["text"]), result
        assert result["seconds"] < SECONDS + 10
        assert result["steps"] == [recovery.AT]
        assert restored(directory) == [wanted]
        # It goes on where it was. Process 0 may find everything written then, and complete the checkpoint.
        job.signal(victim, signal.SIGCONT)
        job.processes[victim].join(30)
        assert set(restored(directory)) == {wanted}


def test_a_save_in_which_process_0_dies_leaves_the_last_complete_checkpoint(start, tmp_path, wanted):
    """JAX ends the others, because their coordination service is gone."""
    directory = str(tmp_path / "checkpoints")
    arguments = {"directory": directory, "fault": "kill", "victim": 0, "point": "manifest"}
    job = start(f"{PROGRAM}:hurt_during_a_save", processes=2, devices=2, environment=short, **arguments)
    job.processes[1].join(60)
    assert job.processes[1].exitcode not in (None, 0), job.all_output()
    assert restored(directory) == [wanted]


def test_when_one_process_exits_during_a_save_every_other_one_names_it_and_ends_too(start, tmp_path, wanted):
    jobs = {
        size: start(
            f"{PROGRAM}:exits_during_a_save",
            processes=size,
            devices=4 // size,
            environment=short,
            directory=str(tmp_path / str(size)),
        )
        for size in (2, 4)
    }
    for size, job in jobs.items():
        directory = str(tmp_path / str(size))
        assert job.wait_for_ends() == [3 if number == 1 else 1 for number in range(size)], job.all_output()
        call = re.escape(f"async_emb Checkpoints.save of step {recovery.AT + 1} in {directory}: process 1 (rank")
        for number in set(range(size)) - {1}:
            text = job.outputs[number].read_text()
            assert re.search(rf"^[\w.]+\.CheckpointError: {call}.* has failed: SystemExit$", text, re.M), text
        assert restored(directory) == [wanted]


def test_a_process_that_fails_or_dies_during_a_save_is_named_in_time(start, tmp_path, wanted):
    directory = str(tmp_path / "checkpoints")
    job = start(f"{PROGRAM}:faults", processes=2, devices=2, directory=directory, environment=short)
    results = job.wait(90, may_die=[1])[0]
    number = recovery.AT + 1
    call = f"async_emb Checkpoints.save of step {number} in {directory}"
    peer = "process 1 (ranks 2, 3; devices 2048, 2049)"

    assert results["another call"]["type"] == "ContextError"
    assert results["another call"]["text"].startswith(
        f"{call}: {peer} is in another call, Checkpoints.restore of the latest in {directory}"
    )
    fails = results["fails"]
    assert fails["text"].startswith(f"{call}: {peer} has failed: async_emb: ")
    assert fails["text"].endswith("cannot be written: [Errno 28] No space left on device")
    assert fails["seconds"] < SECONDS
    # The next save goes well, and the one after it is cut short.
    assert results["steps"] == [number - 1, number]
    dies = results["dies"]
    assert dies["type"] == "CheckpointError"
    assert dies["text"] == (
        f"async_emb Checkpoints.save of step {number + 1} in {directory}: within {SECONDS} s {peer} "
        "did not finish writing"
    )
    assert dies["seconds"] < SECONDS + 10
    assert results["steps after"] == [number - 1, number]
    assert restored(directory) == [wanted] * 2


def test_processes_agree_whoever_came_alone_left_or_was_replaced(start):
    first, second, third = start(f"{PROGRAM}:agreements", processes=3).wait(90)
    wanted = [{"0": 0, "1": 1, "2": 2}, {"0": [10], "1": [11], "2": [12]}]
    for results in (first, second, third):
        assert results["many"] == [wanted] * 20
        assert results["after"] == wanted
    assert "async_emb a call: within 0.5 s process 2 (rank 2; device 4096) did not come" in first["alone"][0]["text"]
    for results in (first, third):
        assert results["left"]["text"] == "async_emb a call: process 1 (rank 1; device 2048) has failed: 'the reason'"
