"""Leaving a job: process 0 last, but without waiting for the dead.

JAX ends (SIGABRT) every process that is still in the job when the coordination service goes, which runs in process 0.
Whoever leaves says so, and whoever finds out that another process is missing says so for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import jax

from ..errors import ContextError
from . import coordination
from .timeouts import Patience

_BOARD = "async_emb/left"
# From saying so until a process has really left.
_DISCONNECT_SECONDS = 0.5
# For what is said here; nobody depends on it.
_SAYING_SECONDS = 2.0

_counted: set[int] = set()  # as gone, by this process


def shutdown(timeout_seconds: float = 30.0) -> None:
    """Leaves the job; runs by itself at the end of the program. Process 0 waits up to `timeout_seconds` for those of
    whom nobody has said that they are gone."""
    if not coordination.is_running():
        return
    _, size, here = coordination.numbers()
    with contextlib.suppress(ContextError):
        if here != 0:
            coordination.put(f"{_BOARD}/{here}", "", within=_SAYING_SECONDS)
        else:
            patience = Patience(timeout_seconds)
            while len(coordination.below(_BOARD)) < size - 1 and not patience.over():
                patience.pause()
            if size > 1:
                time.sleep(_DISCONNECT_SECONDS)  # they have said so, and hang up now: nothing tells when they have
    jax.distributed.shutdown()


def count_as_gone(processes: Iterable[int]) -> None:
    """Process 0 does not wait for these when it leaves."""
    _, _, here = coordination.numbers()
    with contextlib.suppress(ContextError):
        for process in set(processes) - {0, here}:
            _counted.add(process)
            coordination.put(f"{_BOARD}/{process}", "", within=_SAYING_SECONDS)


def take_back() -> None:
    """Those whom this process has counted as gone are there after all."""
    while _counted:
        come_back(_counted.pop())


def come_back(process: int) -> None:
    """`process` is in the job (again)."""
    coordination.delete(f"{_BOARD}/{process}")
