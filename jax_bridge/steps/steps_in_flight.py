"""The steps that were dispatched and may still run: waiting for them, and raising what they have to say."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .. import runtime
from ..context import AsyncEmbContextHandle
from ..embedding import AsyncEmbedding
from .step_failures import StepFailures
from .step_program import Programs
from .waiting import wait_until_ready

# How many steps the host dispatches before it waits for the oldest. XLA:CPU runs the devices of a step, and launches
# later ones, on the same threads, as many as there are devices. A launch waits, and keeps its thread, while 32
# programs are under way on its device; where every thread is taken so, or by a device that waits for one that has not
# begun, nothing moves any more. A few steps hide the dispatch, and leave room for a caller's own programs.
STEPS_IN_FLIGHT = 4


class StepsInFlight:
    """Of one training step, the calls of which each are a step here.

    Attributes:
        next: the number of the next step: ``state.step`` when it is called.
    """

    def __init__(self, tables: Mapping[str, AsyncEmbedding], programs: Programs, failures: StepFailures) -> None:
        self.next = 0
        self._tables = tables
        self._programs = programs
        self._failures = failures
        self._losses: collections.deque[Any] = collections.deque()

    def add(self, loss: Any) -> None:
        """The next step was dispatched; ``loss`` is there when it has finished."""
        self._losses.append(loss)
        self.next += 1

    def forget(self) -> None:
        self._losses.clear()

    def check(self, *, wait: bool) -> None:
        """Raises what the contexts have to say about the steps that have finished; with ``wait``, about all."""
        wait = wait or self._failures.spans_processes  # all processes must raise at the same call
        count = len(self._losses)
        self.wait(at_most=0 if wait else STEPS_IN_FLIGHT - 1)
        if not wait and 0 < count == len(self._losses):
            return
        if self._losses:
            if not any(table.has_news() for table in self._tables.values()):
                return
            self.wait(at_most=0)  # a refusal can be taken back only where nothing runs
        for table in self._tables.values():
            table.check()

    def wait(self, *, at_most: int = 0) -> None:
        """Forgets the steps that have finished, which raises where one has failed, and waits until no more than
        ``at_most`` are left."""
        try:
            while len(self._losses) > at_most or (self._losses and self._losses[0].is_ready()):
                oldest = self._losses.popleft()
                if self._failures.spans_processes:
                    wait_until_ready(oldest)
                else:
                    jax.block_until_ready(oldest)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.interrupt(error)
            for handle in self._open_handles():
                runtime.drain(handle)  # buffers that the failed step has lent go back with the exception
            if isinstance(error, Exception):  # Ctrl-C is not somebody's fault
                self._failures.say_who(error, f"step {self.next - len(self._losses) - 1}")
            raise

    def interrupt(self, signal: BaseException) -> None:
        """Over several processes, ends what runs: it may wait for another process, and the others for this one."""
        if self._failures.interrupt(signal, f"step {self.next}"):
            self.forget()

    def _open_handles(self) -> Iterable[AsyncEmbContextHandle]:
        for compiled in self._programs.values():
            for handle in compiled.program.handles.values():
                if runtime.is_open(handle):
                    yield handle
