"""The same batches and gradient rows through JAX, through torch, and by NumPy: tables, state, rows and reports are the
same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.jax_bridge._programs import assert_same_bits

from . import by_oracle, through_jax, through_torch
from .cases import CASES, TOKENS, Outcome, name_of


def assert_same(got: Outcome, wanted: Outcome) -> None:
    for what in ("weights", "accumulator", "rows"):
        assert_same_bits(getattr(got, what), getattr(wanted, what), what)
    assert (got.last_step is None) == (wanted.last_step is None)
    if got.last_step is not None:
        assert_same_bits(got.last_step, wanted.last_step, "last_step")
    shown = min(len(got.reports), len(wanted.reports))  # the JAX object does not report the update of a flush
    assert shown >= len(wanted.rows) - 1
    assert_same_bits(_norms(got)[:shown], _norms(wanted)[:shown], "norms")
    assert [valid for _, valid in got.reports[:shown]] == [valid for _, valid in wanted.reports[:shown]]


def _norms(outcome: Outcome) -> Any:
    return np.array([norm for norm, _ in outcome.reports], np.float32)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_both_faces_and_the_oracle_agree(case):
    jax, torch, numpy = through_jax.run(case), through_torch.run(case), by_oracle.run(case)
    assert_same(torch, numpy)
    assert_same(torch, jax)
    # In one process the JAX object tells of ids as soon as they are looked up, torch when their step is over.
    assert [text for _, text in torch.errors] == [text for _, text in jax.errors]
    assert all(
        later - case.staleness <= sooner <= later
        for (later, _), (sooner, _) in zip(torch.errors, jax.errors, strict=True)
    )
    idle = case.staleness  # the JAX object looks up an idle batch where no next one is announced
    assert torch.counts == jax.counts | {
        "lookups": jax.counts["lookups"] - idle,
        "tokens": jax.counts["tokens"] - idle * TOKENS,
        "padding_ids": torch.counts["padding_ids"],
    }
    assert {key: torch.counts[key] for key in numpy.counts} == numpy.counts
    assert (torch.errors != []) == (case.id_policy == "error" and torch.counts["bad_ids"] > 0) or case.num_unique


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_number_of_ranks_changes_no_bit_in_torch(case):
    wanted = through_torch.run(case, prefetch=False)
    other = dataclasses.replace(case, ranks=2 if case.ranks == 1 else 1)
    assert_same(through_torch.run(other), wanted)
