"""A call that several processes make together, in rounds: each says something, and goes on when it has heard all.

A process that does not come, or fails, ends the call in every other process with an error that names it. In one process
there is nobody to wait for. What is said goes through JAX's key-value service, on a board of the processes:

    in/<process>                     I am here: a number drawn for this call, and what the call is
    go                               the lowest process has seen all of these
    ack/<process>                    I have read this very `go`, so I am alive, and mine is the number that it names
    fixed                            the lowest process has all acknowledgements of this `go`: begin. Everybody takes
                                     the acknowledgement back, and the lowest process begins when all have
    said/<go>/<round>/<process>      what a process says in a round
    failed/<go>/<process>            why a process has left

Nobody counts calls, so a process that takes the place of a dead one meets the survivors like everybody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax

from . import coordination
from .context import AsyncEmbContextHandle
from .errors import CheckpointError, ContextError
from .topology import describe_processes, processes_of

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25


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
        self._go = ""
        self._was_told = False  # that another process has failed
        members = hashlib.blake2b(repr(self.everyone).encode(), digest_size=8).hexdigest()
        self._board = f"async_emb/agree/{members}"

    @property
    def leads(self) -> bool:
        return self.here == self.leader

    def __enter__(self) -> Agreement:
        if len(self.everyone) > 1:
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not self._go or self._was_told:  # nobody needs to hear twice
            return
        with contextlib.suppress(ContextError):
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            coordination.put(f"{self._board}/failed/{self._go}/{self.here}", text)

    def hear(self, what: str, mine: Any = None) -> dict[int, Any]:
        """What every process says, by process; they call it in the same order with the same ``what``, which is for
        messages: "did not" ``what``.

        Raises:
            CheckpointError: one of them did not come in time, or has failed.
        """
        if len(self.everyone) == 1:
            return {self.here: mine}
        board = f"{self._board}/said/{self._go}/{what.replace(' ', '-')}"
        coordination.put(f"{board}/{self.here}", json.dumps(mine))
        said: dict[int, Any] = {}

        def complete() -> bool:
            said.update({int(process): json.loads(text) for process, text in coordination.below(board).items()})
            return len(said) == len(self.everyone)

        def missing() -> str:
            return f"{self._named(p for p in self.everyone if p not in said)} did not {what}"

        self._wait(complete, missing)
        return said

    # ---- meeting ----

    def _begin(self) -> None:
        attempt = uuid.uuid4().hex
        entry = json.dumps({"attempt": attempt, "call": self.call})
        mine, own_ack = f"{self._board}/in/{self.here}", f"{self._board}/ack/{self.here}"
        coordination.put(mine, entry)
        go: dict[str, Any] = {}
        seen: set[int] = set()
        acks: dict[int, str] = {}

        def complete() -> bool:
            notes = coordination.below(self._board)
            present = {int(key[3:]): json.loads(text) for key, text in notes.items() if key.startswith("in/")}
            seen.update(present)
            acks.update({int(key[4:]): text for key, text in notes.items() if key.startswith("ack/")})
            if self.leads:
                return self._lead(go, present, acks)
            if "go" in notes and (found := json.loads(notes["go"])) != go:
                if found["attempts"].get(str(self.here)) != attempt:
                    return False
                go.update(found)
                coordination.put(own_ack, go["id"])
            return bool(go) and notes.get("fixed") == go["id"]

        def missing() -> str:
            away = [p for p in self.everyone if p not in seen]
            if away:
                return f"{self._named(away)} did not come"
            silent = [p for p in self.everyone if p != self.here and not (go and acks.get(p) == go["id"])]
            return f"{self._named(silent if self.leads else [self.leader])} came, but does not answer any more"

        def all_have_begun() -> bool:
            notes = coordination.below(f"{self._board}/ack")
            acks.clear()
            acks.update({int(process): text for process, text in notes.items() if text == go["id"]})
            return not acks

        try:
            self._wait(complete, missing)
        finally:
            with contextlib.suppress(ContextError):
                coordination.delete(mine)
                coordination.delete(own_ack)
        if self.leads:
            # Or somebody who has not seen yet that this call has begun would be taken for one who comes to the next.
            self._wait(all_have_begun, lambda: f"{self._named(acks)} came, but does not answer any more")
        self._go = go["id"]
        if different := {p: call for p, call in self._calls(go).items() if call != self.call}:
            process, call = next(iter(different.items()))
            raise ContextError(
                f"async_emb {self.call}: {self._named([process])} is in another call, {call}: every process with a "
                "device of the mesh must make the same calls of Checkpoints, in the same order"
            )

    def _lead(self, go: dict[str, Any], present: Mapping[int, Mapping[str, Any]], acks: Mapping[int, str]) -> bool:
        if go and all(acks.get(p) == go["id"] for p in self.everyone if p != self.here):
            # All are in this call, so nobody reads any more what was said in an earlier one.
            for old in ("said/", "failed/"):
                coordination.delete(f"{self._board}/{old}")
            coordination.put(f"{self._board}/fixed", go["id"])
            return True
        if any(p not in present for p in self.everyone):
            return False
        attempts = {str(p): present[p]["attempt"] for p in self.everyone}
        if go.get("attempts") != attempts:
            calls = {str(p): present[p]["call"] for p in self.everyone}
            go.update(id=uuid.uuid4().hex, attempts=attempts, calls=calls)
            coordination.put(f"{self._board}/go", json.dumps(go))
        return False

    def _calls(self, go: Mapping[str, Any]) -> dict[int, str]:
        return {int(process): call for process, call in go["calls"].items()}

    def _wait(self, complete: Callable[[], bool], missing: Callable[[], str]) -> None:
        end, pause = time.monotonic() + self.seconds, _FIRST_PAUSE_SECONDS
        while not complete():
            if self._go and (failed := coordination.below(f"{self._board}/failed/{self._go}")):
                self._was_told = True
                process, text = next(iter(failed.items()))
                raise CheckpointError(f"async_emb {self.call}: {self._named([int(process)])} has failed: {text}")
            left = end - time.monotonic()
            if left <= 0:
                error = CheckpointError(f"async_emb {self.call}: within {self.seconds:g} s {missing()}")
                error.add_note(
                    "Every process with a device of the mesh must make this call. ASYNC_EMB_TIMEOUT_SECONDS is how "
                    "long is waited."
                )
                raise error
            time.sleep(min(pause, left))  # JAX's service has no wait for a change of a directory
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _named(self, processes: Any) -> str:
        return describe_processes(self.handle, list(processes))
