"""A call that several processes make together, in rounds: each says something, and goes on when it has heard all.

A process that does not come, or fails, ends the call in every other process with an error that names it. In one process
there is nobody to wait for. They gather first; then on the same board of JAX's key-value service:

    said/<decision>/<round>/<process>      what a process says in a round
    failed/<decision>/<process>            why a process has left
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from ..context import AsyncEmbContextHandle
from ..errors import CheckpointError, ContextError
from . import coordination, leaving
from .gathering import Absence, Gathering, name_of
from .timeouts import Patience
from .topology import describe_processes, processes_of

# For saying why this process leaves; it may be because nobody can hear it.
_LEAVING_SECONDS = 1.0


class Agreement:
    """The processes of ``handle``'s mesh in one call. A context manager: whoever leaves by an exception tells the
    others.

    Args:
        handle: says which processes, and names their ranks in messages.
        call: what is called, for messages; must be the same in every process.
        timeout_seconds: how long one wait may last.
    """

    def __init__(self, handle: AsyncEmbContextHandle, call: str, timeout_seconds: float) -> None:
        self.handle, self.call, self.seconds = handle, call, timeout_seconds
        self.everyone, self.here = processes_of(handle.mesh), jax.process_index()
        self.leader = self.everyone[0]
        self._board = f"async_emb/agree/{name_of(self.everyone)}"
        self._decision = ""  # its id, once all have come
        self._was_told = False  # that another process has failed

    @property
    def leads(self) -> bool:
        return self.here == self.leader

    def __enter__(self) -> Agreement:
        if len(self.everyone) > 1:
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not self._decision or self._was_told:  # nobody needs to hear twice
            return
        with contextlib.suppress(ContextError):
            says = isinstance(error, Exception) and str(error)  # KeyboardInterrupt and SystemExit say nothing
            text = str(error).splitlines()[0] if says else type(error).__name__
            coordination.put(f"{self._board}/failed/{self._decision}/{self.here}", text, within=_LEAVING_SECONDS)

    def hear(self, what: str, mine: Any = None) -> dict[int, Any]:
        """What every process says, by process; they call it in the same order with the same ``what``, which is for
        messages: "did not" ``what``.

        Raises:
            CheckpointError: one of them did not come in time, or has failed.
        """
        if len(self.everyone) == 1:
            return {self.here: mine}
        patience = Patience(self.seconds)
        board = f"{self._board}/said/{self._decision}/{what.replace(' ', '-')}"
        try:
            coordination.put(f"{board}/{self.here}", json.dumps(mine), within=self.seconds)
            while True:
                notes = coordination.below(board, within=patience.remaining())
                if len(notes) == len(self.everyone):
                    return {int(process): json.loads(text) for process, text in notes.items()}
                self._raise_what_another_says(patience)
                if patience.over():
                    missing = [process for process in self.everyone if str(process) not in notes]
                    leaving.count_as_gone(missing)
                    raise self._given_up(f"{self._named(missing)} did not {what}")
                patience.pause()
        except coordination.ServiceError as error:
            raise self._given_up(f"{self._named([0])} did not {what}", error) from None

    # ---- parts ----

    def _begin(self) -> None:
        gathering = Gathering(self._board, self.everyone, self.here, Patience(self.seconds))
        try:
            decision = gathering.gather(self.call, self._calls)
        except Absence as absence:
            raise self._given_up(absence.describe(self.handle)) from None
        except coordination.ServiceError as error:
            raise self._given_up(f"{self._named([0])} did not answer", error) from None
        self._decision = decision.id
        calls = {int(process): call for process, call in decision.value.items()}
        if different := {process: call for process, call in calls.items() if call != self.call}:
            process, call = next(iter(different.items()))
            raise ContextError(
                f"async_emb {self.call}: {self._named([process])} is in another call, {call}: every process with a "
                "device of the mesh must make the same calls of Checkpoints, in the same order"
            )

    def _calls(self, calls: Mapping[int, str]) -> Mapping[int, str]:
        # All have come to this call, so nobody reads any more what was said in an earlier one.
        for old in ("said/", "failed/"):
            coordination.delete(f"{self._board}/{old}", within=self.seconds)
        return calls

    def _raise_what_another_says(self, patience: Patience) -> None:
        failed = coordination.below(f"{self._board}/failed/{self._decision}", within=patience.remaining())
        for process, text in failed.items():
            self._was_told = True
            raise CheckpointError(f"async_emb {self.call}: {self._named([int(process)])} has failed: {text}")

    def _given_up(self, why: str, cause: BaseException | None = None) -> CheckpointError:
        error = CheckpointError(f"async_emb {self.call}: within {self.seconds:g} s {why}")
        if cause is not None:
            error.add_note(str(cause))
        error.add_note(
            "Every process with a device of the mesh must make this call. ASYNC_EMB_TIMEOUT_SECONDS is how long is "
            "waited."
        )
        return error

    def _named(self, processes: list[int]) -> str:
        return describe_processes(self.handle, processes)
