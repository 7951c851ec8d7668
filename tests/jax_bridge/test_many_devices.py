"""More simulated devices than cores, many tables, torch's threads and a busy Python thread beside: steps finish.

Handlers that block, or that take the Python lock, make such programs stop for ever.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_SECONDS = 120

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins processes to cores")


def finishes(*options: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.jax_bridge._many_devices", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "finished"


def test_sixteen_devices_on_one_core_finish():
    finishes("--devices=16", "--cores=1", "--steps=50")


def test_twelve_tables_on_eight_devices_on_one_core_finish():
    finishes("--devices=8", "--cores=1", "--steps=20", "--tables=12")


def test_two_devices_beside_a_busy_python_thread_finish():
    finishes("--devices=2", "--cores=2", "--steps=100", "--busy", "--torch-threads=1")


@pytest.mark.slow
@pytest.mark.timeout(8 * LIMIT_SECONDS)
@pytest.mark.skipif("ASYNC_EMB_ALL_TESTS" not in os.environ, reason="takes minutes; set ASYNC_EMB_ALL_TESTS to run it")
@pytest.mark.parametrize(("devices", "cores"), list(itertools.product((2, 8, 16), (1, 2))))
def test_any_number_of_devices_on_one_or_two_cores_finishes(devices, cores):
    for staleness in (0, 1):
        for others in ((), ("--busy",), ("--torch-threads=1",)):
            finishes(f"--devices={devices}", f"--cores={cores}", "--steps=200", f"--staleness={staleness}", *others)
