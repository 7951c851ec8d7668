"""Exact steps of a context one by one, with the oracle beside them, and a stream that is kept busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from jax_bridge import reference
from tests.jax_bridge._programs import assert_same_bits

from ._cases import PLAIN, Case, random_batches, random_start
from ._native_ranks import NativeRanks, Rank, Report, to_numpy

LONG = 1_000_000_000  # cycles: about half a second at 1.8 GHz


def busy(cycles: int = LONG) -> torch.cuda.Event:
    """Occupies the current stream. The event is reached when it is free again."""
    torch.cuda._sleep(cycles)
    event = torch.cuda.Event()
    event.record()
    return event


def case_of(ranks: int = 1, *, steps: int = 4, tokens: int = 240, width: int = 64) -> Case:
    batches = random_batches(np.float32, width, steps, tokens=tokens)
    return Case("streams", random_start(np.float32, width), batches, PLAIN, ranks=ranks)


class Modelled(NativeRanks):
    """Ranks with the oracle beside them, which takes the same exact steps."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = model_of(case)


@contextlib.contextmanager
def warmed_up(case: Case) -> Iterator[Modelled]:
    """Both have taken one step, so that nothing is loaded for the first time."""
    with Modelled(case) as ranks:
        ranks.on_ranks(lambda rank, _: whole_step(rank, 0))
        torch.cuda.synchronize()
        ranks.model.step(case.batches[0].ids, lambda *_: (case.batches[0].grads, True))
        yield ranks


def model_of(case: Case) -> reference.Simulation:
    return reference.Simulation(
        case.start.table, case.start.row_state, staleness=0, options=dict(case.rule.for_oracle()), id_policy="drop"
    )


def whole_step(rank: Rank, k: int) -> tuple[torch.Tensor, Report]:
    inputs = rank.inputs(rank.case.batches[k])
    rank.lookup_begin(inputs.ids)
    rows = rank.lookup_done(inputs.ids)
    rank.stage(inputs)
    rank.update_begin(rank.case.rule, rank.numbers(rank.case.rule, k))
    return rows, rank.update_done()


def assert_step_of_model(ranks: Modelled, k: int, rows: torch.Tensor, report: Report) -> None:
    batch = ranks.case.batches[k]
    wanted = ranks.model.step(batch.ids, lambda *_: (batch.grads, True))
    assert_same_bits(to_numpy(rows), wanted.rows, "rows")
    assert wanted.update is not None
    assert_same_bits(to_numpy(report.norm), wanted.update.norm, "norm")
    assert_same_bits(ranks.tables(), ranks.model.table, "table")
