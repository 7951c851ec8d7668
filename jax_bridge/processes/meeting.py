"""Opening a context over several processes: they gather, compare what each of them means, and connect.

The processes of one mesh gather on a board of their own for each name and purpose. Beside what a gathering writes:

    told/<process>  somebody who stands at the board of another mesh has looked here
"""

from __future__ import annotations

import ipaddress
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from torch_ext.common.context_key import differences

from ..context import AsyncEmbContextHandle
from ..errors import ContextError, Problem, raise_problems
from . import coordination
from .gathering import Absence, Gathering, name_of
from .timeouts import Patience
from .topology import describe_processes, group_processes, processes_of

# Of the bytes that processes exchange, and of this board.
PROTOCOL = 2

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
    patience = Patience(timeout_seconds)
    agreed = _Meeting(handle, everyone, here, patience, on_gpus=bool(gpus)).agree()
    if problems := _differences(handle, agreed.configurations):
        raise_problems(problems)
    return _connect(handle, agreed, everyone, here, patience, gpus or {})


def versions() -> dict[str, str | None]:
    """The installed versions, which must agree between processes."""
    from torch_ext.build import installed_version

    names = {"async_emb": "async-emb", "torch": "torch", "jax": "jax", "jaxlib": "jaxlib"}
    return {name: installed_version(distribution) for name, distribution in names.items()}


def configuration(handle: AsyncEmbContextHandle) -> dict[str, Any]:
    """Everything that must agree between processes, by the name under which a difference is reported."""
    from ..runtime import timeout_seconds  # which opens contexts, and so imports this

    agreed = {**versions(), "protocol": PROTOCOL, "ASYNC_EMB_TIMEOUT_SECONDS": timeout_seconds()}
    return {**json.loads(handle.key()), **agreed}


class _Agreed:
    """What the leader has fixed, read by all."""

    def __init__(self, id: str, decision: Mapping[str, Any]) -> None:
        self.id = id
        self.store: str = decision["store"]  # its address
        self.hosts: dict[int, str] = {int(process): host for process, host in decision["hosts"].items()}
        distinct = decision["distinct"]
        self.configurations = {int(process): distinct[i] for process, i in decision["configuration"].items()}


