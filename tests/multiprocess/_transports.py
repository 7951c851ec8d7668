"""What the processes of these tests do with transports. Each function is the whole program of a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.multiprocess._children import open_files, outcome, say, wait_for


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
