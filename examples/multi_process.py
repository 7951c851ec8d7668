"""The training of examples/two_tower over several processes.

    python -m examples.multi_process --processes 4 --devices 2 train --epochs 6     # starts the processes itself
    torchrun --nproc-per-node 4 -m examples.multi_process --devices 2 train         # under another launcher
    srun --ntasks 4 python -m examples.multi_process --devices 2 train

What follows the two options is for examples.two_tower. Every process reads the same files and takes part in every step;
process 0 alone shows progress and writes `runs/`. On several machines the files must be at the same place on each.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# What others may still say when one has failed or Ctrl-C was pressed; then they are killed.
GRACE_SECONDS = 1.0
SHOWN_LINES = 15
TIMEOUT_SECONDS = "120"  # of tables, unless ASYNC_EMB_TIMEOUT_SECONDS is set: the first step waits for compilations

_LAUNCHED = "TWO_TOWER_LAUNCHER"
_OF_LAUNCHERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="how many to start (default: 4)")
    parser.add_argument("--devices", type=int, default=2, help="host devices in each process (default: 2)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="train and its options (default: train)")
    options = parser.parse_args()
    if options.processes < 1 or options.devices < 1:
        parser.error("--processes and --devices must be at least 1")
    command = options.command or ["train"]
    if any(name in os.environ for name in _OF_LAUNCHERS):
        work(options.devices, command)
        return 0
    return launch(options.processes, [sys.executable, "-m", __spec__.name, "--devices", str(options.devices), *command])


# ---- one of the processes


def work(devices: int, command: Sequence[str]) -> None:
    """The life of one process, which finds its number in the variables of its launcher."""
    if _LAUNCHED in os.environ:
        _end_with_parent(int(os.environ[_LAUNCHED]))
    os.environ.setdefault("ASYNC_EMB_TIMEOUT_SECONDS", TIMEOUT_SECONDS)
    # Native code writes to descriptor 1 as well; only what Python prints belongs beside the progress bar.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    from examples.two_tower import __main__ as two_tower

    two_tower.join_job(devices)
    two_tower.app(list(command), prog_name="multi_process")


def _end_with_parent(parent: int) -> None:
    """Linux kills this process when its parent ends, however that comes to pass."""
    kill_me_when_parent_ends = 1  # PR_SET_PDEATHSIG
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(kill_me_when_parent_ends, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# ---- the launcher


class Child:
    """A process, and the last lines that it has written to its standard error."""

    def __init__(self, number: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.number = number
        self.lines: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
        # In a group of its own: Ctrl-C in a terminal reaches the launcher alone, which passes it on.
        self.process = subprocess.Popen(
            arguments,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def words(self) -> str:
        self._reader.join(0.5)
        return "\n".join(f"[{self.number}] {line}" for line in self.lines)


def launch(count: int, arguments: Sequence[str]) -> int:
    """Runs the processes to their end, of all when one fails. The exit status of the first that failed."""
    port = _free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "JAX_COORDINATOR_PORT": str(port),
        _LAUNCHED: str(os.getpid()),
    }
    common.setdefault("OMP_NUM_THREADS", "1")
    stopped_by: list[int] = []
    for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(which, lambda number, _: stopped_by.append(number))
    children: list[Child] = []
    try:
        for number in range(count):
            children.append(Child(number, arguments, {**common, "RANK": str(number)}))
        while True:
            states = [child.process.poll() for child in children]
            failed = [child for child, state in zip(children, states, strict=True) if state]
            if failed:
                return _report(failed[0], children)
            if stopped_by:
                _end(children, signal.SIGINT)
                return 128 + stopped_by[0]
            if all(state == 0 for state in states):
                return 0
            time.sleep(0.05)  # a look at every child and at the signals; there is no wait for any of several processes
    finally:
        _end(children, signal.SIGKILL)


def _report(first: Child, children: Sequence[Child]) -> int:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(child.process.poll() is None for child in children):
        time.sleep(0.05)  # most end by themselves, with a message of their own, when they lose the first one
    _end(children, signal.SIGKILL)
    status = first.process.returncode
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    print(f"process {first.number} {how}, so all were ended", file=sys.stderr)
    # The first may have died without a word; the others know who is missing.
    for child in children:
        if child.process.returncode not in (0, -signal.SIGKILL) and child.lines:
            print(child.words(), file=sys.stderr)
    return status if status > 0 else 128 - status


def _end(children: Sequence[Child], which: signal.Signals) -> None:
    """Ends everything that the processes have started too; kills what goes on after a moment."""
    for kind, seconds in ((which, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
        alive = [child.process for child in children if child.process.poll() is None]
        for process in alive:
            try:
                os.killpg(process.pid, kind)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + seconds
        for process in alive:
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if __spec__ is None:  # started by its path
        sys.exit(f"start it as a module, from {Path(__file__).parent.parent.name}/: python -m examples.multi_process")
    sys.exit(main())
