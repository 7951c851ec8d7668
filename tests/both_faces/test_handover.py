"""Trained for a while by one framework, then by the other, and back: the same bits as by one alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_bridge import handover, with_next
from tests.jax_bridge._programs import assert_same_bits
from torch_ext import ThreadRanks

from . import through_jax, through_torch
from .cases import CASES, Case

PARAMS: dict[str, Any] = {"params": {"shift": np.float32(0)}}


def _case(name: str, staleness: int) -> Case:
    (found,) = (c for c in CASES if c.name == name and c.staleness == staleness)
    return dataclasses.replace(found, steps=9, change=lambda step, batch: batch, padding_id=None)


def _in_jax(case: Case, logical: Any, first: int, last: int) -> Any:
    batches = through_jax.batches_of(case)[first:last]
    with through_jax.make(case) as step:
        state = through_jax.start(step)
        if logical is not None:
            opt_state = step.snapshot(state)["opt_state"]
            state = step.restore(handover.to_snapshot({"table": logical}, opt_state=opt_state, **PARAMS))
        for batch, upcoming in with_next(batches):
            state, _ = step(state, batch, upcoming)
        return handover.from_snapshot(step.snapshot(state), "table")


def _in_torch(case: Case, logical: Any, first: int, last: int, *, ranks: int) -> Any:
    def on(rank: Any) -> Any:
        with through_torch.make(case, rank) as table:
            if logical is not None:
                table.load_arrays(logical)
            for batch in case.batches()[first:last]:
                ids, grads = through_torch.share_of(batch, rank)
                table(ids).backward(grads)
                table.step(apply=batch.apply)
            taken = table.to_arrays()
            table.flush()
            return taken

    return ThreadRanks(ranks).run(on)[0]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", ["lazy decays", "stochastic rounding", "a learning-rate schedule"])
def test_hand_over_in_both_directions_changes_no_bit(name, staleness):
    case = _case(name, staleness)
    alone = _in_jax(case, None, 0, 9)
    assert ("staged_ids" in alone) == (staleness == 1), "in the middle of the schedule"
    same = _in_torch(case, None, 0, 9, ranks=3)
    logical = _in_jax(case, None, 0, 3)
    logical = _in_torch(case, logical, 3, 6, ranks=2)
    logical = _in_jax(case, logical, 6, 9)
    for other in (same, logical):
        assert other.keys() == alone.keys()
        for key in alone:
            assert_same_bits(other[key], alone[key], key)
