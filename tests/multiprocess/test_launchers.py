"""Jobs that torchrun and srun start, the real ones: every process finds its place, and the bits are those of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.jax_bridge import _training as training

from . import _recovery as recovery
from . import _slurm, launched
from ._launchers import find, two_free_ports

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
PROCESSES = 2


def environment() -> dict[str, str]:
    ours = ("XLA_FLAGS", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def launch(command: Sequence[str], folder: Path, variables: Mapping[str, str] = {}) -> list[dict[str, object]]:
    """What each of the processes says that ``command`` starts."""
    program = [*command, "-m", "tests.multiprocess.launched", str(folder)]
    done = subprocess.run(
        program, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(PROCESSES)]


@pytest.fixture(scope="module")
def wanted() -> str:
    with training.shared_step(PROCESSES * launched.DEVICES, 1) as step:
        return recovery.finish(step, training.start(step))


def test_torchrun_starts_a_job(tmp_path, wanted):
    command = [find("torchrun"), "--nproc-per-node", str(PROCESSES), "--master-port", str(two_free_ports())]
    results = launch(command, tmp_path)
    assert results == [
        {"process": number, "of": PROCESSES, "source": "torchrun", "digest": wanted} for number in range(PROCESSES)
    ]


def test_srun_starts_a_job(tmp_path, wanted):
    if (reason := _slurm.why_not()) is not None:
        pytest.skip(reason)
    with _slurm.cluster(tmp_path / "slurm") as variables:
        command = [find("srun"), "--ntasks", str(PROCESSES), "--overcommit", sys.executable]
        results = launch(command, tmp_path, variables)
    assert results == [
        {"process": number, "of": PROCESSES, "source": "the environment", "digest": wanted}
        for number in range(PROCESSES)
    ]
