"""Which call may follow which: every refusal says what came when, costs nothing, and is said once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jax_bridge import PipelineError, runtime

from . import _per_shard as per_shard
from ._per_shard import Arrays, Batch
from ._programs import assert_same_bits, opened

RANKS = 2


@pytest.fixture(scope="module")
def calls() -> per_shard.Calls:
    return per_shard.Calls(per_shard.make_handle(RANKS))


@pytest.fixture
def handle() -> Any:
    with opened(per_shard.make_handle(RANKS)) as handle:
        yield handle


@dataclasses.dataclass
class Steps:
    """Exact steps, one call after the other. Results go into the fields."""

    calls: per_shard.Calls
    batches: list[Batch]
    arrays: Arrays
    gate: Any
    pin: Any = None
    rows: Any = None
    results: Any = None

    def lookup_start(self, k: int) -> None:
        self.arrays, self.pin = self.calls.lookup_start(self.arrays, self.batches[k].ids, self.gate)

    def lookup_done(self, k: int) -> None:
        self.rows = self.calls.lookup_done(self.pin, self.batches[k].ids)

    def lookup_done_with_an_old_pin(self, k: int) -> None:
        self.rows = self.calls.lookup_done(self.pin - 1, self.batches[k].ids)

    def lookup_done_of_another_batch(self, k: int, positions: tuple[int, ...] = (5, 13)) -> None:
        """Another one on both ranks, which hold eight tokens each."""
        other = self.batches[k].ids.copy()
        other[list(positions)] = 60
        self.rows = self.calls.lookup_done(self.pin, other)

    def stage_update(self, k: int) -> None:
        self.calls.stage_update(self.batches[k].grads, self.gate)

    def update_start(self, k: int) -> None:
        self.arrays, _ = self.calls.update_start(self.arrays, self.gate)

    def update_done(self, k: int) -> None:
        self.results = self.calls.update_done(self.gate)

    def wait(self) -> None:
        jax.block_until_ready((self.arrays, self.pin, self.rows, self.results))


IN_ORDER = ("lookup_start", "lookup_done", "stage_update", "update_start", "update_done")
# How many calls of the second step have been made, the call that comes then, and what is said about it.
REFUSALS = [
    (
        1,
        "lookup_start",
        "lookup_start of step 3 came before lookup_done of step 2: consume each lookup",
    ),
    (0, "lookup_done", "lookup_done with nothing armed: step 1 was the last started and is consumed"),
    (2, "lookup_done", "lookup_done with nothing armed: step 2 was the last started and is consumed"),
    (1, "lookup_done_with_an_old_pin", "lookup_done got a stale pin of step 1, but step 2 is armed: pass the pin that"),
    (
        1,
        "lookup_done_of_another_batch",
        r"lookup_done was given token_ids of another batch: step 2 was armed with row \d+ at position (5|13), but "
        "token_ids have 60 there",
    ),
    (3, "stage_update", "stage_update number 3 came before an update start took number 2"),
    (4, "stage_update", "stage_update number 3 came before update_done of step 2"),
    (1, "update_start", "update start of step 2 came before lookup_done of step 2: the update would change rows that"),
    (
        2,
        "update_start",
        "update start of step 2 has nothing staged: only the first one may; call stage_update",
    ),
    (4, "update_start", "update start of step 3 came before update_done of step 2"),
    (0, "update_done", "update_done with nothing armed: update step 1 was the last started and is consumed"),
    (3, "update_done", "update_done with nothing armed: update step 1 was the last started and is consumed"),
]


@pytest.fixture
def steps(calls, handle) -> Steps:
    """Two steps to make, the first of which has been made."""
    arrays, gate = per_shard.place(handle, per_shard.make_start())
    steps = Steps(calls, per_shard.make_batches(2), arrays, gate)
    for call in IN_ORDER:
        getattr(steps, call)(0)
    return steps


@pytest.mark.parametrize(("made", "call", "message"), REFUSALS, ids=[f"{call} after {n}" for n, call, _ in REFUSALS])
def test_a_refused_call_says_what_came_when_and_loses_nothing(handle, steps, made, call, message):
    for name in IN_ORDER[:made]:
        getattr(steps, name)(1)
    steps.wait()
    before, rows = jax.tree.map(np.array, steps.arrays), steps.rows

    getattr(steps, call)(1)
    steps.wait()
    steps.rows = rows
    assert runtime.stats(handle)["refused_calls"] == RANKS
    for got, wanted in zip(steps.arrays, before, strict=True):
        assert_same_bits(got, wanted, "arrays passed through")
    with pytest.raises(PipelineError, match=rf"async_emb 'table' [\w ]+ on rank \d \(device \d\): {message}") as caught:
        runtime.check(handle)
    assert "tables and state are as before this call" in str(caught.value)
    runtime.check(handle)  # said once

    # What was under way goes on as if nothing had been.
    for name in IN_ORDER[made:]:
        getattr(steps, name)(1)
    expected = per_shard.oracle(per_shard.make_start(), steps.batches)
    assert_same_bits(steps.rows, expected.rows[1], "rows")
    assert_same_bits(steps.results[0], expected.norms[1], "norm")
    assert [int(x) for x in steps.results[1:]] == [1, 1]
    assert_same_bits(steps.arrays.table, expected.table, "table")
    assert_same_bits(steps.arrays.row_state, expected.row_state, "row_state")
    runtime.check(handle)


def test_gradients_without_a_batch_are_refused(calls, handle):
    arrays, gate = per_shard.place(handle, per_shard.make_start())
    steps = Steps(calls, per_shard.make_batches(2), arrays, gate)
    steps.stage_update(0)
    steps.update_done(0)
    steps.wait()
    with pytest.raises(
        PipelineError, match="stage_update number 1 has no batch to belong to: no lookup was consumed yet"
    ):
        runtime.check(handle)
    per_shard.assert_trains_like_the_oracle(handle)


def test_from_a_refusal_on_nothing_is_applied_until_it_has_been_said(handle, steps):
    steps.lookup_done(1)
    before = jax.tree.map(np.array, steps.arrays)
    for call in IN_ORDER:
        getattr(steps, call)(1)
        steps.wait()
        if call == "lookup_done":
            assert np.isnan(steps.rows).all(), "rows that nobody can take for real ones"
    assert [float(x) for x in steps.results] == [0, 0, 0]
    for got, wanted in zip(steps.arrays, before, strict=True):
        assert_same_bits(got, wanted, "arrays passed through")
    assert runtime.stats(handle)["refused_calls"] == 6 * RANKS
    with pytest.raises(PipelineError, match="lookup_done with nothing armed: step 1"):
        runtime.check(handle)

    for call in IN_ORDER:
        getattr(steps, call)(1)
    expected = per_shard.oracle(per_shard.make_start(), steps.batches)
    assert_same_bits(steps.arrays.table, expected.table, "table")


def test_rows_of_another_batch_on_one_rank_alone_cost_the_lookup_but_neither_table_nor_state(handle, steps):
    """Only that rank can know, and the other has consumed its rows by then."""
    steps.lookup_start(1)
    before = jax.tree.map(np.array, steps.arrays)
    steps.lookup_done_of_another_batch(1, positions=(13,))
    steps.wait()
    with pytest.raises(
        PipelineError, match=r"on rank 1 .* at position 13, but .* The ranks stood at different calls, so"
    ):
        runtime.check(handle)
    for got, wanted in zip(steps.arrays, before, strict=True):
        assert_same_bits(got, wanted, "arrays passed through")

    for call in IN_ORDER:
        getattr(steps, call)(1)
    expected = per_shard.oracle(per_shard.make_start(), steps.batches)
    assert_same_bits(steps.rows, expected.rows[1], "rows")
    assert_same_bits(steps.arrays.table, expected.table, "table")
    runtime.check(handle)


def test_the_first_update_may_find_nothing_staged_and_says_so_in_its_results(calls, handle):
    start = per_shard.make_start()
    arrays, gate = per_shard.place(handle, start)
    steps = Steps(calls, [], arrays, gate)
    steps.update_start(0)
    steps.update_done(0)
    assert [float(x) for x in steps.results] == [0, 0, 0]
    assert_same_bits(steps.arrays.table, start.table, "table")
    runtime.check(handle)
