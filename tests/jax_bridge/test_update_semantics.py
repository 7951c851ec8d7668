"""What an update does to the rows of a batch, and to no others."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_bridge import reference, runtime
from jax_bridge.errors import IdError

from . import _programs as programs
from ._programs import Batch, Rule, Run, fresh

BF16 = ml_dtypes.bfloat16
PLAIN = Rule(learning_rate=1.0, eps=0.0)
RANKS = [1, 2, 4]
BAD_IDS = [-1, 8, 9, 2**31 - 1, -(2**31)]
WIDTH = 80


def handle_for(ranks: int, tokens: int, width: int, *, logical_width: int | None = None, **options):
    options = {"name": "update semantics"} | options
    mesh = programs.mesh_of(ranks)
    return programs.handle_on(mesh, tokens=tokens, width=width, logical_width=logical_width or width, **options)


def update(table, ids, grads, *, ranks=2, rule=PLAIN, row_state=0.0, logical_width=None, pending=True, **options):
    """The outcome of one step. Ids may have any shape; grads are [tokens, width]."""
    table, grads = np.asarray(table), np.asarray(grads)
    ids = np.asarray(ids, np.int32)
    handle = handle_for(ranks, ids.size, table.shape[1], logical_width=logical_width, dtype=table.dtype, **options)
    return programs.observe(handle, fresh(table, row_state), [Batch(ids, grads.astype(table.dtype), pending)], rule)


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


# ---- precision and size


@pytest.mark.parametrize("ranks", RANKS)
def test_a_thousand_bfloat16_ones_sum_to_a_thousand(ranks):
    grads = np.ones((1000, 4))
    run = update(np.zeros((8, 4), BF16), np.full(1000, 6), grads, ranks=ranks).run
    assert run.norms[0] == 2000.0  # four columns of 1000; a bfloat16 sum would stop at 256
    assert run.row_state[6] == 1e6
    assert run.table[6].tolist() == [-1.0] * 4


def test_state_of_a_bfloat16_table_is_float32_and_keeps_growing():
    handle = handle_for(2, 2, WIDTH, dtype=BF16)
    batches = [Batch(np.array([1, 1], np.int32), np.full((2, WIDTH), 1e-3, BF16))] * 250
    start = fresh(np.zeros((8, WIDTH), BF16))
    states = []
    for _ in range(4):
        run = programs.observe(handle, start, batches, Rule(learning_rate=1e-3, eps=1e-8)).run
        start = programs.Start(run.table, run.row_state, run.last_step)
        states.append(float(run.row_state[1]))
    each = float(np.float32(BF16(1e-3)) * 2) ** 2
    assert run.row_state.dtype == np.float32
    assert np.allclose(states, each * np.array([250, 500, 750, 1000]), rtol=1e-4)


def test_small_steps_are_lost_to_nearest_and_kept_on_average_by_stochastic_rounding():
    """Steps of 0.1 of the spacing of bfloat16 below 1."""
    step = 0.1 * 2.0**-8
    rule = Rule(learning_rate=step, eps=0.0, state_decay=0.0)
    handle = handle_for(2, 2, WIDTH, dtype=BF16, padding_id=0)
    batches = [Batch(np.array([1, 0], np.int32), np.ones((2, WIDTH), BF16))] * 100
    start = fresh(np.ones((8, WIDTH), BF16))
    nearest = programs.observe(handle, start, batches, rule).run
    assert np.all(nearest.table[1] == 1)
    stochastic = programs.observe(handle, start, batches, rule._replace(rounding="stochastic", seed=5)).run
    programs.assert_same_run(
        stochastic, programs.expected(start, batches, rule._replace(rounding="stochastic", seed=5), padding_id=0)
    )
    assert abs(np.mean(stochastic.table[1].astype(np.float64)) - (1 - 100 * step)) < 0.1 * 100 * step


def available_gigabytes() -> float:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return 0.0
    return int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024 / 1e9


@pytest.mark.slow
@pytest.mark.skipif(available_gigabytes() < 12, reason="needs 12 GB of free memory for a table of 4.3 GB")
def test_elements_beyond_two_to_the_31_are_addressed():
    rows, width = 32769, 65536
    handle = programs.handle_on(programs.mesh_of(1), tokens=2, width=width, dtype=BF16, name="large", padding_id=5)
    steps = programs.program(handle, lazy=False, clips=False, rounding="nearest")
    with programs.opened(handle):
        sharding = NamedSharding(handle.mesh, steps.specs["table"])
        table = jax.jit(lambda: jnp.zeros((rows, width), BF16), out_shardings=sharding)()
        arrays = (table, *steps.put((np.zeros(rows, np.float32), np.zeros(rows, np.int32)), ("whole", "whole")))
        batches = steps.put_batches(
            [
                Batch(np.array([rows - 1, 5], np.int32), np.full((2, width), 1, BF16)),
                Batch(np.array([rows - 1, 0], np.int32), np.zeros((2, width), BF16)),
            ]
        )
        numbers = programs.numbers_of(PLAIN, 0)
        for batch in batches:
            arrays, (seen, norm, valid, _) = jax.block_until_ready(
                steps.exact_step(arrays, batch, numbers, steps.gate())
            )
        runtime.check(handle)
    last, first = np.asarray(seen)
    assert np.all(last == BF16(-1))
    assert not first.any()
    assert np.flatnonzero(np.asarray(arrays[1])).tolist() == [rows - 1]
    assert (norm, valid) == (0, 1)


# ---- the rule


def one_row(weight, grad, rule, *, row_state=0.0, ranks=2) -> Run:
    """A step on row 1 of a table of `weight`, with `grad` in every column."""
    table = np.full((8, WIDTH), weight, np.float32)
    grads = np.zeros((2, WIDTH), np.float32)
    grads[0] = grad
    return update(table, [1, 0], grads, rule=rule, row_state=row_state, ranks=ranks, padding_id=0).run


def test_eps_lies_outside_of_the_root():
    run = one_row(0.0, 2.0, Rule(learning_rate=1.0, eps=1.0))
    assert run.row_state[1] == 4
    assert np.all(run.table[1] == -np.float32(2) * (np.float32(1) / np.float32(3)))


def test_weight_decay_is_decoupled_from_the_gradient():
    run = one_row(2.0, 2.0, Rule(learning_rate=1.0, eps=0.0, weight_decay=0.5))
    assert np.all(run.table[1] == 0.0)
    assert run.row_state[1] == 4


@pytest.mark.parametrize("weight", [1.5, -0.0, np.nan, np.inf])
@pytest.mark.parametrize("rule", [PLAIN, Rule(eps=0.0, state_decay=0.5, weight_decay=0.5)], ids=["plain", "decay"])
def test_a_gradient_of_zero_leaves_the_row_alone(rule, weight):
    run = one_row(weight, 0.0, rule, row_state=0.25)
    programs.assert_same_bits(run.table, np.full((8, WIDTH), weight, np.float32))
    assert np.all(run.row_state == 0.25)
    assert (run.norms[0], run.valids[0]) == (0, 1)


def test_a_step_size_is_zero_where_its_denominator_is():
    """The mean of the squares underflows to 0 though their sum does not."""
    run = one_row(1.5, np.eye(WIDTH)[0] * 1e-22, Rule(learning_rate=1.0, eps=0.0))
    assert run.norms[0] > 0
    assert run.row_state[1] == 0
    assert np.all(run.table == 1.5)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_gradient_that_is_not_finite_skips_the_whole_step_and_the_next_one_learns(staleness, value, ranks):
    rng = np.random.default_rng(0)
    start = fresh(rng.normal(size=(8, WIDTH)).astype(np.float32))
    good, bad, clean = (rng.normal(size=(4, WIDTH)).astype(np.float32) for _ in range(3))
    bad[2, 3] = value
    ids = np.array([1, 2, 5, 7], np.int32)
    batches = [Batch(ids, grads) for grads in (good, bad, clean)]
    outcome = programs.observe(handle_for(ranks, 4, WIDTH), start, batches, Rule(), staleness=staleness)
    assert outcome.run.valids.tolist() == [1, 0, 1]
    assert not np.isfinite(outcome.run.norms[1])
    assert (outcome.stats["updates"], outcome.stats["skipped_updates"]) == (2, 1)
    without = programs.expected(start, [Batch(ids, good), Batch(ids, clean)], Rule())
    programs.assert_same_bits(outcome.run.table, without.table)
    programs.assert_same_bits(outcome.run.row_state, without.row_state)


def test_rows_outside_of_the_batch_do_not_decay():
    run = one_row(2.0, 1.0, Rule(state_decay=0.5, weight_decay=0.5), row_state=4.0)
    assert np.all(np.delete(run.table, 1, axis=0) == 2.0)
    assert np.all(np.delete(run.row_state, 1) == 4.0)
    assert run.row_state[1] == 3.0


def test_lazy_decay_makes_up_for_the_steps_in_which_a_row_was_absent():
    handle = handle_for(2, 2, WIDTH, padding_id=0)
    grads = np.ones((2, WIDTH), np.float32)
    absent = [Batch(np.array([2, 0], np.int32), grads)] * 9
    batches = [Batch(np.array([1, 0], np.int32), grads), *absent, Batch(np.array([1, 0], np.int32), grads)]
    rule = Rule(lazy=True, learning_rate=0.0, state_decay=0.1, weight_decay=0.05)
    run = programs.observe(handle, fresh(np.ones((8, WIDTH), np.float32), 1.0), batches, rule).run
    assert run.last_step.tolist() == [0, 10, 9, 0, 0, 0, 0, 0]
    assert math.isclose(run.row_state[1], (1.0 + 1.0) * math.exp(-1.0) + 1.0, rel_tol=1e-6)
    assert np.allclose(run.table[1], math.exp(-0.5), rtol=1e-6)
    assert np.all(run.table[3:] == 1)


@pytest.mark.parametrize("bound", [0.0, 1e-38, 3.0, 1e30, np.inf])
def test_clipping_scales_gradients_and_statistics_alike(bound):
    rng = np.random.default_rng(0)
    start = fresh(rng.normal(size=(8, WIDTH)).astype(np.float32), 0.5)
    batch = Batch(np.array([1, 1, 4, 6], np.int32), rng.normal(size=(4, WIDTH)).astype(np.float32))
    rule = Rule(max_grad_norm=bound)
    outcome = programs.observe(handle_for(2, 4, WIDTH), start, [batch], rule)
    programs.assert_same_run(outcome.run, programs.expected(start, [batch], rule))
    assert outcome.run.norms[0] > 3  # before clipping
    if bound == 0:
        programs.assert_same_bits(outcome.run.table, start.table)


@pytest.mark.parametrize("pending", [False, 0, True, 1, 2], ids=repr)
def test_an_update_that_is_not_pending_is_skipped_and_counted(pending):
    table = np.ones((8, WIDTH), np.float32)
    outcome = update(table, [1, 2], np.ones((2, WIDTH)), pending=pending)
    applied = int(bool(pending))
    assert outcome.run.valids.tolist() == [applied]
    assert outcome.run.pendings.tolist() == [1]  # gradients were staged all the same
    assert outcome.run.norms[0] == np.sqrt(np.float32(2 * WIDTH))
    assert (outcome.stats["updates"], outcome.stats["skipped_updates"]) == (applied, 1 - applied)
    assert np.array_equal(outcome.run.table, table) == (not pending)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_float16_saturates_and_every_such_store_is_counted(rounding, ranks):
    table = np.full((8, WIDTH), 65504, np.float16)
    table[2, ::2] = 0
    rule = Rule(learning_rate=1e4, eps=0.0, rounding=rounding)
    outcome = update(table, [1, 2, 3, 3], -np.ones((4, WIDTH)), rule=rule, ranks=ranks, logical_width=70)
    assert np.all(outcome.run.table[[1, 3], :70] == 65504)
    assert outcome.run.table[2, :4].tolist() == [10000, 65504, 10000, 65504]
    assert outcome.stats["saturated"] == 70 + 35 + 70


def test_bfloat16_overflows_to_infinity():
    table = np.full((8, WIDTH), 3.3e38, BF16)
    outcome = update(table, [1, 2], -np.ones((2, WIDTH)), rule=Rule(learning_rate=1e37, eps=0.0))
    assert np.all(np.isposinf(outcome.run.table[[1, 2]].astype(np.float32)))
    assert outcome.stats["saturated"] == 0


@pytest.mark.parametrize(("dtype", "nan"), [(np.float32, 0x7FC00000), (BF16, 0x7FC0), (np.float16, 0x7E00)])
def test_a_weight_that_was_nan_is_stored_as_the_canonical_nan(dtype, nan):
    table = np.zeros((8, WIDTH), dtype)
    programs.bits(table)[:, 3] = nan + (1 << (8 * table.dtype.itemsize - 1)) + 5  # negative, with a payload
    run = update(table, [1, 1], np.ones((2, WIDTH))).run
    assert programs.bits(run.table)[1, 3] == nan
    programs.assert_same_bits(np.delete(run.table, 1, axis=0), np.delete(table, 1, axis=0))


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
