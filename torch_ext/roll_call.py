"""Whether all processes of a job are there and agree how many they are, before anything depends on it.

What is started afterwards (JAX's coordination service) ends a process without an exception when somebody is missing.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch_ext.process_groups import ProcessGroupError, open_store, require_distributed, split_address

_VERDICT_SECONDS = 2.0
# How long a process that was killed may keep its port while the system clears it away.
_CLEARED_AWAY_SECONDS = 3.0


def roll_call(address: str, rank: int, size: int, *, timeout_seconds: float) -> str | None:
    """Meets the other processes at ``address``, "host:port" of process 0, and leaves the port free again.

    Returns None if all have come and agree, and else, in every process, what is wrong. Raises ProcessGroupError where
    process 0 cannot be reached, or cannot use the port.
    """
    require_distributed()
    host, port = split_address(address)
    if rank == 0:
        store = _serve(host, port, timeout_seconds)
    else:
        store = open_store(host, port, serves=False, timeout_seconds=timeout_seconds)
    number = store.add("arrivals", 1)
    store.set(f"arrival/{number}", json.dumps([rank, size]))
    if rank == 0:
        verdict = _judge(store, size, timeout_seconds)
        store.set("verdict", verdict or "agreed")
        _wait_for_readers(store)
        return verdict
    try:
        # Process 0 may have come later than this one.
        store.wait(["verdict"], timedelta(seconds=2 * timeout_seconds + _VERDICT_SECONDS))
        verdict = store.get("verdict").decode()
        store.add("readers", 1)
    except RuntimeError as error:
        return f"process 0 at {address} came, but does not answer any more: {str(error).splitlines()[0]}"
    return None if verdict == "agreed" else verdict


def _serve(host: str, port: int, timeout_seconds: float) -> Any:
    """The store. A job that starts again at once after it was killed finds its port taken for a moment."""
    deadline = time.monotonic() + min(timeout_seconds, _CLEARED_AWAY_SECONDS)
    while True:
        try:
            return open_store(host, port, serves=True, timeout_seconds=timeout_seconds)
        except ProcessGroupError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _judge(store: Any, size: int, timeout_seconds: float) -> str | None:
    deadline = time.monotonic() + timeout_seconds
    sizes: dict[int, int] = {}
    arrived = 0
    while len(sizes) < size:
        if arrived < store.add("arrivals", 0):
            arrived += 1
            rank, told = json.loads(store.get(f"arrival/{arrived}"))
            if told != size:
                return f"process {rank} was told of {told} processes, process 0 of {size}"
            if rank in sizes:
                return f"two processes say that they are process {rank} of {size}"
            sizes[rank] = told
        elif time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in range(size) if rank not in sizes)
            came = ", ".join(map(str, sorted(sizes)))
            return f"of {size} processes {missing} did not come within {timeout_seconds:g} s; {came} did"
        else:
            time.sleep(0.02)
    return None


def _wait_for_readers(store: Any) -> None:
    deadline = time.monotonic() + _VERDICT_SECONDS
    while store.add("readers", 0) < store.add("arrivals", 0) - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
