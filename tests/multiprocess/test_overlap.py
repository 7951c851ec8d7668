"""The overlap benchmark runs, over real links where the machine allows them. Nothing is asserted on time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import overlap

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    files = ["--json", str(folder / "overlap.json"), "--plot", str(folder / "overlap.png")]
    command = [sys.executable, "-m", "benchmarks.overlap", "--quick", *files]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.multiprocess
@pytest.mark.slow
def test_every_configuration_is_measured_and_reported(tmp_path):
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    if result.stdout.startswith(overlap.MISSING):
        pytest.skip(result.stdout.strip())
    found = json.loads((tmp_path / "overlap.json").read_text())
    assert [(line["kind"], line["split"]) for line in found["lines"]] == [
        (kind, split) for kind, splits in overlap.WORKLOADS.items() for split in splits
    ]
    for line in found["lines"]:
        assert line["exact"]["exposed"] > 0, "a lookup over a link was there at once"
        assert line["exact"]["step"] > 2e-3 * line["milliseconds"], "a step was faster than the link"
    (link,) = found["delays"]
    assert link["round_trip"] >= 2e-3 * link["milliseconds"]
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    rows = [line for line in result.stdout.splitlines() if line.startswith("| independent") or "| data" in line]
    assert len(rows) == len(found["lines"])


def test_where_there_can_be_no_links_the_reason_is_given_and_nothing_is_written(tmp_path):
    result = run(tmp_path, PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout
        == f"{overlap.MISSING} no program ip and nsenter here (Debian: packages iproute2 and util-linux)\n"
    )
    assert list(tmp_path.iterdir()) == []
