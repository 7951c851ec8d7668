"""What the processes of these tests do with checkpoints. Each function is the whole program of a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.multiprocess import _children
from tests.multiprocess._tables import digest_of, join

STEPS = 6
AT = 3  # steps before the checkpoint
PARAMS = {"shift": np.float32(0)}


def _go_on(step: Any, state: Any, first: int, last: int) -> Any:
    """The steps from number ``first`` up to ``last``, each with the next batch announced."""
    from tests.jax_bridge import _training as training

    batches = [*training.make_batches(STEPS), None]
    return training.train(step, state, [*zip(batches[first:last], batches[first + 1 : last + 1], strict=True)])[0]


def finish(step: Any, state: Any) -> str:
    """Trains to the end; the digest of everything."""
    from tests.jax_bridge import _training as training

    state = _go_on(step, state, int(state.step), STEPS)
    return digest_of(training.arrays_of(step, step.flush(state)))


def _prepared(number: int, size: int, port: int, directory: str, **options: Any) -> Any:
    """(step, its checkpoints, a state at the first step)."""
    from jax_bridge import Checkpoints
    from tests.jax_bridge import _training as training

    step = training.make_step(join(number, size, port, **options), 1)
    return step, Checkpoints(directory, step), training.start(step)


def train_until_killed(number: int, size: int, port: int, directory: str) -> None:
    """Saves in the middle of the pipeline and goes on."""
    step, checkpoints, state = _prepared(number, size, port, directory)
    state = _go_on(step, state, 0, AT)
    checkpoints.save(state)
    _go_on(step, state, AT, AT + 2)
    _children.say(f"has gone on {number}")
    time.sleep(100)


def resume(number: int, size: int, port: int, directory: str) -> Any:
    step, checkpoints, _ = _prepared(number, size, port, directory)
    with step:
        return [checkpoints.latest(), finish(step, checkpoints.restore(PARAMS))]


def _when(what: str, then: Callable[[], None]) -> None:
    """Calls ``then`` when a save comes to the point ``what``."""
    from jax_bridge import checkpoint_files

    if what == "arrays":
        write = checkpoint_files._write_array
        calls = []

        def write_array(*args: Any, **options: Any) -> None:
            calls.append(args)
            if len(calls) == 7:
                then()
            write(*args, **options)

        checkpoint_files._write_array = write_array
    else:  # all arrays are there, the manifest is not
        checksum = checkpoint_files._checksum

        def and_then(body: Any) -> int:
            then()
            return checksum(body)

        checkpoint_files._checksum = and_then


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_during_a_save(number: int, size: int, port: int, directory: str, point: str) -> None:
    step, checkpoints, state = _prepared(number, size, port, directory)
    state = _go_on(step, state, 0, AT)
    checkpoints.save(state)
    state = _go_on(step, state, AT, AT + 1)
    _when(point, _kill)
    checkpoints.save(state)


def faults(number: int, size: int, port: int, directory: str) -> Any:
    """What becomes of calls in which process 1 does something else, fails, or dies."""
    from jax_bridge import checkpoint_files

    step, checkpoints, state = _prepared(number, size, port, directory)
    results = {}
    state = _go_on(step, state, 0, AT)
    checkpoints.save(state)
    state = _go_on(step, state, AT, AT + 1)

    results["another call"] = _children.outcome(
        (lambda: checkpoints.save(state)) if number == 0 else (lambda: checkpoints.restore(PARAMS))
    )
    intact = checkpoint_files._write_array

    def fail() -> None:
        raise OSError(28, "No space left on device")

    if number == 1:
        _when("arrays", fail)
    results["fails"] = _children.outcome(lambda: checkpoints.save(state))
    checkpoint_files._write_array = intact
    checkpoints.save(state)
    state = _go_on(step, state, AT + 1, AT + 2)
    results["steps"] = checkpoints.steps()
    if number == 1:
        _when("arrays", _kill)
    results["dies"] = _children.outcome(lambda: checkpoints.save(state))
    results["steps after"] = checkpoints.steps()
    from jax_bridge import coordination

    coordination.put("async_emb/left/1", "")  # or leaving the job would wait for it
    return results


def agreements(number: int, size: int, port: int) -> Any:
    """Calls to which one process comes alone, leaves, or has been before it was replaced."""
    from jax_bridge import coordination
    from jax_bridge.agreement import Agreement
    from tests.jax_bridge import _training as training

    handle = training.make_tables(join(number, size, port))["users"].smallest_handle()

    def together(seconds: float = 30, leave: bool = False) -> Any:
        with Agreement(handle, "a call", seconds) as others:
            first = others.hear("say a number", number)
            if leave:
                raise KeyError("the reason")
            return [first, others.hear("say another", [number + 10])]

    results: dict[str, Any] = {}
    # A process that was killed has left these behind.
    if number == 1:
        board = Agreement(handle, "a call", 1)._board
        coordination.put(f"{board}/in/1", '{"attempt": "killed", "call": "a call"}')
        coordination.put(f"{board}/ack/1", "killed")
        _children.say("left behind")
    _children.wait_for("left behind")
    results["alone"] = [_children.outcome(lambda: together(0.5))] if number == 0 else []
    _children.say("came alone") if number == 0 else _children.wait_for("came alone")
    results["many"] = [together() for _ in range(20)]
    results["left"] = _children.outcome(lambda: together(leave=number == 1))
    results["after"] = together()
    return results
