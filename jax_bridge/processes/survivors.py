"""When a computation over several processes fails in XLA's part of it: who is to blame.

XLA's collectives say that a connection broke or that nobody came in time, in words of their own, and not who it was.
The contexts may know: another process announces there why it has given up. Where they do not, the processes that have
failed call a roll among themselves, over JAX's key-value service, and whoever does not answer is missing. Then the
contexts fail too, with these words, so that every later call and every other process says the same.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Sequence

import jax

from .. import runtime
from ..context import AsyncEmbContextHandle
from ..errors import ContextError, FailedContextError
from . import coordination, leaving
from .topology import describe_processes, processes_of

# How long those who have failed wait for the others to say so too: failures reach them within a moment of each other.
PATIENCE_SECONDS = 2.0
# And how long before process 0, on whose service all others depend, may leave without those who do not.
LEAVING_SECONDS = 5.0

_OVER = "async_emb/start_over"
_OF_A_COLLECTIVE = re.compile("gloo|nccl|mpi_|collective|rendezvous", re.IGNORECASE)
_BOARD = "async_emb/failed"
_PAUSE_SECONDS = 0.05


def blame(handles: Sequence[AsyncEmbContextHandle], error: BaseException, where: str) -> None:
    """Where ``error`` is of one of XLA's collectives in ``where``: raises what is known about it as FailedContextError,
    and fails the contexts with that, those of them that are open over several processes. Takes up to PATIENCE_SECONDS.
    """
    working = [h for h in handles if runtime.is_open(h) and len(processes_of(h.mesh)) > 1]
    # Anything else is this process's own trouble, and the others are innocent.
    of_a_collective = isinstance(error, jax.errors.JaxRuntimeError) and _OF_A_COLLECTIVE.search(str(error))
    if not working or not of_a_collective:
        return
    silent = _call_the_roll(working)
    handle = working[0]
    what = " ".join(str(error).split("\n")[0].split())[:300]
    if silent:
        told = (
            f"async_emb {handle.name!r} lost {describe_processes(handle, silent)} in {where}: it does not answer "
            f"within {PATIENCE_SECONDS:g} s, and a computation over all processes failed: {what}"
        )
    else:
        told = (
            f"async_emb {handle.name!r} failed in {where}: all of {describe_processes(handle, _everyone(handle))} "
            f"answer, but a computation over them failed, because a connection broke or they do not run the same "
            f"program: {what}"
        )
    for handle in working:
        runtime.abort_context(handle, told)
    failure = FailedContextError(told)
    failure.add_note(runtime.AFTER_A_FAILURE)
    raise failure from error


def say_failed(processes: Iterable[int]) -> None:
    """Lets those of ``processes`` that call the roll know that this one lives. Whoever has not failed too within
    LEAVING_SECONDS counts as gone, and process 0 does not wait for it when it ends. Does not wait."""
    others = [process for process in processes if process != jax.process_index()]
    threading.Thread(target=_say_and_look, args=(others,), daemon=True).start()


def take_back() -> None:
    """Undoes `say_failed`, once the processes have met again."""
    with contextlib.suppress(ContextError):
        coordination.delete(f"{_BOARD}/{jax.process_index()}")


def start_over(survivors: Iterable[int], *, timeout_seconds: float = 60.0) -> None:
    """Makes room, in a job on CPU, for a process that takes the place of one that died. All survivors call it, with
    their numbers, after they have closed their steps; then the new one may start (``initialize(rejoin=True)``).

    Every array, device and mesh of this process is gone after that: XLA keeps the broken connections of its collectives
    as long as its devices. Make the mesh, the tables and the step anew, and go on from a snapshot.

    Raises:
        ContextError: not all survivors came in time.
    """
    everyone, here = sorted(survivors), jax.process_index()
    deadline = time.monotonic() + timeout_seconds
    coordination.forget_devices()
    coordination.delete(f"{_BOARD}/{here}")
    coordination.put(f"{_OVER}/{here}", "")
    while True:
        come = coordination.below(_OVER)
        if here == everyone[0] and all(str(process) in come for process in everyone):
            coordination.forget_addresses()
            coordination.delete(f"{_OVER}/")
            return
        if here != everyone[0] and str(here) not in come:
            return
        if time.monotonic() > deadline:
            missing = [process for process in everyone if str(process) not in come]
            raise ContextError(f"async_emb start_over: processes {missing} did not come within {timeout_seconds:g} s")
        time.sleep(_PAUSE_SECONDS)


def _everyone(handle: AsyncEmbContextHandle) -> list[int]:
    return list(processes_of(handle.mesh))


def _say() -> None:
    with contextlib.suppress(ContextError):
        coordination.put(f"{_BOARD}/{jax.process_index()}", "")


def _say_and_look(others: Sequence[int]) -> None:
    _say()
    deadline = time.monotonic() + LEAVING_SECONDS
    with contextlib.suppress(ContextError):
        while silent := [p for p in others if str(p) not in coordination.below(_BOARD)]:
            if time.monotonic() > deadline:
                leaving.count_as_gone(silent)
                return
            time.sleep(_PAUSE_SECONDS)


def _call_the_roll(handles: Iterable[AsyncEmbContextHandle]) -> list[int]:
    """The processes that do not answer. Raises FailedContextError where a context is told meanwhile."""
    handles = list(handles)
    missing = [process for process in _everyone(handles[0]) if process != jax.process_index()]
    answered: list[set[int]] = []
    stop = threading.Event()

    def ask() -> None:  # the service may not answer at all
        _say()
        while not stop.is_set():
            try:
                answered.append({int(process) for process in coordination.below(_BOARD)})
            except ContextError:
                return
            stop.wait(_PAUSE_SECONDS)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while missing and time.monotonic() < deadline:
            for handle in handles:
                runtime.require_working(handle)
            if answered:
                missing = [process for process in missing if process not in answered[-1]]
            time.sleep(_PAUSE_SECONDS)
        if missing and not answered:
            return [0]  # it runs the service
        for handle in handles:
            runtime.require_working(handle)
    finally:
        stop.set()
    return missing
