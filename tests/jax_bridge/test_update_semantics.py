"""What an update does to the rows of a batch, and to no others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jax_bridge import reference
from jax_bridge.errors import IdError

from . import _programs as programs
from ._one_update import RANKS, WIDTH, handle_for, update
from ._programs import Batch, Rule, fresh

BAD_IDS = [-1, 8, 9, 2**31 - 1, -(2**31)]


# ---- duplicates


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("positions", [(0, 1), (0, 3), (2, 3)], ids=str)
def test_an_accumulator_grows_once_for_a_row_however_often_it_comes(positions, ranks):
    """The two occurrences of row 1 sit on one data shard, or on two."""
    ids, grads = np.zeros(4, np.int32), np.zeros((4, 4), np.float32)
    ids[list(positions)] = 1
    grads[list(positions), :2] = 1
    run = update(np.zeros((8, 4), np.float32), ids, grads, ranks=ranks, logical_width=2, padding_id=0).run
    expected = np.zeros((8, 4))
    expected[1, :2] = -1
    assert np.array_equal(run.table, expected)
    assert run.row_state.tolist() == [0, 4, 0, 0, 0, 0, 0, 0]
    assert run.norms[0] == np.sqrt(np.float32(8))


def test_ten_thousand_ids_of_seven_values_agree_with_float64():
    rng = np.random.default_rng(0)
    values = np.array([3, 11, 12, 40, 41, 77, 99])
    ids = values[rng.integers(0, 7, 10_000)]
    grads = rng.normal(size=(10_000, 16)).astype(np.float32)
    table = rng.normal(size=(100, 16)).astype(np.float32)
    run = update(table, ids, grads, ranks=4).run
    summed = np.zeros((100, 16))
    np.add.at(summed, ids, grads.astype(np.float64))
    state = np.mean(summed**2, axis=1)
    dense = table - np.divide(summed, np.sqrt(state)[:, None], out=np.zeros_like(summed), where=state[:, None] > 0)
    assert np.allclose(run.table, dense, rtol=1e-5, atol=1e-5)
    assert np.allclose(run.row_state, state, rtol=1e-5)
    assert math.isclose(run.norms[0], np.sqrt(np.sum(summed**2)), rel_tol=1e-5)
    others = np.setdiff1d(np.arange(100), values)
    programs.assert_same_bits(run.table[others], table[others])
    assert not run.row_state[others].any()


# ---- ids outside of the table


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
def test_an_id_outside_of_the_table_never_trains_a_wrong_row(policy, bad, ranks):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8, WIDTH)).astype(np.float32)
    for ids in ([bad] * 4, [5, bad, 1, 5], [bad, 0, 7, bad]):
        batch = Batch(np.array(ids, np.int32), rng.normal(size=(4, WIDTH)).astype(np.float32))
        handle = handle_for(ranks, 4, WIDTH, id_policy=policy)
        outcome = programs.observe(handle, fresh(table), [batch], Rule())
        programs.assert_same_run(outcome.run, programs.expected(fresh(table), [batch], Rule(), id_policy=policy))
        nearest = [0 if bad < 0 else 7] if policy == "clamp" else []
        changed = np.flatnonzero(np.any(outcome.run.table != table, axis=1))
        assert changed.tolist() == sorted({i for i in ids if i != bad} | set(nearest))
        assert np.array_equal(np.flatnonzero(outcome.run.row_state), changed)
        assert outcome.stats["bad_ids"] == ids.count(bad)
        assert isinstance(outcome.error, IdError) == (policy == "error")


def test_steps_after_a_bad_id_go_on_as_with_drop():
    rng = np.random.default_rng(0)
    start = fresh(rng.normal(size=(8, WIDTH)).astype(np.float32))
    batches = [
        Batch(np.array(ids, np.int32), rng.normal(size=(4, WIDTH)).astype(np.float32))
        for ids in ([5, 8, 1, 5], [0, 1, 2, 3], [5, 6, -1, 0])
    ]
    for staleness in (0, 1):
        outcome = programs.observe(handle_for(2, 4, WIDTH), start, batches, Rule(), staleness=staleness)
        wanted = programs.expected(start, batches, Rule(), staleness=staleness, id_policy="drop")
        programs.assert_same_run(outcome.run, wanted)
        assert "token id 8 at position 1 of lookup step 1" in str(outcome.error)


# ---- the caller's own segments


def segments_of(ids: np.ndarray, num_unique: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    unique, segments = np.unique(ids, return_inverse=True)
    padding = np.full(num_unique - len(unique), rows)
    return segments.astype(np.int32), np.concatenate([unique, padding]).astype(np.int32)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("staleness", [0, 1])
def test_given_segments_give_the_bits_of_segments_that_are_found(staleness, ranks):
    rng = np.random.default_rng(0)
    start = fresh(rng.normal(size=(20, WIDTH)).astype(np.float32))
    found, given = [], []
    for _ in range(5):
        ids = rng.integers(0, 20, 32).astype(np.int32)
        grads = rng.normal(size=(32, WIDTH)).astype(np.float32)
        found.append(Batch(ids, grads))
        given.append(Batch(ids, grads, True, *segments_of(ids, 32, 20)))
    handle = handle_for(ranks, 32, WIDTH)
    runs = [programs.observe(handle, start, batches, Rule(), staleness=staleness).run for batches in (found, given)]
    programs.assert_same_run(*runs)
    programs.assert_same_run(runs[0], programs.expected(start, found, Rule(), staleness=staleness))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens_without_a_segment_are_looked_up_and_not_trained(ranks):
    rng = np.random.default_rng(0)
    start = fresh(rng.normal(size=(20, WIDTH)).astype(np.float32))
    ids = rng.integers(0, 20, 32).astype(np.int32)
    grads = rng.normal(size=(32, WIDTH)).astype(np.float32)
    segments, unique = segments_of(ids, 33, 20)
    # One row loses all of its tokens, but stays in unique_tokens.
    untrained = (segments == 3) | (rng.random(32) < 0.3)
    segments[untrained] = -1
    grads[untrained] = np.nan
    handle = handle_for(ranks, 32, WIDTH, num_unique=33, name="wide index")
    outcome = programs.observe(handle, start, [Batch(ids, grads, True, segments, unique)], Rule())
    index = reference.unique_from_segments(segments, unique, 20)
    wanted = reference.rowwise_adagrad_update(
        start.table, start.row_state, index, grads, learning_rate=0.1, eps=1e-8, decay_factor=1.0
    )
    programs.assert_same_bits(outcome.run.rows[0], start.table[ids])
    programs.assert_same_bits(outcome.run.table, wanted.table)
    programs.assert_same_bits(outcome.run.row_state, wanted.row_state)
    programs.assert_same_bits(outcome.run.norms[0], wanted.norm)
    assert outcome.error is None
    assert (outcome.stats["trained_tokens"], outcome.stats["unique_tokens"]) == (
        np.count_nonzero(~untrained),
        len(index.unique),
    )


@pytest.mark.parametrize("segment", [-2, 4, 2**31 - 1, 3], ids=["below -1", "num_unique", "largest", "of padding"])
def test_a_segment_that_names_no_row_trains_nothing_and_is_reported(segment):
    start = fresh(np.ones((8, WIDTH), np.float32))
    batch = Batch(
        np.array([1, 2, 5, 1], np.int32),
        np.ones((4, WIDTH), np.float32),
        True,
        np.array([0, 1, segment, 0], np.int32),
        np.array([1, 2, 5, 8], np.int32),
    )
    outcome = programs.observe(handle_for(2, 4, WIDTH), start, [batch], Rule())
    assert isinstance(outcome.error, IdError)
    assert "at position 2" in str(outcome.error)
    assert np.flatnonzero(outcome.run.row_state).tolist() == [1, 2]
    assert outcome.stats["bad_ids"] == 1


# ---- more unique ids than there is room for


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_more_unique_ids_than_num_unique_are_reported_and_the_smallest_trained(ranks):
    rng = np.random.default_rng(0)
    start = fresh(rng.normal(size=(20, WIDTH)).astype(np.float32))
    ids = np.array([9, 3, 3, 17, 4, 9, 11, 0], np.int32)
    batches = [Batch(ids, rng.normal(size=(8, WIDTH)).astype(np.float32)) for _ in range(2)]
    handle = handle_for(ranks, 8, WIDTH, num_unique=4, name="crowded")
    outcome = programs.observe(handle, start, batches, Rule())
    programs.assert_same_run(outcome.run, programs.expected(start, batches, Rule(), num_unique=4))
    assert np.flatnonzero(outcome.run.row_state).tolist() == [0, 3, 4, 9]
    assert isinstance(outcome.error, IdError)
    assert str(outcome.error) == (
        "async_emb 'crowded': the batch of update step 1 has 6 unique ids, more than num_unique=4"
    )
    assert (outcome.stats["trained_tokens"], outcome.stats["unique_tokens"]) == (2 * 6, 2 * 4)


def test_exactly_num_unique_ids_fit():
    outcome = update(np.ones((8, WIDTH), np.float32), [1, 2, 2, 5], np.ones((4, WIDTH)), num_unique=3, name="just")
    assert outcome.error is None
    assert np.flatnonzero(outcome.run.row_state).tolist() == [1, 2, 5]


# ---- counters


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_counters_add_up(ranks):
    handle = handle_for(ranks, 8, WIDTH, id_policy="drop", padding_id=0, name="counted")
    grads = np.ones((8, WIDTH), np.float32)
    batches = [
        Batch(np.array(ids, np.int32), grads, pending)
        for ids, pending in [
            ([0, 0, 1, 1, 2, -1, 8, 7], True),
            ([1, 2, 3, 4, 5, 6, 7, 0], True),
            ([1, 1, 1, 1, 1, 1, 1, 1], False),
        ]
    ]
    stats = programs.observe(handle, fresh(np.ones((8, WIDTH), np.float32)), batches, Rule()).stats
    calls = ["lookup_begin", "lookup_lease", "lookup_done", "stage", "update_begin", "update_lease", "update_done"]
    assert {name: stats[f"{name}_calls"] for name in calls} == dict.fromkeys(calls, 3 * ranks)
    exact = {
        "refused_calls": 0,
        "lookups": 3,
        "tokens": 24,
        "updates": 2,
        "skipped_updates": 1,
        "trained_tokens": 4 + 7 + 8,
        "unique_tokens": 3 + 7 + 1,
        "bad_ids": 2,
        "padding_ids": 3,
        "saturated": 0,
        # Each rank reads the columns of its peers for its tokens, and sends their columns of its gradient rows.
        "bytes_moved": 2 * 3 * (8 // ranks) * WIDTH * 4 * (ranks - 1),
        "unique_share": 11 / 19,
    }
    assert {name: stats[name] for name in exact} == exact
    assert stats["arena_bytes"] > 8 * WIDTH * 4  # a batch of gradient rows lies there
    assert 0 <= stats["exposed_wait_seconds"] < 60
