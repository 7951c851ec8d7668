"""A table over several processes gives what it gives in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_bridge.processes import traffic
from tests.jax_bridge import _fifty_steps as fifty
from tests.jax_bridge import _training as training

from . import _tables

CASES = [*fifty.ONE_OF_EACH_DTYPE]


def bytes_of(case: Any, staleness: int, processes: int, process: int) -> int:
    """What the model of docs/scale.md says of the fifty steps."""

    def of_step(unique: int) -> traffic.Traffic:
        return traffic.column_sharded(
            processes=processes,
            process=process,
            ranks_per_process=8 // processes,
            tokens_per_rank=fifty.TOKENS // 8,
            width=fifty.WIDTH,
            logical_width=fifty.LOGICAL_WIDTH,
            itemsize=np.dtype(fifty.DTYPES[case[0]]).itemsize,
            unique=unique,
        )

    total = 0
    for batch in fifty.batches_of(case[0]):
        trained = batch.ids[(batch.ids >= 0) & (batch.ids < fifty.ROWS) & (batch.ids != fifty.PADDING_ID)]
        total += of_step(len(np.unique(trained))).step_bytes
    if staleness:  # one lookup more, which nobody needs, and an update that finds nothing staged and shares no sums
        total += of_step(0).step_bytes
    return total


@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 4), (4, 2), (8, 1)], ids=str)
def test_fifty_steps_give_the_bits_of_the_oracle_and_send_the_bytes_of_the_model(start, processes, devices):
    cases = CASES if processes < 8 else CASES[1:2]  # eight processes on two cores take their time
    job = start(
        "tests.multiprocess._tables:fifty_steps", processes=processes, devices=devices, cases=cases, stalenesses=[0, 1]
    )
    runs = [(staleness, case) for staleness in (0, 1) for case in cases]
    wanted = [fifty.expected(case, staleness).digest() for staleness, case in runs]
    for result in job.wait(150):
        assert result["digests"] == wanted
        assert result["sent"] == [bytes_of(case, s, processes, result["process"]) for s, case in runs]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_training_step_gives_the_bits_of_one_process(start, staleness):
    job = start("tests.multiprocess._tables:train", processes=2, devices=2, staleness=staleness)
    wanted = _tables.trained(training.make_step(4, staleness))
    assert wanted["again"] == wanted["through"]
    for process, result in enumerate(job.wait(150)):
        assert result == {"process": process, **wanted}
