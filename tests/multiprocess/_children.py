"""What the processes of these tests run. The value that a function returns is checked by the test."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY = Path()  # of the job


def run(function: str, arguments: dict[str, Any], environment: dict[str, str], directory: str, output: str) -> None:
    """The whole life of a process, which begins as a copy of one that has imported everything."""
    global DIRECTORY
    DIRECTORY = Path(directory)
    os.environ.update(environment)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        module, _, name = function.rpartition(":")
        value = getattr(importlib.import_module(module or __name__), name)(**arguments)
        print(f"\nRESULT {json.dumps(value)}", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    from jax_bridge import processes

    processes.shutdown(timeout_seconds=3)
    os._exit(0)


def say(name: str) -> None:
    (DIRECTORY / name).touch()


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 40
    while not (DIRECTORY / name).exists():
        assert time.monotonic() < deadline, f"nobody said {name!r}"
        time.sleep(0.02)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    """What became of a call that is expected to raise."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - start,
            "kind": getattr(error, "kind", None),
            "peers": getattr(error, "peers", None),
            "problems": list(getattr(error, "problems", ())),
            "notes": list(getattr(error, "__notes__", ())),
        }
    return {"type": None, "text": "", "seconds": time.monotonic() - start}


# ---- Transports


def connect(number: int, size: int, port: int, prefix: str, timeout_seconds: float = 30) -> Any:
    from torch_ext import process_groups

    return process_groups.connect(
        f"127.0.0.1:{port}",
        number,
        size,
        hosts_store=number == 0,
        prefix=prefix,
        timeout_seconds=timeout_seconds,
    )


def block(sender: int, receiver: int, size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 2))[sender * 31 + receiver * 7 :][:size]


def exchanges(number: int, size: int, port: int) -> Any:
    transport = connect(number, size, port, "blocks")
    everyone = range(size)
    shapes: list[Callable[[int, int], int]] = [
        lambda sender, receiver: 64,
        lambda sender, receiver: 100 * sender + receiver,  # unequal; process 0 sends nothing to itself
        lambda sender, receiver: 0,
        lambda sender, receiver: 5 if (sender + receiver) % 2 else 0,
        lambda sender, receiver: 3_000_001 if sender == 0 else 1,
    ]
    for bytes_of in shapes * 3:
        sent = [block(number, peer, bytes_of(number, peer)) for peer in everyone]
        received = transport.exchange(sent, [bytes_of(peer, number) for peer in everyone], 30)
        for peer in everyone:
            if peer != number:
                assert received[peer] == block(peer, number, bytes_of(peer, number)), (peer, len(received[peer]))
    return [transport.self, transport.size]


def other_sizes(number: int, size: int, port: int) -> Any:
    transport = connect(number, size, port, "other sizes")
    own = 1000 * (number + 1)
    return outcome(lambda: transport.exchange([b"x" * own] * size, [own] * size, 1.0))


def late_peers(number: int, size: int, port: int) -> Any:
    """Processes 2 and above come to the second exchange when the others have given up."""
    transport = connect(number, size, port, "late")
    some = [b"x"] * size, [1] * size
    transport.exchange(*some, 30)
    if number >= 2:
        wait_for("given up 0")
        wait_for("given up 1")
        return None
    waited = outcome(lambda: transport.exchange(*some, 1.0))
    again = outcome(lambda: transport.exchange(*some, 1.0))
    say(f"given up {number}")
    return [waited, again]


def ends(number: int, size: int, port: int) -> Any:
    transport = connect(number, size, port, "end")
    some = [b"x"] * size, [1] * size
    if number == size - 1:
        wait_for("ended")
        failed = outcome(lambda: transport.exchange(*some, 10))
        announced = transport.announced()
        say(f"asked {number}")
        return [announced, failed]
    if number == 0:
        ending = threading.Timer(0.3, lambda: (transport.announce("nothing works"), transport.end()))
        ending.start()
        waited = outcome(lambda: transport.exchange(*some, 30))
        ending.join()
        transport.end()
        say("ended")
        transport.announce("too late")
        for other in range(1, size):  # they ask the store that this process serves
            wait_for(f"asked {other}")
        return [transport.announced(), waited, outcome(lambda: transport.exchange(*some, 10))]
    # Process 0 may have done its part of the first exchange; not of a second one.
    waited = outcome(lambda: [transport.exchange(*some, 30) for _ in range(2)])
    announced = transport.announced()
    say(f"asked {number}")
    return [announced, waited]


def killed_peer(number: int, size: int, port: int) -> Any:
    transport = connect(number, size, port, "kill")
    transport.exchange([b"x"] * size, [1] * size, 30)
    if number == size - 1:
        say("ready")
        time.sleep(60)
    return outcome(lambda: transport.exchange([b"x"] * size, [1] * size, 40))


