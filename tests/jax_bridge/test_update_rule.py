"""The rule of an update, number by number: precision, size, decay, clipping, what is skipped and what overflows."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_bridge import runtime

from . import _programs as programs
from ._one_update import BF16, PLAIN, RANKS, WIDTH, handle_for, update
from ._programs import Batch, Rule, Run, fresh

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
