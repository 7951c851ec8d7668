"""What the processes of these tests do with checkpoints. Each function is the whole program of a process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.multiprocess import _children
from tests.multiprocess._recovery import AT, PARAMS, go_on
from tests.multiprocess._tables import join


def _prepared(number: int, size: int, port: int, directory: str, **options: Any) -> Any:
    """(step, its checkpoints, a state at the first step)."""
    from jax_bridge import Checkpoints
    from tests.jax_bridge import _training as training

    step = training.make_step(join(number, size, port, **options), 1)
    return step, Checkpoints(directory, step), training.start(step)


def _when(what: str, then: Callable[[], None]) -> None:
    """Calls ``then`` when a save comes to the point ``what``."""
    from jax_bridge.saving import checkpoint_files

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


HARM = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: sys.exit(3),
}


def hurt_during_a_save(
    number: int, size: int, port: int, directory: str, fault: str, victim: int, point: str, expected: bool = True
) -> Any:
    """The second checkpoint is not completed, because a process comes to harm. What the others are told."""
    step, checkpoints, state = _prepared(number, size, port, directory)
    state = go_on(step, state, AT)
    checkpoints.save(state)
    state = go_on(step, state, AT + 1)
    if number == victim:
        _when(point, HARM[fault])
    if not expected:
        return checkpoints.save(state)
    return {**_children.outcome(lambda: checkpoints.save(state)), "steps": checkpoints.steps()}


def exits_during_a_save(number: int, size: int, port: int, directory: str) -> None:
    """Process 1 leaves the program with status 3. The others do not expect it."""
    _children.end_as_a_program(
        lambda: hurt_during_a_save(number, size, port, directory, "exit", 1, "arrays", expected=False)
    )


def faults(number: int, size: int, port: int, directory: str) -> Any:
    """What becomes of calls in which process 1 does something else, fails, or dies."""
    from jax_bridge.saving import checkpoint_files

    step, checkpoints, state = _prepared(number, size, port, directory)
    results = {}
    state = go_on(step, state, AT)
    checkpoints.save(state)
    state = go_on(step, state, AT + 1)

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
    state = go_on(step, state, AT + 2)
    results["steps"] = checkpoints.steps()
    if number == 1:
        _when("arrays", HARM["kill"])
    results["dies"] = _children.outcome(lambda: checkpoints.save(state))
    results["steps after"] = checkpoints.steps()
    return results


def agreements(number: int, size: int, port: int) -> Any:
    """Calls to which one process comes alone, leaves, or has been before it was replaced."""
    from jax_bridge.processes import coordination
    from jax_bridge.processes.agreement import Agreement
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
        coordination.put(f"{board}/in/1", '{"attempt": "killed", "says": "a call"}')
        coordination.put(f"{board}/ack/1", "killed")
        _children.say("left behind")
    _children.wait_for("left behind")
    results["alone"] = [_children.outcome(lambda: together(0.5))] if number == 0 else []
    _children.say("came alone") if number == 0 else _children.wait_for("came alone")
    results["many"] = [together() for _ in range(20)]
    results["left"] = _children.outcome(lambda: together(leave=number == 1))
    results["after"] = together()
    return results
