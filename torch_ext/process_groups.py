"""Connects a group of processes: torch.distributed's Gloo moves the bytes, its TCPStore does the introductions.

One process serves a store, the others are told its address, and every group of processes meets there under a prefix of
its own. Stores are kept for the next group; a transport closes its sockets when it ends or goes away.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from torch_ext._load import load

# Its types are incomplete: what is used here exists in all supported versions.
dist: Any = torch.distributed

__all__ = [
    "ProcessGroupError",
    "connect",
    "connect_over",
    "local_address_towards",
    "release_store",
    "serve_store",
]


class ProcessGroupError(RuntimeError):
    """A group of processes cannot be connected. The message is one line that says what to do."""


@dataclass(frozen=True)
class _Stores:
    """The connections of this process to one store."""

    meeting: Any
    # Apart, because a wait on one connection blocks everybody else who uses it, and a failure must be told at once.
    announcing: Any


_served: dict[str, Any] = {}  # by the address without its port
_joined: dict[str, _Stores] = {}  # by address


def serve_store(host: str, *, port: int = 0, timeout_seconds: float = 300.0) -> str:
    """Serves a store from this process, on a free port or on ``port``, and returns its address, "host:port".

    ``host`` is the address of this machine that the other processes reach. A store that is served there already is
    used again.

    Raises ProcessGroupError if torch has no distributed package, or if the port is taken.
    """
    require_distributed()
    store = _served.get(host)
    if store is None or port not in (0, store.port):
        store = open_store(host, port, serves=True, timeout_seconds=timeout_seconds)
        _served[host] = store
    return join_address(host, store.port)


def connect(
    address: str,
    rank: int,
    size: int,
    *,
    hosts_store: bool,
    prefix: str,
    timeout_seconds: float,
    host: str | None = None,
) -> Any:
    """Connects the ``size`` processes that call this with one ``address`` and one ``prefix``. All of them must.

    Args:
      address: "host:port" of the store.
      rank: the number of this process in the group.
      size: how many processes the group has.
      hosts_store: whether this process is the one that serves the store, if it does not do so yet.
      prefix: keeps this group apart from every other one that uses the store; never to be used again.
      timeout_seconds: how long to wait for the store and for the other processes.
      host: the address of this machine that the other processes reach; by default the one that is on the way to the
        store. The environment variable GLOO_SOCKET_IFNAME names network interfaces instead.

    Returns ``torch_ext._C.Transport``. Raises ProcessGroupError, also if the others do not come in time.
    """
    require_distributed()
    store_host, port = split_address(address)
    devices = _devices(host or local_address_towards(address))
    if hosts_store:
        serve_store(store_host, port=port, timeout_seconds=timeout_seconds)
    stores = _joined.get(address)
    if stores is None:
        join = lambda: open_store(store_host, port, serves=False, timeout_seconds=timeout_seconds)  # noqa: E731
        stores = _joined[address] = _Stores(join(), join())

    where = f"the store at {address}"
    return _meet(stores, rank, size, prefix=prefix, devices=devices, timeout_seconds=timeout_seconds, where=where)


def connect_over(store: Any, rank: int, size: int, *, prefix: str, timeout_seconds: float) -> Any:
    """As ``connect``, through a store of torch.distributed's that all processes have already."""
    require_distributed()
    served = store
    while hasattr(served, "underlying_store"):
        served = served.underlying_store
    towards = join_address(served.host, served.port) if isinstance(served, dist.TCPStore) else None
    devices = _devices(local_address_towards(towards) if towards else socket.gethostname())
    where = f"the store of torch.distributed{f' at {towards}' if towards else ''}"
    stores = _Stores(store, store.clone())
    return _meet(stores, rank, size, prefix=prefix, devices=devices, timeout_seconds=timeout_seconds, where=where)


def _meet(
    stores: _Stores, rank: int, size: int, *, prefix: str, devices: list[Any], timeout_seconds: float, where: str
) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = devices
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        backend = dist.ProcessGroupGloo(dist.PrefixStore(f"{prefix}/gloo", stores.meeting), rank, size, options)
    except RuntimeError as error:
        raise ProcessGroupError(
            f"process {rank} of {size} could not connect to the others through {where} within "
            f"{timeout_seconds:g} s: {_first_line(error)}. See whether all of them run and reach this machine; "
            "GLOO_SOCKET_IFNAME=<interface> chooses the network interface"
        ) from None
    return load().connect_transport(backend, dist.PrefixStore(f"{prefix}/said", stores.announcing))


def joined_store(address: str) -> Any:
    """The connection to the store at ``address`` that `connect` has made."""
    return _joined[address].meeting


def require_interfaces() -> list[str]:
    """The network interfaces that GLOO_SOCKET_IFNAME names; raises ProcessGroupError if there is none of a name."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    known = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in known:
            raise ProcessGroupError(
                f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']} names {name!r}, which is no network interface "
                f"of this machine: choose of {', '.join(known)}, or unset it"
            )
    return names


def release_store(address: str) -> None:
    """Forgets the store at ``address``: what this process holds of it closes with the last transport that uses it."""
    _joined.pop(address, None)
    host, port = split_address(address)
    if host in _served and _served[host].port == port:
        del _served[host]


def local_address_towards(address: str) -> str:
    """The IP address of this machine from which it reaches ``address``, "host:port"; nothing is sent."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ProcessGroupError(
            f"there is no way from this machine to {address}: {error}. Give an address that every process reaches"
        ) from None


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" or "[host]:port" in two."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ProcessGroupError(f"{address!r} is not an address: give it as 'host:port'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_distributed() -> None:
    """Raises ProcessGroupError if this torch cannot connect processes."""
    if not (dist.is_available() and hasattr(dist, "ProcessGroupGloo")):
        raise ProcessGroupError(
            "this build of torch has no torch.distributed with Gloo, which tables over several processes need: install "
            "torch from the wheels of pytorch.org"
        )


def open_store(host: str, port: int, *, serves: bool, timeout_seconds: float) -> Any:
    """A TCPStore of torch's, served here or elsewhere."""
    where = join_address(host, port)
    try:
        return dist.TCPStore(
            host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
        )
    except RuntimeError as error:
        if serves:
            raise ProcessGroupError(
                f"no store can be served at {where}: {_first_line(error)}. Another program has the port: choose a free "
                "one, or port 0"
            ) from None
        raise ProcessGroupError(
            f"the store at {where} could not be reached within {timeout_seconds:g} s: {_first_line(error)}. See "
            "whether the process that serves it runs, and whether a firewall is between"
        ) from None


def _devices(host: str) -> list[Any]:
    create: Callable[..., Any] = dist.ProcessGroupGloo.create_device
    names = require_interfaces()
    try:
        return [create(interface=name) for name in names] or [create(hostname=host)]
    except RuntimeError as error:
        raise ProcessGroupError(
            f"Gloo cannot listen on {', '.join(names) or host}: {_first_line(error)}. GLOO_SOCKET_IFNAME=<interface> "
            "chooses the network interface"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
