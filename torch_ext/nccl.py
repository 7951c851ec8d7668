"""GPUs of several processes: what the environment must say before NCCL starts, and how a group is connected.

NCCL and CUDA read their variables when they start, and what a wrong value leads to is a hang without a message. So
everything is checked before a group is connected, all of it at once. Nothing here needs a GPU until `connect`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from torch_ext._load import load
from torch_ext.process_groups import ProcessGroupError, joined_store

# Its types are incomplete: what is used here exists in all supported versions.
dist: Any = torch.distributed

__all__ = ["connect", "environment_problems", "missing", "require_environment"]

_FEWEST_CONNECTIONS = 16
_MOST_CONNECTIONS = 32

_EXPORTS = f"NCCL_LAUNCH_ORDER_IMPLICIT=1 NCCL_RUNTIME_CONNECT=0 CUDA_DEVICE_MAX_CONNECTIONS={_MOST_CONNECTIONS}"

# While a group is made. torch would otherwise start threads that end the process where an exchange fails or is late,
# or where its own watchdog is; faults are found and named by the hosts instead. Read when a group is made, once.
_WHILE_CONNECTING = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog thread, and so no monitor of it. Only wait() blocks: it is not used
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_NAN_CHECK": "0",
}


def missing() -> str | None:
    """Why this build cannot connect GPUs of several processes, or None."""
    if not (dist.is_available() and hasattr(dist, "ProcessGroupNCCL")):
        return (
            f"torch {torch.__version__} has no torch.distributed with NCCL, which moves the bytes between GPUs of "
            "several processes: install a torch for CUDA from the wheels of pytorch.org"
        )
    if not hasattr(load(), "connect_device_transport"):
        return "the native module was built without CUDA"
    return None


def require_environment() -> None:
    """Raises ProcessGroupError, in one line with everything that is wrong, where the environment would make a step
    hang."""
    if problems := environment_problems(os.environ, [name for _, name in socket.if_nameindex()]):
        raise ProcessGroupError(
            f"the environment does not fit GPUs of several processes: {'; '.join(problems)}. NCCL and CUDA read it "
            f"when they start, so set it before the program: {_EXPORTS}"
        )


def environment_problems(environ: Mapping[str, str], interfaces: Sequence[str]) -> list[str]:
    """What is wrong, a sentence without a full stop each; ``interfaces`` are the network interfaces of this machine."""
    problems = []
    order = environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "")
    if order.strip() != "1":
        problems.append(
            f"NCCL_LAUNCH_ORDER_IMPLICIT is {_shown(order)}, and must be 1: a table and XLA have communicators of "
            "their own on one GPU, and two processes that run theirs in different orders would wait for each other"
        )
    connect = environ.get("NCCL_RUNTIME_CONNECT", "")
    if connect.strip() != "0":
        problems.append(
            f"NCCL_RUNTIME_CONNECT is {_shown(connect)}, and must be 0: a collective that connects in the middle of a "
            "step allocates memory, which waits for an exchange that may wait for that very step elsewhere"
        )
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    if not connections.isdecimal() or int(connections) < _FEWEST_CONNECTIONS:
        problems.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {_shown(connections)}, and must be at least {_FEWEST_CONNECTIONS}: "
            "streams that share a hardware queue wait for each other, an exchange for the dense compute behind it"
        )
    if problem := _interface_problem(environ.get("NCCL_SOCKET_IFNAME", ""), interfaces):
        problems.append(problem)
    return problems


def connect(address: str, rank: int, size: int, *, gpu: int, prefix: str, timeout_seconds: float) -> Any:
    """Connects one GPU of each of ``size`` processes, which call this together after `process_groups.connect`.

    Args:
      address: "host:port" of the store.
      rank: the number of this process in the group.
      size: how many processes the group has.
      gpu: the number that this process gives to its GPU.
      prefix: keeps this group apart from every other one that uses the store; never to be used again.
      timeout_seconds: how long to wait for the other processes.

    Returns ``torch_ext._C.DeviceTransport``. Raises ProcessGroupError, also if the others do not come in time.
    """
    if (reason := missing()) is not None:
        raise ProcessGroupError(reason)
    require_environment()
    torch.cuda.init()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.blocking = 0  # so that a start that does not succeed can be given up
    options._timeout = timedelta(seconds=timeout_seconds)
    where = f"GPU {gpu} of process {rank} of {size} could not connect to the others"
    advice = "NCCL_DEBUG=INFO says what NCCL tries; NCCL_SOCKET_IFNAME=<interface> chooses the network interface"
    try:
        with _environment(_WHILE_CONNECTING):
            backend = dist.ProcessGroupNCCL(
                dist.PrefixStore(f"{prefix}/nccl", joined_store(address)), rank, size, options
            )
        transport = load().connect_device_transport(backend, gpu=gpu, timeout_seconds=timeout_seconds)
    except (RuntimeError, ValueError) as error:
        raise ProcessGroupError(f"{where}: {str(error).strip().splitlines()[0].rstrip('.')}. {advice}") from None
    if transport is None:
        raise ProcessGroupError(f"{where} within {timeout_seconds:g} s. {advice}")
    return transport


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _interface_problem(value: str, interfaces: Sequence[str]) -> str | None:
    """NCCL's rule: prefixes, or whole names after "="; after "^" those that are not used."""
    excludes = value.startswith("^")
    names = value.removeprefix("^")
    exact = names.startswith("=")
    wanted = [name for name in names.removeprefix("=").split(",") if name]
    if not wanted:
        return None
    found = [name for name in interfaces if any(name == one if exact else name.startswith(one) for one in wanted)]
    usable = [name for name in interfaces if name not in found] if excludes else found
    if usable:
        return None
    what = "leaves no network interface of this machine" if excludes else "names no network interface of this machine"
    return f"NCCL_SOCKET_IFNAME={value} {what}: choose of {', '.join(interfaces)}, or unset it"


def _shown(value: str) -> str:
    return repr(value) if value else "not set"
