"""Jobs of several processes allocate what `async-emb plan` says of them."""

from __future__ import annotations

import pytest

from jax_bridge.jobs.memory import memory_of
from tests.cli import _running as running
from tests.cli.test_check import GOOD

pytestmark = pytest.mark.multiprocess
JOBS = {str(path): checked for path in GOOD if (checked := running.read(path)).job.processes == 2}


@pytest.fixture(scope="module")
def measured(start_for_module):
    job = start_for_module("tests.cli._running:run_in_processes", processes=2, devices=4, paths=list(JOBS))
    return job.wait(120)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.split("/")[-1].removesuffix(".toml"))
def test_a_good_job_runs_in_two_processes(path, measured):
    for planned in memory_of(JOBS[path]):
        of_processes = [process[path][planned.name] for process in measured]
        assert {(got["weights"], got["state"]) for got in of_processes} == {(planned.weights, planned.state)}
        assert planned.arena == pytest.approx(max(got["arena"] for got in of_processes), rel=0.05)
