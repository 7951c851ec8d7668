"""Ctrl-C that always works: at once while nothing is at stake, and within a second while XLA computes.

Python raises KeyboardInterrupt between two instructions of the main thread. That is too late while XLA compiles, and
an import of native code may swallow it. So the main thread has nothing to do but wait, and our own handler takes note.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

# How long interrupted work may take to end by itself.
GRACE_SECONDS = 0.5


@contextlib.contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` on Ctrl-C instead of raising KeyboardInterrupt. For the main thread only."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interruptible(work: Callable[[], T], stop: threading.Event) -> T:
    """`work()`, on a thread of its own.

    On Ctrl-C sets `stop`, gives `work` GRACE_SECONDS to end, and raises KeyboardInterrupt. The thread may still run
    then: leave the process with `os._exit`.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    # A list, as a second Ctrl-C in the middle of `stop.set()` would wait for itself.
    interrupts: list[None] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="training", daemon=True)
    with on_interrupt(lambda: interrupts.append(None)):
        thread.start()
        while thread.is_alive() and not interrupts:
            thread.join(0.1)
        if interrupts:
            stop.set()
            thread.join(GRACE_SECONDS)
            raise KeyboardInterrupt
    if errors:
        raise errors[0]
    return results[0]
