"""One suite in this process: ``python -m benchmarks.cpu.child SUITE FILE`` writes rows to FILE, JSON, one a line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from .row import Options, as_json


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.child", description=__doc__)
    parser.add_argument("suite")
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    suite = importlib.import_module(f"benchmarks.cpu.{options.suite}")
    with options.file.open("w") as file:
        for row in suite.rows(Options(quick=options.quick)):
            print(json.dumps(as_json(row)), file=file, flush=True)
            verdict = {True: "", False: "   goal not reached", None: ""}[row.is_met]
            shown = row.comparison.format(row.value, row.unit)
            print(f"  {row.work}, {row.setting}: {shown} beside {row.peer}{verdict}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
