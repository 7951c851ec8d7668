"""Hurts one process of a job in every way at every point, many times, and writes how long the others took to say so.

    python -m tests.multiprocess.faults --repetitions 20 --write docs/faults.md

A repetition is a job of its own. The first process that is not hurt, and every other one, must end with one line that
names the process that is missing and the call, by itself, within the bound; what is measured is the time from the fault
to that line, in the slowest process of all repetitions.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.multiprocess import _faulty
from tests.multiprocess.conftest import Job, free_port

SHAPES = {"own_step": (2, 2), "train": (4, 1)}
WORDS = {"own_step": "a step of one's own, 2 processes x 2 devices", "train": "TrainStep, 4 processes x 1 device"}
# Beside the timeout: XLA's collectives end a second later, the roll takes two, and a busy machine some more.
SLACK_SECONDS = 6.0
VICTIM = 1

INTRODUCTION = """\
# Faults

What happens to a job when one of its processes comes to harm, measured by `python -m tests.multiprocess.faults`.

One process of the job is killed (SIGKILL), stopped (SIGSTOP), or has all its connections to the others closed ("link"),
at a point of its third or fifth step; or it is configured in another way than the others. Every other process must end
by itself, with one line that names this process and the call or the step, within the timeout and {slack:g} s. The times
are seconds from the fault (with another configuration: from the start of the work, compilation included) to that line,
in the slowest process of {repetitions} repetitions. `ASYNC_EMB_TIMEOUT_SECONDS` is {timeout:g}.
"""


class Cell(NamedTuple):
    program: str
    fault: str
    point: str


class Outcome(NamedTuple):
    """Of one repetition: the longest times, from the fault to the error and to the end of a process, and all that was
    not as it should be."""

    seconds: float
    ended: float
    line: str
    problems: list[str]


def cells() -> Iterator[Cell]:
    for program in SHAPES:
        for fault in _faulty.FAULTS:
            for point in _faulty.POINTS:
                yield Cell(program, fault, point)
        for field in _faulty.CONFIGURATIONS:
            yield Cell(program, "configuration", field)


def run(cell: Cell, timeout: float, directory: Path) -> Outcome:
    """One job, from its start to the end of its last process."""
    size, devices = SHAPES[cell.program]
    environment = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "ASYNC_EMB_TIMEOUT_SECONDS": str(timeout),
        "OMP_NUM_THREADS": "1",
    }
    before = shared_memory()
    given = {"size": size, "port": free_port(), "fault": cell.fault, "point": cell.point, "victim": VICTIM}
    job = Job(f"tests.multiprocess._faulty:{cell.program}", given, [environment] * size, directory)
    try:
        return judge(cell, job, timeout, before)
    finally:
        job.end()


def judge(cell: Cell, job: Job, timeout: float, before: set[str]) -> Outcome:
    gone = cell.fault in ("kill", "stop")
    survivors = [number for number in range(len(job.processes)) if number != VICTIM or not gone]
    deadline = time.monotonic() + 90 + timeout
    problems, longest, ended, first = [], 0.0, 0.0, ""
    for number in survivors:
        process = job.processes[number]
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode != 0:
            text = job.outputs[number].read_text()[-1500:]
            problems.append(f"process {number} ended with {process.exitcode} (None: not at all)\n{text}")
            continue
        told = job.result(number)
        if not (job.directory / "hurt").exists():
            problems.append(f"nothing happened to process {VICTIM}\n{job.all_output()}")
            break
        hurt = float((job.directory / "hurt").read_text())
        seconds = told["at"] - hurt
        longest, ended = max(longest, seconds), max(ended, told["ended_at"] - hurt)
        first = first or told["text"]
        if problem := what_is_wrong(cell, number, told):
            problems.append(f"process {number}: {problem}: {told['type']}: {told['text'][:600]}")
        if cell.fault != "configuration" and seconds > timeout + SLACK_SECONDS:
            problems.append(f"process {number} took {seconds:.1f} s: {told['text']}")
    if left := shared_memory() - before:
        problems.append(f"left in /dev/shm: {sorted(left)}")
    return Outcome(longest, ended, first, problems)


def what_is_wrong(cell: Cell, number: int, told: dict[str, Any]) -> str | None:
    text = told["text"]
    if told["type"] is None:
        return "noticed nothing"
    if told["type"] not in ("FailedContextError", "ContextError"):
        return "is not an error of ours"
    if "\n" in text:
        return "has several lines"
    if cell.fault == "configuration":
        return None if re.search("differs between|process 0 and .* process", text) else "does not say what differs"
    if number != VICTIM and not re.search(rf"process {VICTIM}\b", text):
        return f"does not name process {VICTIM}"
    return None if re.search(r"step \d|\d steps", text) else "names no step"


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "gloo", "async_emb"))}


def measure(cell: Cell, repetitions: int, timeout: float, directory: Path) -> list[Outcome]:
    outcomes = []
    for repetition in range(repetitions):
        own = directory / "-".join([*cell, str(repetition)]).replace(" ", "_")
        own.mkdir(parents=True)
        outcomes.append(run(cell, timeout, own))
    return outcomes


def table(results: dict[Cell, list[Outcome]], timeout: float, repetitions: int) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "torch"))
    lines = [
        INTRODUCTION.format(slack=SLACK_SECONDS, repetitions=repetitions, timeout=timeout),
        f"{datetime.date.today()}, {versions}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.machine()}.",
    ]
    for program in SHAPES:
        lines += ["", f"## {WORDS[program][0].upper()}{WORDS[program][1:]}", ""]
        lines += [f"| | {' | '.join(_faulty.POINTS)} |", "|---" * (len(_faulty.POINTS) + 1) + "|"]
        lines += [_row(results, program, fault, _faulty.POINTS) for fault in _faulty.FAULTS]
        lines += ["", f"| | {' | '.join(_faulty.CONFIGURATIONS)} |", "|---" * (len(_faulty.CONFIGURATIONS) + 1) + "|"]
        lines += [_row(results, program, "configuration", _faulty.CONFIGURATIONS)]
    return "\n".join(lines) + "\n"


def _row(results: dict[Cell, list[Outcome]], program: str, fault: str, columns: tuple[str, ...]) -> str:
    numbers = []
    for column in columns:
        outcomes = results.get(Cell(program, fault, column))
        bad = sum(bool(outcome.problems) for outcome in outcomes or [])
        longest = f"{max(outcome.seconds for outcome in outcomes):.1f}" if outcomes else "-"
        numbers.append(longest + (f" ({bad} wrong)" if bad else ""))
    return f"| {fault} | {' | '.join(numbers)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=5.0, help="ASYNC_EMB_TIMEOUT_SECONDS")
    parser.add_argument("--jobs", type=int, default=1, help="how many jobs run side by side")
    parser.add_argument("--only", default="", help="cells whose name matches this, such as 'train kill'")
    parser.add_argument("--write", type=Path, help="the document with the tables")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if re.search(options.only, " ".join(cell))]
    results: dict[Cell, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        futures = {
            cell: pool.submit(measure, cell, options.repetitions, options.timeout, Path(folder)) for cell in chosen
        }
        for cell, future in futures.items():
            results[cell] = future.result()
            outcomes = results[cell]
            error, end = max(o.seconds for o in outcomes), max(o.ended for o in outcomes)
            print(f"{' | '.join(cell)}: error {error:.2f} s, end {end:.2f} s: {outcomes[0].line[:160]}", flush=True)
            for outcome in outcomes:
                for problem in outcome.problems:
                    print(f"    WRONG {problem}", flush=True)
    text = table(results, options.timeout, options.repetitions)
    print(text)
    if options.write:
        options.write.write_text(text)
    return int(any(outcome.problems for outcomes in results.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
