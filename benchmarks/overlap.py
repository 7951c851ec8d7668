"""How much of the communication between hosts each schedule hides: `python -m benchmarks.overlap`.

Two hosts, each a process with one device in a network namespace of its own, joined by a link with a delay. Prints a
table, and writes a JSON file and a plot. Where the machine allows no such links it says why, and ends with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from . import links
from .overlap_host import ANSWER
from .overlap_report import Delay, Line, Measured, as_json, as_text, plot

HOSTS = 2
DELAYS_MS = (2.0, 5.0, 10.0)
RATIOS = (0.5, 1.0, 2.0)  # dense work to embedding time
# So much more is asked for, because the machine goes faster and slower: what is called 1 shall not be less.
MARGIN = 1.05
# How the dense work of each kind of step is split into forward and backward. 1:2, because a layer's backward takes two
# matrix products for one of its forward; 1:1 are the halves of microbatches.
WORKLOADS = {"independent": ("1:2", "1:1"), "data parallel": ("1:2",)}
FORWARD_SHARE = {"1:2": 1 / 3, "1:1": 1 / 2}
# Its steps are twice as long, for reasons that have nothing to do with the embedding: one delay has to do.
DATA_PARALLEL_DELAY_MS = 5.0
MISSING = "overlap: not measured, because"


class Hosts:
    """The processes on both ends of the link, each of which answers every question."""

    def __init__(self, link: links.Link, errors: IO[str]) -> None:
        self.link, self._errors = link, errors

    def ask(self, what: str, **arguments: Any) -> list[Any]:
        for host in self.link.hosts:
            assert host.stdin is not None
            print(json.dumps([what, arguments]), file=host.stdin, flush=True)
        return [self._answer(host) for host in self.link.hosts]

    def _answer(self, host: subprocess.Popen[str]) -> Any:
        assert host.stdout is not None
        for line in host.stdout:  # Gloo prints there too
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self._errors.seek(0)
        raise SystemExit(f"overlap: a host has ended with {host.wait()}\n{self._errors.read()[-4000:]}")

    def measure(self, kind: str, staleness: int, counts: tuple[int, int], warm_up: int, steps: int) -> Measured:
        forward, backward = counts
        found = self.ask(
            "measure",
            kind=kind,
            staleness=staleness,
            forward=forward,
            backward=backward,
            warm_up=warm_up,
            steps=steps,
        )
        return Measured.of_hosts(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one delay and 10 steps of each, in place of three and 50")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/overlap.json, of --quick in build")
    parser.add_argument("--plot", type=Path, help="by default docs/overlap.png, of --quick in build")
    options = parser.parse_args(arguments)
    folders = (Path("build/overlap"),) * 2 if options.quick else (Path("benchmarks/results"), Path("docs"))
    options.json = options.json or folders[0] / "overlap.json"
    options.plot = options.plot or folders[1] / "overlap.png"
    began = time.monotonic()
    load = os.getloadavg()
    try:
        with started_hosts() as hosts:
            versions = hosts.ask("start")[0]
            delays, lines = measure_all(hosts, quick=options.quick)
            hosts.ask("end")
            kind = hosts.link.kind
    except links.LinkError as error:
        print(f"{MISSING} {error}")
        return 0
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.overlap" + (" --quick" if options.quick else ""),
        "link": kind,
        "versions": {"python": platform.python_version(), **versions},
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "load_after": os.getloadavg(),
        "seconds": time.monotonic() - began,
        "steps": 10 if options.quick else 50,
        "delays": [as_json(delay) for delay in delays],
        "lines": [as_json(line) for line in lines],
    }
    print(as_text(record, delays, lines))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    plot(lines, options.plot)
    print(f"\nall numbers are in {options.json}, the picture is {options.plot}")
    return 0


@contextlib.contextmanager
def started_hosts() -> Iterator[Hosts]:
    commands = [[sys.executable, "-m", "benchmarks.overlap_host", str(i), str(HOSTS)] for i in range(HOSTS)]
    with tempfile.TemporaryFile("w+") as errors, links.join(commands, errors) as link:
        yield Hosts(link, errors)


def measure_all(hosts: Hosts, *, quick: bool) -> tuple[list[Delay], list[Line]]:
    steps, warm_up = (10, 2) if quick else (50, 5)
    delays, lines = [], []
    for milliseconds in (5.0,) if quick else DELAYS_MS:
        hosts.link.set_delay(milliseconds * 1e-3)
        round_trip = hosts.ask("round_trip")[-1]
        if not 2 * milliseconds * 1e-3 <= round_trip <= 3 * milliseconds * 1e-3 + 2e-3:
            raise links.LinkError(f"a round trip over a link of {milliseconds} ms takes {round_trip * 1e3:.1f} ms")
        calibrated = hosts.measure("independent", 0, (50, 100), warm_up, 10)
        delay = Delay(milliseconds, round_trip, calibrated.exposed, calibrated.not_dense, calibrated.dense / 150)
        delays.append(delay)
        for kind, splits in WORKLOADS.items():
            if kind == "data parallel" and milliseconds != DATA_PARALLEL_DELAY_MS:
                continue
            product, embedding = delay.product, delay.embedding
            for ratio in (1.0,) if quick else RATIOS:
                wanted = MARGIN * ratio * embedding
                if kind == "independent":
                    product = product_in_steps(hosts, wanted, product)
                products = round(wanted / product)
                forward = [round(products * FORWARD_SHARE[split]) for split in splits]
                # For staleness 0 it is all one how they are split.
                exact = hosts.measure(kind, 0, (forward[0], products - forward[0]), warm_up, steps)
                for split, some in zip(splits, forward, strict=True):
                    stale = hosts.measure(kind, 1, (some, products - some), warm_up, steps)
                    lines.append(Line(kind, split, milliseconds, ratio, exact, stale))
                if not lines[-1].is_mixed:
                    embedding = lines[-1].exact.not_dense
                print(f"overlap: {kind}, {milliseconds:g} ms, {ratio:g} done", file=sys.stderr)
    return delays, lines


def product_in_steps(hosts: Hosts, dense: float, product: float) -> float:
    """Seconds of a matrix product inside of steps whose dense work takes about `dense`: alone, or in shorter or longer
    steps, it goes faster or slower."""
    for _ in range(2):
        products = max(3, round(dense / product))
        forward = round(products * FORWARD_SHARE["1:2"])
        product = hosts.measure("independent", 1, (forward, products - forward), 2, 10).dense / products
    return product


if __name__ == "__main__":
    sys.exit(main())