class _Meeting:
    def __init__(
        self,
        handle: AsyncEmbContextHandle,
        everyone: tuple[int, ...],
        here: int,
        patience: Patience,
        *,
        on_gpus: bool = False,
    ) -> None:
        self.handle, self.everyone, self.here, self.patience = handle, everyone, here, patience
        self.on_gpus = on_gpus
        name, purpose = (urllib.parse.quote(text, safe="") for text in (handle.name, handle.purpose))
        self.boards = f"async_emb/meet/{name}/{purpose}"
        self.set = name_of(everyone)
        self.board = f"{self.boards}/{self.set}"
        self.gathering = Gathering(self.board, everyone, here, patience)

    def agree(self) -> _Agreed:
        """Waits until all are here and know it."""
        from torch_ext import nccl, process_groups

        try:
            process_groups.require_interfaces()  # before the others count on this process
            if self.on_gpus:
                nccl.require_environment()
            host = process_groups.local_address_towards(coordination.numbers()[0] or "localhost:1")
            saying = {
                "attempt": self.gathering.attempt,
                "host": host,
                "processes": self.everyone,
                "configuration": configuration(self.handle),
            }
            decision = self.gathering.gather(saying, self._decide, self._watch)
        except process_groups.ProcessGroupError as error:
            raise _cannot_open(self.handle, str(error)) from None
        except coordination.ServiceError as error:
            raise _cannot_open(self.handle, str(error)) from None
        except Absence as absence:
            raise self._nobody_came(absence) from None
        return _Agreed(*decision)

    def _decide(self, says: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        from torch_ext import process_groups

        hosts = {process: entry["host"] for process, entry in says.items()}
        hosts[self.here] = _reachable_host(hosts, self.here)
        # Equal configurations are written once: with many processes there is one, and a value holds 4 MB.
        distinct: list[Any] = []
        for entry in says.values():
            if entry["configuration"] not in distinct:
                distinct.append(entry["configuration"])
        return {
            "store": process_groups.serve_store(hosts[self.here]),
            "hosts": hosts,
            "distinct": distinct,
            "configuration": {process: distinct.index(entry["configuration"]) for process, entry in says.items()},
        }

    def _watch(self, notes: Mapping[str, str]) -> None:
        """Whether somebody whom this process awaits stands at another board, or waits for this process there."""
        if (text := notes.get(f"told/{self.here}")) is not None:
            coordination.delete(f"{self.board}/told/{self.here}")
            told = json.loads(text)
            if told["attempt"] == self.gathering.attempt:
                raise self._other_mesh(told["by"], told["processes"])
        if self.patience.passed() > _OTHER_BOARD_SECONDS:
            self._look_at_other_boards()

    def _look_at_other_boards(self) -> None:
        for key, text in coordination.below(self.boards, within=self.patience.remaining()).items():
            other_set, _, rest = key.partition("/in/")
            if other_set == self.set or not rest.isdecimal():
                continue
            process, says = int(rest), json.loads(text)["says"]
            if process in self.everyone and process not in self.gathering.present and self.here in says["processes"]:
                # It would not find this process any more.
                told = {"attempt": says["attempt"], "processes": self.everyone, "by": self.here}
                coordination.put(f"{self.boards}/{other_set}/told/{process}", json.dumps(told))
                raise self._other_mesh(process, says["processes"])

    def _other_mesh(self, process: int, processes: Sequence[int]) -> ContextError:
        return _cannot_open(
            self.handle,
            f"its mesh is over processes {list(self.everyone)} in process {self.here}, but over processes "
            f"{list(processes)} in process {process}: give every process the same mesh",
        )

    def _nobody_came(self, absence: Absence) -> ContextError:
        seen = {process: entry["configuration"] for process, entry in sorted(self.gathering.seen.items())}
        why = f"within {self.patience.seconds:g} s {absence.describe(self.handle)}"
        error = _cannot_open(self.handle, why)
        error.add_note(f"Seen: {describe_processes(self.handle, list(seen))}")
        error.add_note(
            "Every process that owns a device of the mesh must open the context; see what the missing ones are doing. "
            "ASYNC_EMB_TIMEOUT_SECONDS is how long is waited"
        )
        for problem in _differences(self.handle, seen):
            error.add_note(f"Also: {problem.message}")
        return error


def _differences(handle: AsyncEmbContextHandle, configurations: Mapping[int, Mapping[str, Any]]) -> list[Problem]:
    describe = lambda who: describe_processes(handle, list(who))  # noqa: E731
    return differences(handle.name, configurations, describe, whose="processes")


def _connect(
    handle: AsyncEmbContextHandle,
    agreed: _Agreed,
    everyone: tuple[int, ...],
    here: int,
    patience: Patience,
    gpus: Mapping[int, int],
) -> list[Any | None]:
    from torch_ext import nccl, process_groups

    if _store_of.get(everyone, agreed.store) != agreed.store:  # its process was replaced
        process_groups.release_store(_store_of[everyone])
    _store_of[everyone] = agreed.store
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
                    agreed.store,
                    place,
                    size,
                    hosts_store=here == everyone[0],
                    prefix=f"{agreed.id}/{group}{purpose}",
                    timeout_seconds=max(1.0, patience.remaining()),
                    host=_reachable_host(agreed.hosts, here),
                )
                opened.append(transport)
            if not gpus:
                links.append(transport)
                continue
            ranks = handle.flatten_replicas[group * handle.group_size : (group + 1) * handle.group_size]
            between_gpus = nccl.connect(
                agreed.store,
                place,
                size,
                gpu=next(gpus[device] for device in ranks if device in gpus),
                prefix=f"{agreed.id}/{group}",
                timeout_seconds=max(1.0, patience.remaining()),
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
