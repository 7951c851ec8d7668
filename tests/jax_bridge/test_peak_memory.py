"""A table of 1 GiB is never there twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WITHOUT_A_COPY = ["view", "step", "lookup", "embedding_view", "to_embedding", "adopt"]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc")
def test_a_table_of_one_gibibyte_is_never_duplicated():
    """In a process of its own, whose peak begins anew before each thing that is done. A tenth of a table is for what a
    program needs when it runs for the first time."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.jax_bridge._peak_memory"],
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    peaks = {name: float(tables) for name, tables in (line.split() for line in process.stdout.splitlines())}
    assert set(peaks) == {*WITHOUT_A_COPY, "from_embedding"}
    assert {name: peak for name, peak in peaks.items() if name in WITHOUT_A_COPY and peak > 0.1} == {}
    assert 0.9 < peaks["from_embedding"] < 1.1, "one copy, into memory that a step may take, and the measure sees it"
