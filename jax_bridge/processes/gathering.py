"""Processes come together for something that all of them do, and each knows then that every other one is there.

What they say stands on a board: a directory of JAX's key-value service. The lowest of them leads:

    in/<process>    I am here: a number drawn for this attempt, and what I have to say
    go              the leader has seen all of these attempts, and decides
    ack/<process>   I have read this very `go`, so I am alive, and mine is the attempt that it names
    fixed           the leader has all acknowledgements of this `go`: it counts

Whoever has read `fixed` takes its own notes off the board, and the leader takes off the rest when all have: or somebody
who has not read it yet would be taken for one who comes for the next time.

Nobody counts how often they have met. What is left of a process that was killed names an attempt that nobody
acknowledges, and a process that takes its place overwrites it and is asked anew; so survivors and newcomers meet like
everybody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..context import AsyncEmbContextHandle
from ..errors import ContextError
from . import coordination, leaving
from .timeouts import Patience
from .topology import describe_processes

# How long a process that gives up tries to take its notes off the board.
_TIDY_SECONDS = 1.0


class Absence(Exception):
    """Somebody did not come in time, or came and does not answer.

    Attributes:
        processes: who.
        came: whether they were there.
    """

    def __init__(self, processes: Sequence[int], *, came: bool) -> None:
        super().__init__(list(processes), came)
        self.processes = list(processes)
        self.came = came

    def describe(self, handle: AsyncEmbContextHandle) -> str:
        what = "came, but did not answer any more" if self.came else "did not come"
        return f"{describe_processes(handle, self.processes)} {what}"


class Decision(NamedTuple):
    """What the leader has fixed. Every process has the same."""

    id: str
    """No two decisions have the same."""
    value: Any
    """What ``decide`` returned, through JSON."""


class Gathering:
    """One attempt of this process to meet the others of a board.

    Args:
        board: the directory.
        everyone: the processes, ascending; the first one leads.
        here: the number of this process.
        patience: how long is waited in all.

    Attributes:
        attempt: the number of this attempt.
        present: what the others say who are here now, by process; of this process too.
        seen: the same, of those who have left again too.
    """

    def __init__(self, board: str, everyone: Sequence[int], here: int, patience: Patience) -> None:
        self.board, self.everyone, self.here, self.patience = board, tuple(everyone), here, patience
        self.leader = self.everyone[0]
        self.attempt = uuid.uuid4().hex
        self.present: dict[int, Any] = {}
        self.seen: dict[int, Any] = {}
        self._attempts: dict[int, str] = {}
        # Whoever gives up goes away: who is to blame is seen in what was there before.
        self._blame: list[int] = []
        self._go: dict[str, Any] = {}

    def gather(
        self,
        saying: Any,
        decide: Callable[[Mapping[int, Any]], Any],
        watch: Callable[[Mapping[str, str]], None] = lambda notes: None,
    ) -> Decision:
        """Waits until all are here and know it.

        Args:
            saying: what this process says, for JSON.
            decide: what the leader makes of what all say, for JSON. May raise.
            watch: sees the board in every round. May raise.

        Raises:
            Absence: somebody is missing when the patience is over.
            ServiceError: process 0 does not answer.
        """
        self._put(f"in/{self.here}", {"attempt": self.attempt, "says": saying})
        try:
            while True:
                notes = self._look()
                watch(notes)
                if self._lead(notes, decide) if self.here == self.leader else self._follow(notes):
                    break
                if self.patience.over():
                    raise self._absence()
                self.patience.pause()
        except BaseException as error:
            if isinstance(error, Absence):
                leaving.count_as_gone(error.processes)
            with contextlib.suppress(ContextError):
                self._take_off(within=_TIDY_SECONDS)
                if self._go and self.here == self.leader:
                    coordination.delete(f"{self.board}/go", within=_TIDY_SECONDS)
            raise
        self._take_off(within=self.patience.remaining())
        if self.here == self.leader:
            self._await_readers()
        leaving.take_back()
        return Decision(self._go["id"], self._go["decision"])

    # ---- rounds ----

    def _look(self) -> dict[str, str]:
        notes = coordination.below(self.board, within=self.patience.remaining())
        entries = {int(process): json.loads(text) for process, text in _part("in/", notes)}
        self.present = {process: entry["says"] for process, entry in entries.items()}
        self._attempts = {process: entry["attempt"] for process, entry in entries.items()}
        self.seen.update(self.present)
        if self.seen.keys() == self.present.keys():
            self._blame = self._silent(notes)
        return notes

    def _lead(self, notes: Mapping[str, str], decide: Callable[[Mapping[int, Any]], Any]) -> bool:
        if any(process not in self.present for process in self.everyone):
            return False
        attempts = {str(process): self._attempts[process] for process in self.everyone}
        if self._go.get("attempts") != attempts:
            decision = decide({process: self.present[process] for process in self.everyone})
            self._go = {"id": uuid.uuid4().hex, "attempts": attempts, "decision": json.loads(json.dumps(decision))}
            self._put("go", self._go)
            return False
        if any(notes.get(f"ack/{process}") != self._go["id"] for process in self.everyone if process != self.here):
            return False
        coordination.put(f"{self.board}/fixed", self._go["id"], within=self.patience.remaining())
        return True

    def _follow(self, notes: Mapping[str, str]) -> bool:
        if "go" in notes:
            go = json.loads(notes["go"])
            if go["attempts"].get(str(self.here)) == self.attempt and go["id"] != self._go.get("id"):
                self._go = go
                coordination.put(f"{self.board}/ack/{self.here}", go["id"], within=self.patience.remaining())
        return bool(self._go) and notes.get("fixed") == self._go["id"]

    def _await_readers(self) -> None:
        self.patience.quicken()
        while True:
            notes = coordination.below(self.board, within=self.patience.remaining())
            unread = [int(process) for process, text in _part("ack/", notes) if text == self._go["id"]]
            if not unread:
                break
            if self.patience.over():
                leaving.count_as_gone(unread)
                raise Absence(unread, came=True)
            self.patience.pause()
        for key in ("go", "fixed"):
            coordination.delete(f"{self.board}/{key}", within=self.patience.remaining())

    # ---- who is missing ----

    def _absence(self) -> Absence:
        if missing := [process for process in self.everyone if process not in self.seen]:
            return Absence(missing, came=False)
        if self.here in self._blame:
            gone = [process for process in self.everyone if process not in self.present]
            return Absence(gone or self._blame, came=True)
        return Absence(self._blame, came=True)

    def _silent(self, notes: Mapping[str, str]) -> list[int]:
        """Who has to do something next, of those who are here."""
        go = json.loads(notes["go"]) if "go" in notes else {"attempts": {}}
        if any(self._attempts.get(p) != go["attempts"].get(str(p), "") for p in self.everyone):
            return [self.leader]
        followers = [process for process in self.everyone if process != self.leader]
        return [process for process in followers if notes.get(f"ack/{process}") != go["id"]] or [self.leader]

    # ---- notes ----

    def _put(self, key: str, value: Any) -> None:
        coordination.put(f"{self.board}/{key}", json.dumps(value), within=self.patience.remaining())

    def _take_off(self, within: float) -> None:
        coordination.delete(f"{self.board}/in/{self.here}", within=within)
        if self.here != self.leader:
            coordination.delete(f"{self.board}/ack/{self.here}", within=within)


def name_of(processes: Sequence[int]) -> str:
    """A short name for these processes, the same in all of them."""
    return hashlib.blake2b(repr(tuple(processes)).encode(), digest_size=8).hexdigest()


def _part(directory: str, notes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((key.removeprefix(directory), text) for key, text in notes.items() if key.startswith(directory))
