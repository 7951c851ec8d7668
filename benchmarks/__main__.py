"""All CPU benchmarks, each beside its peers: ``python -m benchmarks``. Prints a table; writes JSON, Markdown and PNG.

Run it on a machine that does nothing else. Results are compared with the peer's before anything is timed. Times are no
part of the exit status: it is 0 where everything ran.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import machine
from .cpu.plots import plot
from .cpu.row import as_json
from .cpu.suites import ROOT, SUITES, SuiteError, run
from .cpu.table import as_markdown, in_short, summary, write_into

NAMES = ", ".join(suite.name for suite in SUITES)


def main(arguments: Sequence[str] | None = None, program: str = "python -m benchmarks") -> int:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few lines and iterations: shows that everything runs")
    parser.add_argument("--only", default="*", metavar="PATTERN", help=f"of these suites: {NAMES}")
    parser.add_argument("--out", type=Path, help="folder of the results; benchmarks/results, or build/bench of --quick")
    parser.add_argument("--publish", action="store_true", help="put the tables into README.md and docs/performance.md")
    options = parser.parse_args(arguments)
    suites = [suite for suite in SUITES if fnmatch.fnmatch(suite.name, options.only)]
    if not suites:
        parser.error(f"--only {options.only!r} matches none of {NAMES}")
    folder = options.out or Path("build/bench" if options.quick else "benchmarks/results")
    folder.mkdir(parents=True, exist_ok=True)

    about, began, rows, failures = machine.describe(), time.monotonic(), [], []
    for suite in suites:
        print(f"benchmarks [{time.monotonic() - began:3.0f} s]: {suite.name}", file=sys.stderr, flush=True)
        try:
            rows += run(suite, options.quick)
        except SuiteError as error:
            failures.append(str(error))
    seconds = round(time.monotonic() - began)

    caption = f"{machine.in_a_line(about)}; {seconds} s in all"
    table = as_markdown(rows)
    print(f"\n{caption}\n\n{table}\n{summary(rows)}")
    record = {"machine": about, "quick": options.quick, "seconds": seconds, "rows": [as_json(row) for row in rows]}
    (folder / "cpu.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (folder / "cpu.md").write_text(f"{caption}\n\n{table}")
    plot(rows, folder / "cpu.png")
    if options.publish:
        write_into(ROOT / "README.md", f"\n{in_short(rows)}\n{caption}: `make bench`\n\n")
        write_into(ROOT / "docs" / "performance.md", f"\n{table}\n{caption}\n\n")
    print(f"written: {', '.join(str(folder / name) for name in ('cpu.json', 'cpu.md', 'cpu.png'))}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
