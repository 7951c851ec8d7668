"""A table over several processes gives what it gives in one."""

from __future__ import annotations

import pytest

from tests.jax_bridge import _fifty_steps as fifty
from tests.jax_bridge import _training as training

from . import _tables

CASES = [*fifty.ONE_OF_EACH_DTYPE]


@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
def test_fifty_steps_give_the_bits_of_the_oracle(start, processes, devices):
    job = start(
        "tests.multiprocess._tables:fifty_steps", processes=processes, devices=devices, cases=CASES, stalenesses=[0, 1]
    )
    wanted = [fifty.expected(case, staleness).digest() for staleness in (0, 1) for case in CASES]
    for digests in job.wait(150):
        assert digests == wanted


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_training_step_gives_the_bits_of_one_process(start, staleness):
    job = start("tests.multiprocess._tables:train", processes=2, devices=2, staleness=staleness)
    wanted = _tables.trained(training.make_step(4, staleness))
    assert wanted["again"] == wanted["through"]
    for process, result in enumerate(job.wait(150)):
        assert result == {"process": process, **wanted}
