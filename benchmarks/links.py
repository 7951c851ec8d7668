"""Hosts that are joined by a slow link: processes of this machine, each in a network namespace of its own.

`join(commands)` starts one program per host. Where the kernel has netem, a veth pair joins two hosts, and netem delays
what they send. Where it has not, each host gets a TUN device, and one relay process reads the IP packets of every
device, holds each for the delay, and writes it to the device that it is for. Nothing is lost, reordered, or limited in
bandwidth.

A host's own name is its address there: XLA's Gloo listens where the host's name leads, and asks nobody else.
Namespaces and devices go away with the processes that use them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

DEVICE = "link0"
ECHO_PORT = 7
MTU = 65_000  # few packets: each costs the relay a system call or two, and it shares the cores

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class LinkError(RuntimeError):
    """This machine cannot have such links. The message says why."""


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Link:
    """Hosts that run, and the delay between them. See ``join``."""

    def __init__(self, kind: str, hosts: list[subprocess.Popen[str]], relay: subprocess.Popen[str] | None) -> None:
        self.kind = kind  # "netem" or "relay"
        self.hosts = hosts
        self._relay = relay

    def set_delay(self, seconds: float) -> None:
        """One way, for packets that are sent from now on."""
        if self._relay is None:
            for host in self.hosts:
                delay = ("delay", f"{seconds * 1e6:.0f}us", "limit", "100000")
                _inside(host.pid, "tc", "qdisc", "replace", "dev", DEVICE, "root", "netem", *delay)
            return
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        print(seconds, file=self._relay.stdin, flush=True)
        if not self._relay.stdout.readline():
            raise LinkError(f"the relay between the hosts has ended with {self._relay.wait()}")


@contextlib.contextmanager
def join(commands: Sequence[Sequence[str]], errors: IO[str] | None = None) -> Iterator[Link]:
    """Starts ``commands[i]`` as host i, with pipes to its standard input and output, and joins the hosts. What they say
    on standard error goes to ``errors``.

    Raises LinkError where network namespaces, TUN devices or the programs `ip` and `nsenter` are missing.
    """
    if missing := [name for name in ("ip", "nsenter") if shutil.which(name) is None]:
        raise LinkError(f"no program {' and '.join(missing)} here (Debian: packages iproute2 and util-linux)")
    kind = "netem" if len(commands) == 2 and _has_netem() else "relay"
    hosts: list[subprocess.Popen[str]] = []
    relay: subprocess.Popen[str] | None = None
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _end([*hosts, *([relay] if relay is not None else [])]))
        doors = []
        for number, command in enumerate(commands):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            with theirs:
                arguments = ["enter", str(number), str(theirs.fileno()), kind, *command]
                hosts.append(_start(arguments, [theirs.fileno()], errors))
            doors.append(ours)
        devices = [_wait_until_inside(door) for door in doors]
        if kind == "relay":
            relay = _start(["relay", *map(str, devices)], devices)
            for device in devices:
                os.close(device)
        else:
            pair = ("type", "veth", "peer", "name", DEVICE, "netns", str(hosts[1].pid))
            _inside(hosts[0].pid, "ip", "link", "add", DEVICE, *pair)
        for number, (host, door) in enumerate(zip(hosts, doors, strict=True)):
            _inside(host.pid, "ip", "link", "set", "lo", "up")
            _inside(host.pid, "ip", "address", "add", f"{address_of(number)}/24", "dev", DEVICE)
            _inside(host.pid, "ip", "link", "set", DEVICE, "mtu", str(MTU), "up")
            door.sendall(b"go")
        yield Link(kind, hosts, relay)


# ---- Measuring a link, from the hosts that it joins


def echo(host: int) -> None:
    """Answers one ``round_trip`` to this host."""
    with socket.create_server((address_of(host), ECHO_PORT)) as server:
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(1):
                connection.sendall(data)


def round_trip(host: int, repetitions: int = 15) -> float:
    """Median seconds until a byte that is sent to ``host`` comes back, over TCP."""
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection((address_of(host), ECHO_PORT), timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # until the other host listens
    times = []
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repetitions):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---- Programs that `join` starts


def enter(host: int, door_number: int, kind: str, command: list[str]) -> None:
    """Goes into new namespaces, hands the TUN device over, and becomes ``command`` once the link is there."""
    door = socket.socket(fileno=door_number)
    device = -1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a host that waits for another one would outlive us for long
        if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "network namespaces are not allowed")
        socket.sethostname(address_of(host))
        if kind == "relay":
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            name = DEVICE.encode()
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        door.sendall(f"{error.filename or 'no TUN device'}: {error.strerror}".encode())
        sys.exit(1)
    if device >= 0:
        socket.send_fds(door, [b"in"], [device])
        os.close(device)
    else:
        door.sendall(b"in")
    if door.recv(2) != b"go":
        sys.exit(1)
    door.close()
    os.execvp(command[0], command)


def relay(devices: list[int]) -> None:
    """Carries packets between the TUN devices; each line of standard input is a new delay, and is answered."""
    # In place of a wire, so it goes first where that is allowed.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    device_of = {socket.inet_aton(address_of(host)): device for host, device in enumerate(devices)}
    on_the_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    delay = 0.0
    while True:
        until_due = None if not on_the_way else max(0.0, on_the_way[0][0] - time.monotonic())
        readable, _, _ = select.select([0, *devices], [], [], until_due)
        now = time.monotonic()
        for device in readable:
            if device == 0:
                text = os.read(0, 100)  # one line: the next one is sent when this one has been answered
                if not text:
                    return
                delay = float(text)
                print("set", flush=True)
                continue
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(device, 1 << 16):
                    if packet[0] >> 4 == 4 and (destination := device_of.get(packet[16:20])) is not None:
                        on_the_way.append((now + delay, destination, packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, destination, packet = on_the_way.popleft()
            with contextlib.suppress(OSError):  # a host that has ended
                os.write(destination, packet)


# ---- Pieces


def _start(arguments: list[str], files: Sequence[int], errors: IO[str] | None = None) -> subprocess.Popen[str]:
    program = [sys.executable, __file__, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=errors, text=True, pass_fds=files)


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _wait_until_inside(door: socket.socket) -> int:
    door.settimeout(20)
    said, files, _, _ = socket.recv_fds(door, 500, 1)
    if said != b"in":
        raise LinkError(said.decode() or "a process that enters a namespace has ended")
    return files[0] if files else -1


def _inside(process: int, *command: str) -> None:
    _run("nsenter", "--target", str(process), "--net", *command)


def _has_netem() -> bool:
    if shutil.which("tc") is None or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        enter(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    else:
        relay([int(device) for device in sys.argv[2:]])
