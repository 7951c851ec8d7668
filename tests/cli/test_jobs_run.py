"""Every good job of the corpus runs, and allocates what `async-emb plan` says: exactly where the arena is one size, and
within 5 % where it depends on timing how many batches of ids are held at once."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jax_bridge.jobs.memory import memory_of

from . import _running as running
from .test_check import GOOD

JOBS = {path.stem: running.read(path) for path in GOOD}
OF_ONE_PROCESS = {name: checked.job for name, checked in JOBS.items() if checked.job.processes == 1}


@functools.cache
def groups() -> list[dict[str, Any]]:
    return running.alike(OF_ONE_PROCESS)


@functools.cache
def run_group(number: int) -> dict[str, dict[str, dict[str, int]]]:
    return running.run(groups()[number])


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
def test_a_good_job_runs_and_allocates_what_was_planned(name):
    (number,) = [number for number, group in enumerate(groups()) if name in group]
    measured = run_group(number)[name]
    for planned in memory_of(JOBS[name]):
        got = measured[planned.name]
        assert (planned.weights, planned.state) == (got["weights"], got["state"])
        assert planned.arena == pytest.approx(got["arena"], rel=0.05)
