"""How the processes of these tests open contexts. Each function is the whole program of a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.multiprocess._children import open_files, outcome, say, wait_for
from tests.multiprocess._tables import join


def handle_of(name: str, mesh: Any = None, table_axis: Any = ("table",), **changes: Any) -> Any:
    from jax_bridge import make_context_handle

    if mesh is None:
        mesh = Mesh(np.array(jax.devices()), ("table",))
    arguments = {
        "data_axis": table_axis,
        "tokens_per_batch": 16,
        "emb_width": 16,
        "num_unique": 8,
        "num_devices_per_node": mesh.devices.size,
        "name": name,
    }
    return make_context_handle(mesh, table_axis, **{**arguments, **changes})


def use(transports: list[Any]) -> list[int | None]:
    """Sends something through every transport, and closes it."""
    for transport in transports:
        if transport is not None:
            received = transport.exchange([b"%d" % transport.self] * transport.size, [1] * transport.size, 20)
            assert all(received[p] == b"%d" % p for p in range(transport.size) if p != transport.self)
    return [None if transport is None else transport.size for transport in transports]


def meetings(number: int, size: int, port: int) -> Any:
    """Two processes of two devices: everything that two may meet about."""
    mesh = join(number, size, port)
    from jax_bridge import placing, runtime
    from jax_bridge.processes import coordination, meeting, topology

    results: dict[str, Any] = {}
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "table"))
    results["groups"] = [
        use(meeting.meet(handle_of("one group"), 30)),
        use(meeting.meet(handle_of("across", grid, ("data",)), 30)),  # two groups, each over both processes
        use(meeting.meet(handle_of("within", grid, ("table",)), 30)),  # each process holds a whole group
    ]
    results["who"] = [topology.describe_process(handle_of("one group"), process) for process in (0, 1)]
    results["who across"] = topology.describe_process(handle_of("across", grid, ("data",)), 1)

    results["nodes"] = [outcome(lambda n=n: handle_of("nodes", num_devices_per_node=n)) for n in (2, 4, 1)]  # type: ignore[misc]
    own = Mesh(mesh.devices[:2], ("table",))  # of process 0
    handle = handle_of("not mine", own, num_devices_per_node=2)
    results["not mine"] = outcome(lambda: runtime.open_context(handle))
    runtime.close_context(handle)
    array = placing.put(np.ones((4, 4)), NamedSharding(mesh, PartitionSpec("table")))
    results["printed"] = [str(array), placing.fetch(array).sum().item()]

    differences = {
        "num_unique": {"num_unique": 8 + number},
        "tokens_per_rank": {"tokens_per_batch": 16 * (1 + number)},
        "dtype": {"dtype": ("float32", "bfloat16")[number]},
        "many": {"num_unique": 8 + number, "padding_id": number},
    }
    for name, changes in differences.items():
        results[name] = outcome(lambda changes=changes: meeting.meet(handle_of("differs", **changes), 30))  # type: ignore[misc]
    true_versions = meeting.versions
    meeting.versions = lambda: {**true_versions(), "async_emb": f"1.{number}"}
    results["version"] = outcome(lambda: meeting.meet(handle_of("differs"), 30))
    meeting.versions = true_versions
    os.environ["ASYNC_EMB_TIMEOUT_SECONDS"] = str(50 + number)
    results["timeout"] = outcome(lambda: meeting.meet(handle_of("differs"), 30))
    del os.environ["ASYNC_EMB_TIMEOUT_SECONDS"]
    results["same again"] = use(meeting.meet(handle_of("differs"), 30))

    # One process has tried twice before the other one comes at all.
    if number == 1:
        results["alone"] = [outcome(lambda: meeting.meet(handle_of("counts"), 0.4)) for _ in range(2)]
        say("tried")
    else:
        wait_for("tried")
    results["after"] = use(meeting.meet(handle_of("counts"), 30))

    counts = []
    for _ in range(21):
        use(meeting.meet(handle_of("files"), 30))
        counts.append(open_files())
    results["files"] = counts
    say(f"done {number}")
    wait_for(f"done {1 - number}")
    results["left"] = coordination.below("async_emb/meet")
    return results


def three_meet(number: int, size: int, port: int) -> Any:
    """Three processes of one device: who is missing, who stands at another board, who has died."""
    join(number, size, port, heartbeat_timeout_seconds=4)
    from jax_bridge.processes import meeting

    results: dict[str, Any] = {"all": use(meeting.meet(handle_of("all", emb_width=12, tokens_per_batch=12), 30))}
    shape = {"emb_width": 12, "tokens_per_batch": 12}
    if number != 2:
        results["missing"] = outcome(lambda: meeting.meet(handle_of("missing", **shape), 1.5))

    two = Mesh(np.array(jax.devices()[:2]), ("table",))
    mesh = two if number == 0 else None
    if number != 2:
        results["meshes"] = outcome(lambda: meeting.meet(handle_of("meshes", mesh, **shape), 20))

    if number == 2:  # leaves its note behind
        threading.Thread(target=lambda: meeting.meet(handle_of("dead", **shape), 30), daemon=True).start()
        time.sleep(1.0)
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for("dies")
    time.sleep(0.2)
    results["dead"] = outcome(lambda: meeting.meet(handle_of("dead", **shape), 2.5))
    # The survivors go on among themselves, well after JAX has noticed.
    say(f"alive {number}")
    wait_for(f"alive {1 - number}")
    time.sleep(6)
    results["survivors"] = use(meeting.meet(handle_of("survivors", two, emb_width=12, tokens_per_batch=12), 20))
    return results


def replaced(number: int, size: int, port: int, newcomer: bool = False) -> Any:
    """Process 1 is killed in a context, another one takes its place, and the context opens again."""
    join(number, size, port, rejoin=newcomer, heartbeat_timeout_seconds=10)
    from jax_bridge.processes import meeting

    handle = handle_of("again")
    if newcomer:
        return use(meeting.meet(handle, 40))
    (transport,) = meeting.meet(handle, 40)
    use([transport])
    say(f"ready {number}")
    if number == 1:
        time.sleep(60)
    failed = outcome(lambda: transport.exchange([b"x"] * size, [1] * size, 40))
    transport.announce("gave up")
    transport.end()
    return [failed, use(meeting.meet(handle, 40))]
