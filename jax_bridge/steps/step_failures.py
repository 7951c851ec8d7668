"""What becomes of a training step that fails: who is to blame, and who has been told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import jax

from .. import runtime
from ..context import AsyncEmbContextHandle
from ..embedding import AsyncEmbedding
from ..errors import FailedContextError
from ..placing import spans_processes
from ..processes import survivors
from ..processes.topology import processes_of


class StepFailures:
    """Turns what fails in XLA into the words of a context, and lets the other processes know.

    Attributes:
        told: a context has failed, and the caller knows.
        spans_processes: whether the tables lie over several processes.
    """

    def __init__(self, tables: Mapping[str, AsyncEmbedding]) -> None:
        self.told = False
        self._tables = tables
        self._mesh = next(iter(tables.values())).mesh
        self.spans_processes = spans_processes(self._mesh)
        self._others_know = False

    @contextlib.contextmanager
    def named(self, where: str) -> Iterator[None]:
        """Whatever fails in XLA is raised in the words of a context, where one knows more."""
        try:
            yield
        except Exception as error:
            self.say_who(error, where)
            raise

    def say_who(self, error: BaseException, where: str) -> None:
        """Raises FailedContextError where a context has failed, or can be told that ``error`` is another process's."""
        try:
            for table in self._tables.values():
                table.require_working()  # its own words, instead of XLA's around them
            if self.spans_processes:
                survivors.blame(self._open_handles(), error, where)
        except FailedContextError:
            self.note()
            raise

    def note(self) -> None:
        """The caller is being told; the other processes may know that this one lives."""
        self.told = True
        if self.spans_processes and not self._others_know:
            self._others_know = True
            survivors.say_failed(processes_of(self._mesh))

    def met_again(self) -> None:
        """The contexts were opened again, by all processes."""
        if self._others_know:
            self._others_know = False
            survivors.take_back()

    def interrupt(self, signal: BaseException, where: str) -> bool:
        """Over several processes what runs may wait for another one, and the others wait for this one: ends it all.
        Over one it does nothing, and says so."""
        if not self.spans_processes:
            return False
        what = f"process {jax.process_index()} was interrupted ({type(signal).__name__}) in {where}"
        for handle in self._open_handles():
            runtime.abort_context(handle, f"async_emb {handle.name!r}: {what}")
        self.note()
        return True

    def _open_handles(self) -> list[AsyncEmbContextHandle]:
        return [handle for table in self._tables.values() for handle in table.open_handles()]
