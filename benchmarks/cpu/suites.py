"""The suites, and how one is run: a process of its own with the host devices that it needs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .row import Row, from_json

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Suite:
    """Attributes:
    name: of the module.
    devices: CPU devices that XLA is told to make.
    """

    name: str
    devices: int = 1


SUITES = (
    Suite("one_device"),
    Suite("growth"),
    Suite("calls"),
    Suite("ranks", devices=4),
    Suite("training", devices=4),
    Suite("memory", devices=4),
    Suite("startup"),
)


class SuiteError(RuntimeError):
    """A suite has ended with an error; its own words went to the terminal."""


def run(suite: Suite, quick: bool) -> list[Row]:
    """Runs one suite and waits for it.

    Raises:
        SuiteError: the process failed; `rows` of it are what had been measured.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={suite.devices}".strip()
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.cpu.child", suite.name, str(file), *(["--quick"] if quick else [])]
        status = subprocess.run(command, env=environment, cwd=ROOT).returncode
        rows = [from_json(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    if status:
        raise SuiteError(f"benchmarks: {suite.name} has ended with status {status} after {len(rows)} rows")
    return rows
