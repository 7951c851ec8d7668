"""Opening a context over several processes: they meet, compare what each of them means, and connect.

All that is said is on one board, a directory of JAX's key-value service that the processes of one mesh share for one
name and purpose. The lowest of them leads:

    in/<process>    I am here: a number drawn for this attempt, and everything that must agree
    go              the leader has seen all of these attempts; where its store is
    ack/<process>   I have read this very `go`, so I am alive, and mine is the attempt that it names
    fixed           the leader has all acknowledgements of this `go`: connect
    told/<process>  somebody who stands at the board of another mesh has looked here

Nobody counts meetings. What is left of a process that was killed names an attempt that nobody acknowledges, and a
process that takes its place overwrites it and is asked anew; so survivors and newcomers meet like everybody else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from torch_ext.common.context_key import differences

from . import coordination
from .context import AsyncEmbContextHandle
from .errors import ContextError, Problem, raise_problems
from .topology import describe_processes, group_processes, processes_of

# Of the bytes that processes exchange, and of this board.
PROTOCOL = 1

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25
# How long the leader waits, after the meeting, for the others to take their notes off the board.
_TIDY_SECONDS = 5.0
# How long somebody may stand at the board of another mesh before that is called a mistake.
_OTHER_BOARD_SECONDS = 3.0

_store_of: dict[tuple[int, ...], str] = {}


def meet(
    handle: AsyncEmbContextHandle, timeout_seconds: float, gpus: Mapping[int, int] | None = None
) -> list[Any | None]:
    """Connects the processes that hold ranks of the same group. Every process with a device of the mesh must call it.

    Args:
        handle: whose groups.
        timeout_seconds: how long to wait for the other processes.
        gpus: where the mesh is of GPUs, the numbers that this process gives to its own, by device id.

    Returns one transport (``torch_ext._C.Transport``) a group of the handle; None where this process holds all ranks
    of the group, or none. On GPUs three instead: for the hosts' notices, for their pulse, and between the GPUs
    (``torch_ext._C.DeviceTransport``). `group_processes` says which process is which peer.

    Raises:
        ContextError: the processes do not mean the same (every field that differs is one of `problems`), or one of
            them did not come in time, or cannot be reached.
    """
    groups = group_processes(handle)
    everyone, here = processes_of(handle.mesh), jax.process_index()
    if here not in everyone or len(everyone) == 1:
        return [None] * len(groups)
    deadline = _Deadline(timeout_seconds)
    meeting = _Meeting(handle, everyone, here, deadline, on_gpus=bool(gpus))
    with meeting.attending():
        go = meeting.agree()
        _compare(handle, go.configurations)
        return _connect(handle, go, everyone, here, deadline, gpus or {})


def versions() -> dict[str, str | None]:
    """The installed versions, which must agree between processes."""
    from torch_ext.build import installed_version

    names = {"async_emb": "async-emb", "torch": "torch", "jax": "jax", "jaxlib": "jaxlib"}
    return {name: installed_version(distribution) for name, distribution in names.items()}


def configuration(handle: AsyncEmbContextHandle) -> dict[str, Any]:
    """Everything that must agree between processes, by the name under which a difference is reported."""
    from .runtime import timeout_seconds  # which opens contexts, and so imports this

    agreed = {**versions(), "protocol": PROTOCOL, "ASYNC_EMB_TIMEOUT_SECONDS": timeout_seconds()}
    return {**json.loads(handle.key()), **agreed}


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    def remaining(self) -> float:
        return max(0.0, self._start + self.seconds - time.monotonic())

    def passed(self) -> float:
        return time.monotonic() - self._start


@dataclasses.dataclass(frozen=True)
class _Go:
    """What the leader has fixed, read by all."""

    id: str
    address: str  # of the store
    attempts: Mapping[int, str]
    hosts: Mapping[int, str]
    configurations: Mapping[int, Mapping[str, Any]]

    def to_json(self) -> str:
        # Equal configurations are written once: with many processes there is one, and a value holds 4 MB.
        distinct: list[Any] = []
        index = {}
        for process, value in self.configurations.items():
            if value not in distinct:
                distinct.append(value)
            index[process] = distinct.index(value)
        fields = dataclasses.asdict(dataclasses.replace(self, configurations={}))
        return json.dumps({**fields, "distinct": distinct, "index": index})

    @classmethod
    def from_json(cls, text: str) -> _Go:
        fields = json.loads(text)
        return cls(
            id=fields["id"],
            address=fields["address"],
            attempts={int(process): attempt for process, attempt in fields["attempts"].items()},
            hosts={int(process): host for process, host in fields["hosts"].items()},
            configurations={int(process): fields["distinct"][i] for process, i in fields["index"].items()},
        )


class _Meeting:
    def __init__(
        self,
        handle: AsyncEmbContextHandle,
        everyone: tuple[int, ...],
        here: int,
        deadline: _Deadline,
        *,
        on_gpus: bool = False,
    ) -> None:
        self.handle, self.everyone, self.here, self.deadline = handle, everyone, here, deadline
        self.on_gpus = on_gpus
        self.leader = everyone[0]
        self.attempt = uuid.uuid4().hex
        name, purpose = (urllib.parse.quote(text, safe="") for text in (handle.name, handle.purpose))
        self.boards = f"async_emb/meet/{name}/{purpose}"
        self.set = hashlib.blake2b(repr(everyone).encode(), digest_size=8).hexdigest()
        self.board = f"{self.boards}/{self.set}"
        self.seen: dict[int, dict[str, Any]] = {}
        # Whoever gives up goes away: who is to blame is seen in what was there before.
        self.before_anybody_left: tuple[Mapping[str, str], Mapping[int, dict[str, Any]]] = {}, {}
        self.go: _Go | None = None

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Says that this process is here; takes that back, whatever happens."""
        from torch_ext import nccl, process_groups

        try:
            process_groups.require_interfaces()  # before the others count on this process
            if self.on_gpus:
                nccl.require_environment()
            host = process_groups.local_address_towards(coordination.numbers()[0] or "localhost:1")
        except process_groups.ProcessGroupError as error:
            raise _cannot_open(self.handle, str(error)) from None
        entry = {
            "attempt": self.attempt,
            "host": host,
            "processes": self.everyone,
            "configuration": configuration(self.handle),
        }
        coordination.put(f"{self.board}/in/{self.here}", json.dumps(entry))
        try:
            yield
        finally:
            with contextlib.suppress(ContextError):
                self._leave()

    def agree(self) -> _Go:
        """Waits until all are here and know it."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            notes = coordination.below(self.board)
            present = {
                int(key.removeprefix("in/")): json.loads(text) for key, text in notes.items() if key.startswith("in/")
            }
            self.seen.update(present)
            if self.seen.keys() == present.keys():
                self.before_anybody_left = notes, present
            self._listen(notes)
            if self._lead(notes, present) if self.here == self.leader else self._follow(notes):
                assert self.go is not None
                return self.go
            if self.deadline.remaining() == 0:
                raise self._nobody_came(present)
            if self.deadline.passed() > _OTHER_BOARD_SECONDS and pause == _LONGEST_PAUSE_SECONDS:
                self._look_at_other_boards(present)
            time.sleep(min(pause, self.deadline.remaining()))  # JAX's service has no wait for a change of a directory
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _lead(self, notes: Mapping[str, str], present: Mapping[int, Mapping[str, Any]]) -> bool:
        if any(process not in present for process in self.everyone):
            return False
        attempts = {process: present[process]["attempt"] for process in self.everyone}
        if self.go is None or self.go.attempts != attempts:
            from torch_ext import process_groups

            hosts = {process: present[process]["host"] for process in self.everyone}
            try:
                hosts[self.here] = _reachable_host(hosts, self.here)
                address = process_groups.serve_store(hosts[self.here])
            except process_groups.ProcessGroupError as error:
                raise _cannot_open(self.handle, str(error)) from None
            configurations = {process: present[process]["configuration"] for process in self.everyone}
            self.go = _Go(uuid.uuid4().hex, address, attempts, hosts, configurations)
            coordination.put(f"{self.board}/go", self.go.to_json())
            return False
        if any(notes.get(f"ack/{process}") != self.go.id for process in self.everyone if process != self.here):
            return False
        coordination.put(f"{self.board}/fixed", self.go.id)
        return True

    def _follow(self, notes: Mapping[str, str]) -> bool:
        if "go" in notes:
            go = _Go.from_json(notes["go"])
            if go.attempts.get(self.here) == self.attempt and (self.go is None or self.go.id != go.id):
                self.go = go
                coordination.put(f"{self.board}/ack/{self.here}", go.id)
        return self.go is not None and notes.get("fixed") == self.go.id

    def _leave(self) -> None:
        coordination.delete(f"{self.board}/in/{self.here}")
        if self.here != self.leader:
            coordination.delete(f"{self.board}/ack/{self.here}")
            return
        if self.go is None:
            return
        # The others must have read `fixed` before it goes.
        tidy = _Deadline(_TIDY_SECONDS)
        while tidy.remaining() > 0:
            notes = coordination.below(self.board)
            if not any(key.startswith("ack/") and text == self.go.id for key, text in notes.items()):
                break
            time.sleep(_FIRST_PAUSE_SECONDS)
        for key in ("go", "fixed"):
            coordination.delete(f"{self.board}/{key}")

    def _look_at_other_boards(self, present: Mapping[int, object]) -> None:
        for key, text in coordination.below(self.boards).items():
            other_set, _, rest = key.partition("/in/")
            if other_set == self.set or not rest.isdecimal():
                continue
            process, note = int(rest), json.loads(text)
            if process in self.everyone and process not in present and self.here in note["processes"]:
                # It would not find this process any more.
                told = {"attempt": note["attempt"], "processes": self.everyone, "by": self.here}
                coordination.put(f"{self.boards}/{other_set}/told/{process}", json.dumps(told))
                raise self._other_mesh(process, note["processes"])

    def _listen(self, notes: Mapping[str, str]) -> None:
        if (text := notes.get(f"told/{self.here}")) is not None:
            coordination.delete(f"{self.board}/told/{self.here}")
            told = json.loads(text)
            if told["attempt"] == self.attempt:
                raise self._other_mesh(told["by"], told["processes"])

    def _other_mesh(self, process: int, processes: Sequence[int]) -> ContextError:
        return _cannot_open(
            self.handle,
            f"its mesh is over processes {list(self.everyone)} in process {self.here}, but over processes "
            f"{list(processes)} in process {process}: give every process the same mesh",
        )

    def _nobody_came(self, present: Mapping[int, Mapping[str, Any]]) -> ContextError:
        missing = [process for process in self.everyone if process not in self.seen]
        came = [process for process in self.everyone if process in self.seen]
        if missing:
            what = f"{describe_processes(self.handle, missing)} did not come"
        else:
            silent = self._silent(*self.before_anybody_left)
            if self.here in silent:
                silent = [process for process in self.everyone if process not in present] or silent
            what = f"{describe_processes(self.handle, silent)} came, but did not answer any more"
        error = _cannot_open(self.handle, f"within {self.deadline.seconds:g} s {what}")
        error.add_note(f"Seen: {describe_processes(self.handle, came)}")
        error.add_note(
            "Every process that owns a device of the mesh must open the context; see what the missing ones are doing. "
            "ASYNC_EMB_TIMEOUT_SECONDS is how long is waited"
        )
        seen = {process: entry["configuration"] for process, entry in self.seen.items()}
        for problem in _differences(self.handle, seen):
            error.add_note(f"Also: {problem.message}")
        return error

    def _silent(self, notes: Mapping[str, str], present: Mapping[int, Mapping[str, Any]]) -> list[int]:
        go = _Go.from_json(notes["go"]) if "go" in notes else None
        if go is None or any(present.get(p, {}).get("attempt") != go.attempts.get(p) for p in self.everyone):
            return [self.leader]
        followers = [process for process in self.everyone if process != self.leader]
        return [process for process in followers if notes.get(f"ack/{process}") != go.id] or [self.leader]


def _compare(handle: AsyncEmbContextHandle, configurations: Mapping[int, Mapping[str, Any]]) -> None:
    if problems := _differences(handle, configurations):
        raise_problems(problems)


def _differences(handle: AsyncEmbContextHandle, configurations: Mapping[int, Mapping[str, Any]]) -> list[Problem]:
    describe = lambda who: describe_processes(handle, list(who))  # noqa: E731
    return differences(handle.name, configurations, describe, whose="processes")


def _connect(
    handle: AsyncEmbContextHandle,
    go: _Go,
    everyone: tuple[int, ...],
    here: int,
    deadline: _Deadline,
    gpus: Mapping[int, int],
) -> list[Any | None]:
    from torch_ext import nccl, process_groups

    if _store_of.get(everyone, go.address) != go.address:  # its process was replaced
        process_groups.release_store(_store_of[everyone])
    _store_of[everyone] = go.address
    opened: list[Any] = []
    links: list[Any | None] = []
    try:
        for group, processes in enumerate(group_processes(handle)):
            if here not in processes or len(processes) == 1:
                links.append(None)
                continue
            place, size = processes.index(here), len(processes)
            purposes = ("", "/pulse") if gpus else ("",)
            for purpose in purposes:
                transport = process_groups.connect(
                    go.address,
                    place,
                    size,
                    hosts_store=here == everyone[0],
                    prefix=f"{go.id}/{group}{purpose}",
                    timeout_seconds=max(1.0, deadline.remaining()),
                    host=_reachable_host(go.hosts, here),
                )
                opened.append(transport)
            if not gpus:
                links.append(transport)
                continue
            ranks = handle.flatten_replicas[group * handle.group_size : (group + 1) * handle.group_size]
            between_gpus = nccl.connect(
                go.address,
                place,
                size,
                gpu=next(gpus[device] for device in ranks if device in gpus),
                prefix=f"{go.id}/{group}",
                timeout_seconds=max(1.0, deadline.remaining()),
            )
            links.append((*opened[-2:], between_gpus))
    except process_groups.ProcessGroupError as error:
        for transport in opened:
            transport.end()
        raise _cannot_open(handle, str(error)) from None
    return links


def _reachable_host(hosts: Mapping[int, str], here: int) -> str:
    """The address under which the others reach this process. A process beside the coordinator knows itself as
    127.0.0.1, which says nothing to another machine."""
    from torch_ext import process_groups

    own = hosts[here]
    if ipaddress.ip_address(own).is_loopback:
        for other in hosts.values():
            if not ipaddress.ip_address(other).is_loopback:
                return str(process_groups.local_address_towards(process_groups.join_address(other, 1)))
    return own


def _cannot_open(handle: AsyncEmbContextHandle, why: str) -> ContextError:
    return ContextError(f"async_emb context {handle.name!r} cannot be opened: {why}")
