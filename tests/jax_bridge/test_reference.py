"""The oracle's update: cases with known answers, its rules, and the properties that it promises."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bridge import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
DTYPES = (F32, BF16, F16)
CANONICAL = {F32: 0x7FC00000, BF16: 0x7FC0, F16: 0x7E00}


def bits(values):
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}")


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def floats(pattern):
    return np.asarray(pattern, np.uint32).view(np.float32)


def update(table, row_state, ids, grads, **options):
    options = {"learning_rate": 1.0, "eps": 0.0, "decay_factor": 1.0, **options}
    return reference.rowwise_adagrad_update(table, row_state, ids, grads, **options)


def problem(seed, *, rows=16, width=6, tokens=40, dtype=F32):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, width)).astype(F32).astype(dtype),
        rng.random(rows, dtype=np.float32),
        rng.integers(-1, rows, tokens).astype(np.int32),
        rng.normal(size=(tokens, width)).astype(F32).astype(dtype),
    )


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_duplicate_ids_update_their_row_once(order):
    grads = np.ones((2, 2), np.float32)[order]
    result = update(np.zeros((3, 2), np.float32), np.zeros(3, np.float32), [1, 1], grads)
    assert result.table.tolist() == [[0, 0], [-1, -1], [0, 0]]
    assert result.row_state.tolist() == [0, 4, 0]
    assert result.valid


def test_many_duplicates_match_a_dense_float64_reference():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(20, 8)).astype(np.float32)
    state = rng.random(20, dtype=np.float32)
    ids = rng.choice(rng.permutation(20)[:7], 10_000)
    grads = rng.normal(size=(10_000, 8)).astype(np.float32)
    result = update(table, state, ids, grads, learning_rate=0.1, eps=1e-6)
    dense = np.zeros((20, 8))
    np.add.at(dense, ids, grads.astype(np.float64))
    expected_state = state + np.mean(dense**2, axis=1)
    expected = table - 0.1 * dense / (np.sqrt(expected_state)[:, None] + 1e-6)
    np.testing.assert_allclose(result.row_state, expected_state, rtol=1e-4)
    np.testing.assert_allclose(result.table, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.norm, np.linalg.norm(dense), rtol=1e-5)
    absent = np.setdiff1d(np.arange(20), ids)
    assert same_bits(result.table[absent], table[absent])


@pytest.mark.parametrize("ids", [np.zeros(0, np.int32), np.full(5, -1, np.int32)])
def test_a_batch_without_trained_tokens_changes_nothing(ids):
    table, state, _, _ = problem(0)
    grads = np.full((len(ids), 6), np.nan, np.float32)
    assert reference.lookup(table, ids).shape == (len(ids), 6)
    result = update(table, state, ids, grads, decay_factor=0.5, weight_decay_factor=0.5)
    assert result.norm == 0
    assert result.valid
    assert same_bits(result.table, table)
    assert same_bits(result.row_state, state)
    after = update(result.table, result.row_state, [2], np.ones((1, 6), np.float32))
    assert not same_bits(after.table[2], table[2])


def test_a_thousand_bfloat16_ones_sum_to_a_thousand():
    sums = reference.segment_sum(np.ones((1000, 2), BF16), reference.unique_ids(np.full(1000, 3)))
    assert sums.tolist() == [[1000, 1000]]


def test_the_state_of_a_bfloat16_table_is_float32_and_keeps_growing():
    table, state = np.zeros((2, 4), BF16), np.zeros(2, np.float32)
    grads = np.full((1, 4), 1e-3, BF16)
    for _ in range(1000):
        result = update(table, state, [1], grads, learning_rate=0.01, eps=1e-8)
        assert result.row_state[1] > state[1]
        table, state = result.table, result.row_state
    assert state.dtype == np.float32
    assert table.dtype == BF16
    np.testing.assert_allclose(state[1], 1000 * float(grads[0, 0]) ** 2, rtol=1e-4)


def test_eps_is_outside_the_root():
    result = update(np.zeros((1, 1), np.float32), [np.float32(0)], [0], np.full((1, 1), 2.0, np.float32), eps=1.0)
    assert result.row_state.tolist() == [4]
    np.testing.assert_allclose(result.table, [[-2 / 3]], rtol=1e-6)


def test_weight_decay_is_decoupled():
    two = np.full((1, 1), 2.0, np.float32)
    result = update(two, np.zeros(1, np.float32), [0], two, weight_decay_factor=0.5)
    assert result.table.tolist() == [[0.0]]


def test_a_zero_gradient_leaves_its_row_alone():
    table, state = np.full((2, 2), 3.0, np.float32), np.zeros(2, np.float32)
    grads = np.array([[0, 0], [1, 1]], np.float32)
    result = update(table, state, [0, 1], grads, decay_factor=0.5, weight_decay_factor=0.5)
    assert same_bits(result.table[0], table[0])
    assert result.row_state[0] == 0
    assert not np.any(np.isnan(result.table))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_row_skips_the_whole_step_and_the_next_one_learns(bad):
    table, state, ids, grads = problem(1)
    poisoned = grads.copy()
    poisoned[np.flatnonzero(ids >= 0)[3], 2] = bad
    skipped = update(table, state, ids, poisoned)
    assert not skipped.valid
    assert not np.isfinite(skipped.norm)
    assert same_bits(skipped.table, table)
    assert same_bits(skipped.row_state, state)
    clean = update(skipped.table, skipped.row_state, ids, grads)
    assert clean.valid
    assert np.all(np.isfinite(clean.table))
    assert not same_bits(clean.table, table)


def test_a_bad_gradient_of_a_token_that_is_not_trained_does_not_matter():
    table, state, ids, grads = problem(1)
    grads[ids < 0] = np.nan
    assert update(table, state, ids, grads).valid


def test_the_step_is_zero_where_its_denominator_is():
    # The squares of these gradients are 0 + 0 + ... + the smallest denormal; its mean rounds to 0.
    table = np.ones((1, 4), np.float32)
    grads = np.array([[2.0**-75, 0, 0, 0]], np.float32) * np.float32(1.5)
    result = update(table, np.zeros(1, np.float32), [0], grads, weight_decay_factor=0.5)
    assert result.row_state.tolist() == [0]
    assert result.table.tolist() == [[0.5] * 4]


def test_clipping_scales_gradients_and_statistics():
    grads = np.array([[3.0, 4.0]], np.float32)
    arguments = (np.zeros((1, 2), np.float32), np.zeros(1, np.float32), [0], grads)
    clipped = update(*arguments, max_grad_norm=2.5)
    assert clipped.norm == 5
    assert clipped.row_state.tolist() == [3.125]
    assert same_bits(clipped.table, update(*arguments[:3], grads * np.float32(0.5)).table)
    assert same_bits(update(*arguments, max_grad_norm=6.0).table, update(*arguments).table)


def test_a_row_that_clipping_makes_vanish_is_not_touched():
    table = np.ones((2, 1), np.float32)
    grads = np.array([[1e18], [1e-18]], np.float32)
    result = update(table, np.ones(2, np.float32), [0, 1], grads, max_grad_norm=1.0, decay_factor=0.5)
    assert result.row_state.tolist() == [1.5, 1.0]


def test_clipping_a_zero_gradient_to_zero_touches_nothing():
    table = np.ones((1, 1), np.float32)
    result = update(table, np.ones(1, np.float32), [0], np.zeros((1, 1), np.float32), max_grad_norm=0.0)
    assert result.valid
    assert same_bits(result.table, table)


def test_lazy_decay_covers_the_steps_since_the_last_touch():
    table, state, _, _ = problem(2, rows=4)
    last_step = np.array([7, 2, 9, 0], np.int32)
    options = {"learning_rate": 0.1, "eps": 1e-6}
    grads = np.ones((2, 6), np.float32)
    result = reference.rowwise_adagrad_lazy_update(
        table, state, last_step, 7, [1, 2], grads, accum_decay_rate=0.3, weight_decay_rate=0.01, **options
    )
    assert result.last_step.tolist() == [7, 7, 7, 0]
    for row, delta in ((1, 5), (2, 0)):  # a last_step ahead of step counts as no time
        expected = update(
            table,
            state,
            [row],
            grads[:1],
            decay_factor=reference.exp32(-(np.float32(0.3) * np.float32(delta))),
            weight_decay_factor=reference.exp32(-(np.float32(0.01) * np.float32(delta))),
            **options,
        )
        assert same_bits(result.table[row], expected.table[row])
        assert same_bits(result.row_state[row], expected.row_state[row])
    assert same_bits(result.table[[0, 3]], table[[0, 3]])


def test_a_skipped_lazy_update_leaves_last_step():
    table, state, ids, grads = problem(2)
    result = reference.rowwise_adagrad_lazy_update(
        table,
        state,
        np.zeros(16, np.int32),
        5,
        ids,
        grads,
        learning_rate=1,
        eps=0,
        accum_decay_rate=0.1,
        weight_decay_rate=0,
        pending=0,
    )
    assert not result.valid
    assert not result.last_step.any()


def test_elapsed_steps_saturate():
    one = np.ones((1, 1), np.float32)
    result = reference.rowwise_adagrad_lazy_update(
        one,
        np.ones(1, np.float32),
        np.array([-(2**31)], np.int32),
        2**31 - 1,
        [0],
        one,
        learning_rate=1,
        eps=0,
        accum_decay_rate=2.0**-31,
        weight_decay_rate=0,
    )
    assert result.row_state[0] == reference.exp32(-1.0) + np.float32(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_nans_are_canonical(dtype):
    table = bits(np.ones((1, 2), dtype)).copy()
    table[0, 0] = CANONICAL[dtype] | 1
    state = floats([0xFFC00001])
    result = update(table.view(dtype), state, [0], np.ones((1, 2), dtype))
    assert bits(result.table).tolist() == [[CANONICAL[dtype]] * 2]
    assert bits(result.row_state).tolist() == [0x7FC00000]


def test_float16_weights_saturate_and_are_counted():
    table = np.full((1, 3), 65504, F16)
    grads = np.array([[-1, -1, 1]], F16)
    result = update(table, np.zeros(1, np.float32), [0], grads, learning_rate=1000.0)
    assert result.table[0, :2].tolist() == [65504, 65504]
    assert result.table[0, 2] < 65504
    assert result.saturated == 2


def test_stochastic_rounding_reaches_the_store():
    table, state, ids, grads = problem(3, dtype=BF16)
    exact = update(table.astype(np.float32), state, ids, grads)
    options = {"rounding": "stochastic", "seed": 11, "rounding_step": 4}
    result = update(table, state, ids, grads, **options)
    touched = np.unique(ids[ids >= 0])
    expected, _ = reference.round_to(exact.table[touched], BF16, rows=touched, **options)
    assert same_bits(result.table[touched], expected)
    assert same_bits(result.row_state, exact.row_state)
    assert not same_bits(result.table, update(table, state, ids, grads).table)


def test_the_largest_ids_beyond_num_unique_are_dropped():
    table, state, ids, grads = problem(4)
    kept = np.unique(ids[ids >= 0])[:5]
    result = update(table, state, ids, grads, num_unique=5)
    expected = update(table, state, np.where(np.isin(ids, kept), ids, -1), grads)
    assert same_bits(result.table, expected.table)
    assert same_bits(result.norm, expected.norm)


def test_padding_columns_are_neither_written_nor_counted():
    table, state, ids, grads = problem(5, width=5)
    padding = np.full((16, 3), np.nan, np.float32)
    wide = np.concatenate([table, padding], axis=1)
    wide_grads = np.concatenate([grads, np.full((40, 3), np.inf, np.float32)], axis=1)
    result = update(wide, state, ids, wide_grads, logical_width=5)
    expected = update(table, state, ids, grads)
    assert same_bits(result.table[:, :5], expected.table)
    assert same_bits(result.table[:, 5:], padding)
    assert same_bits(result.row_state, expected.row_state)


def test_an_index_may_stand_in_for_ids():
    table, state, ids, grads = problem(6)
    by_index = update(table, state, reference.unique_ids(ids), grads)
    assert same_bits(by_index.table, update(table, state, ids, grads).table)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"table": np.zeros((16, 6))}, TypeError, "float64"),
        ({"row_state": np.zeros(16)}, TypeError, "row_state is float32"),
        ({"row_state": np.zeros(3, np.float32)}, ValueError, "row_state"),
        ({"ids": np.full(40, 16)}, ValueError, "beyond the table's 16 rows"),
        ({"ids": np.zeros(39, np.int32)}, ValueError, "gradient rows"),
        ({"grads": np.zeros((40, 6), np.int32)}, TypeError, "int32"),
        ({"logical_width": 7}, ValueError, "logical_width=7"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm"),
        ({"num_unique": 0}, ValueError, "num_unique=0"),
        ({"rounding": "stochastic"}, ValueError, "seed"),
        ({"rounding": "down"}, ValueError, "rounding='down'"),
    ],
)
def test_an_update_refuses_arguments_that_do_not_fit(change, error, message):
    arguments = dict(zip(("table", "row_state", "ids", "grads"), problem(0, dtype=F32), strict=True))
    with pytest.raises(error, match=message):
        update(**{**arguments, **change})


seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)


@settings(max_examples=40, deadline=None)
@given(seeds, dtypes)
def test_only_the_order_among_tokens_of_one_id_matters(seed, dtype):
    table, state, ids, grads = problem(seed, dtype=dtype)
    # A random order of all tokens, in which those of one id keep theirs.
    shuffled = np.random.default_rng(seed).permutation(len(ids))
    order = np.empty_like(shuffled)
    for row in np.unique(ids):
        order[np.flatnonzero(ids[shuffled] == row)] = np.flatnonzero(ids == row)
    a = update(table, state, ids, grads)
    b = update(table, state, ids[order], grads[order])
    assert all(same_bits(x, y) for x, y in zip(a[:3], b[:3], strict=True))


@settings(max_examples=40, deadline=None)
@given(seeds, dtypes, st.booleans())
def test_rows_outside_the_batch_keep_their_bits_and_inputs_are_not_modified(seed, dtype, stochastic):
    table, state, ids, grads = problem(seed, rows=60, dtype=dtype)
    before = [value.copy() for value in (table, state, ids, grads)]
    options = {"rounding": "stochastic", "seed": seed, "rounding_step": 1} if stochastic else {}
    result = update(table, state, ids, grads, decay_factor=0.9, weight_decay_factor=0.9, **options)
    absent = np.setdiff1d(np.arange(60), ids)
    assert same_bits(result.table[absent], table[absent])
    assert same_bits(result.row_state[absent], state[absent])
    for now, then in zip((table, state, ids, grads), before, strict=True):
        assert same_bits(now, then)


@settings(max_examples=20, deadline=None)
@given(seeds, dtypes)
def test_nothing_changes_unless_the_update_is_pending(seed, dtype):
    table, state, ids, grads = problem(seed, dtype=dtype)
    result = update(table, state, ids, grads, pending=False, decay_factor=0.5, weight_decay_factor=0.5)
    assert not result.valid
    assert same_bits(result.table, table)
    assert same_bits(result.row_state, state)
    assert same_bits(result.norm, update(table, state, ids, grads).norm)