def stopped_peer(number: int, size: int, port: int) -> Any:
    """Process 1 is stopped in the middle of a block; what it sends afterwards must not arrive anywhere."""
    transport = connect(number, size, port, "stop")
    many = 96 * 2**20
    attempts = 10  # a transfer may be over before anybody has seen it begin
    if number == 1:
        transport.exchange([b"%10d" % os.getpid(), b""], [0, 0], 30)
        for _ in range(attempts):
            if outcome(lambda: transport.exchange_into([bytes(many), None], [None, None], 5))["type"]:
                return None
    sender = int(transport.exchange([b"", b""], [0, 10], 30)[1])

    def stop_sender() -> None:
        while inbox[0] == 0x11:
            time.sleep(0)
        os.kill(sender, signal.SIGSTOP)

    for _ in range(attempts):
        inbox = bytearray(b"\x11") * many
        stopping = threading.Thread(target=stop_sender)
        stopping.start()
        failed = outcome(lambda: transport.exchange_into([None, None], [None, inbox], 1.5))  # noqa: B023
        stopping.join()
        if failed["type"]:
            break
        os.kill(sender, signal.SIGCONT)
    arrived = many - inbox.count(0x11)
    inbox[:] = bytearray(b"\x55") * many
    os.kill(sender, signal.SIGCONT)
    time.sleep(1.5)
    untouched = inbox.count(0x55) == many
    transport.end()
    return [failed, untouched, arrived / many]


def files_of_transports(number: int, size: int, port: int) -> Any:
    counts = []
    for turn in range(21):
        transport = connect(number, size, port, f"turn {turn}")
        transport.exchange([b"x"] * size, [1] * size, 30)
        if turn % 2:
            transport.end()
        del transport
        counts.append(open_files())
    return counts


def connect_errors(number: int, size: int, port: int) -> Any:
    from torch_ext import process_groups

    process_groups.serve_store("127.0.0.1", port=port)
    taken = outcome(lambda: process_groups.open_store("127.0.0.1", port, serves=True, timeout_seconds=2))
    alone = outcome(lambda: connect(0, 2, port, "alone", timeout_seconds=1))
    unreachable = outcome(
        lambda: process_groups.connect("127.0.0.1:1", 1, 2, hosts_store=False, prefix="p", timeout_seconds=1.5)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    interface = outcome(lambda: connect(0, 2, port, "interface", timeout_seconds=1))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    one = connect(0, 1, port, "one", timeout_seconds=5)
    return {
        "taken": taken,
        "alone": alone,
        "unreachable": unreachable,
        "interface": interface,
        "one": [one.size, one.exchange([b"x"], [1], 1) is not None],
        "address": outcome(lambda: process_groups.split_address("nowhere")),
    }


# ---- Starting


def join(number: int, size: int, port: int, **options: Any) -> Any:
    from jax_bridge import processes

    processes.initialize(f"127.0.0.1:{port}", size, number, timeout_seconds=40, **options)
    return processes


def from_environment(number: int, size: int, port: int) -> Any:
    import jax

    from jax_bridge import processes

    job = processes.initialize(timeout_seconds=40)
    again = processes.initialize(timeout_seconds=40)
    other = outcome(lambda: processes.initialize("127.0.0.1:9", 7, 3))
    return [job.process_id, job.num_processes, job == again, jax.process_index(), jax.device_count(), other]


def refused_starts(number: int, size: int, port: int) -> Any:
    from jax_bridge import processes

    def within(environment: dict[str, str], *arguments: Any) -> dict[str, Any]:
        os.environ.update(environment)
        try:
            return outcome(lambda: processes.initialize(*arguments, timeout_seconds=1))
        finally:
            for name in environment:
                del os.environ[name]

    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results = {
        "nothing": within({}),
        "rank": within({**torchrun, "RANK": "2"}),
        "half": within({"RANK": "1"}),
        "contradiction": within(torchrun, None, 4),
        "alone": within({}, f"127.0.0.1:{port}", 2, 0),
        "unreachable": within({}, f"127.0.0.1:{port}", 2, 1),
    }
    import jax

    jax.devices()
    results["late"] = within(torchrun)
    return results


def different_sizes(number: int, size: int, port: int) -> Any:
    from jax_bridge import processes

    return outcome(lambda: processes.initialize(f"127.0.0.1:{port}", size + number, number, timeout_seconds=20))


# ---- Meetings


def handle_of(name: str, mesh: Any = None, table_axis: Any = ("table",), **changes: Any) -> Any:
    import jax
    from jax.sharding import Mesh

    from jax_bridge import make_context_handle

    if mesh is None:
        import numpy as np

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
    join(number, size, port)
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jax_bridge import coordination, meeting, topology

    results: dict[str, Any] = {}
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "table"))
    results["groups"] = [
        use(meeting.meet(handle_of("one group"), 30)),
        use(meeting.meet(handle_of("across", grid, ("data",)), 30)),  # two groups, each over both processes
        use(meeting.meet(handle_of("within", grid, ("table",)), 30)),  # each process holds a whole group
    ]
    results["who"] = [topology.describe_process(handle_of("one group"), process) for process in (0, 1)]
    results["who across"] = topology.describe_process(handle_of("across", grid, ("data",)), 1)

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
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jax_bridge import meeting

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
    from jax_bridge import meeting

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


def stopped_store(number: int, size: int, port: int) -> Any:
    """The process that serves the store is stopped: who has to tell that must not wait for it."""
    transport = connect(number, size, port, "stopped")
    say(f"ready {number}")
    if number == 0:
        wait_for("told")
        return None
    wait_for("stopped")
    start = time.monotonic()
    transport.announce("nobody hears it")
    heard = transport.announced()
    seconds = time.monotonic() - start
    transport.end()
    del transport
    say("told")
    return [heard, seconds]
