"""compute-sanitizer finds nothing in a small case that has every launch in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOUND_SOMETHING = 77


def sanitizer() -> str | None:
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = os.pathsep.join([*(f"{place}/bin" for place in places if place), os.environ.get("PATH", "")])
    return shutil.which("compute-sanitizer", path=path)


def environment() -> dict[str, str]:
    """The packages under test first, as they are here, then the tests."""
    path = [os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "JAX_PLATFORMS": "cpu",  # the oracle needs no more, and XLA's kernels are not what is looked at
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # so that a tensor's end is an allocation's end
    }


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    program = sanitizer()
    if program is None:
        pytest.skip("compute-sanitizer is not in CUDA_HOME/bin, /usr/local/cuda/bin or on PATH")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND_SOMETHING)]
    result = subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu._small_case"],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    report = f"{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
    assert result.returncode != FOUND_SOMETHING, report
    assert result.returncode == 0, report
    assert "every bit as in the oracle" in result.stdout, report
    summary = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}[tool]
    assert summary in result.stdout, report
