"""Starts a few processes that run one function of a test's helper module, and gives what each of them returned."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess import _children

RESULT = "RESULT "
# Processes are copies of one that has imported everything, which takes seconds, and has started nothing.
_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch_ext.process_groups", "jax_bridge.processes.starting", "tests.multiprocess._children"]
_SERVER.set_forkserver_preload(_PRELOADED)


class Job:
    """Processes 0 to n-1 of one call; they run from the start."""

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        directory: Path,
        first: int = 0,
    ) -> None:
        self.outputs = [directory / f"output-{number}.txt" for number in range(len(environments))]
        self.directory = directory
        self.port = arguments["port"]
        self.processes = []
        for number, (environment, output) in enumerate(zip(environments, self.outputs, strict=True)):
            given = {**arguments, "number": first + number}
            process = _SERVER.Process(
                target=_children.run,
                args=(function, given, dict(environment), str(directory), str(output)),
                daemon=True,
            )
            process.start()
            self.processes.append(process)

    def wait(self, seconds: float = 60, *, may_die: Sequence[int] = ()) -> list[Any]:
        """What every process returned, None for those that may die. Fails, with all outputs, if another one did."""
        deadline = time.monotonic() + seconds
        for number, process in enumerate(self.processes):
            if number in may_die:
                continue
            process.join(max(0.1, deadline - time.monotonic()))
            what = "still runs" if process.exitcode is None else f"ended with {process.exitcode}"
            assert process.exitcode == 0, f"process {number} {what}\n{self.all_output()}"
        return [None if number in may_die else self.result(number) for number in range(len(self.processes))]

    def wait_for_ends(self, seconds: float = 60) -> list[int | None]:
        """The exit status of every process, None for those that still run then."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def result(self, number: int) -> Any:
        lines = self._lines_of(number)
        assert lines, f"process {number} returned nothing\n{self.all_output()}"
        return json.loads(lines[-1].removeprefix(RESULT))

    def _lines_of(self, number: int) -> list[str]:
        # Whole lines only: the process may be writing.
        text = self.outputs[number].read_text() if self.outputs[number].exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.startswith(RESULT) and line.endswith("\n")]

    def wait_for_result(self, number: int, seconds: float = 60) -> Any:
        """What a process returned, perhaps before it has ended."""
        deadline = time.monotonic() + seconds
        while not self._lines_of(number):
            assert time.monotonic() < deadline, f"process {number} returned nothing\n{self.all_output()}"
            assert self.processes[number].exitcode in (None, 0), self.all_output()
            time.sleep(0.02)
        return self.result(number)

    def wait_for_file(self, name: str, seconds: float = 40) -> None:
        """Waits until a process has called ``say(name)``."""
        deadline = time.monotonic() + seconds
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"nobody said {name!r}\n{self.all_output()}"
            time.sleep(0.02)

    def signal(self, number: int, which: signal.Signals) -> None:
        os.kill(self.processes[number].pid, which)

    def all_output(self) -> str:
        texts = [path.read_text() if path.exists() else "" for path in self.outputs]
        return "\n".join(f"--- process {number}\n{text[-6000:]}" for number, text in enumerate(texts))

    def end(self) -> None:
        for process in self.processes:
            process.kill()  # also one that is stopped
            process.join()


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> None:
    """Nothing that the caller's own job says may reach the processes, which get their environment from here."""
    ours = ("SLURM_", "OMPI_", "MASTER_", "ASYNC_EMB_", "GLOO_", "RANK", "WORLD_SIZE", "LOCAL_")
    for name in [name for name in os.environ if name.startswith(ours)]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def start(tmp_path) -> Any:
    """``start("module:function", processes=2, devices=2, **arguments)`` runs a function in every process."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory) -> Any:
    """The same for a job that several tests look at."""
    yield from _starter(tmp_path_factory.mktemp("job"))


def _starter(directory: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_job(
        function: str,
        *,
        processes: int,
        devices: int = 1,
        environment: Callable[[int], Mapping[str, str]] = lambda number: {},
        first: int = 0,
        **arguments: Any,
    ) -> Job:
        count = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        environments = [{**count, **environment(number)} for number in range(processes)]
        own = directory / str(len(jobs))
        own.mkdir()
        jobs.append(Job(function, {"size": processes, "port": free_port(), **arguments}, environments, own, first))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
