"""The oracle's schedule: what each step reads, and what each update applies."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bridge import reference


def bits(values):
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}")


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def update(table, row_state, ids, grads, **options):
    options = {"learning_rate": 1.0, "eps": 0.0, "decay_factor": 1.0, **options}
    return reference.rowwise_adagrad_update(table, row_state, ids, grads, **options)


def problem(seed, *, rows=16, width=6, tokens=40):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.random(rows, dtype=np.float32),
        rng.integers(-1, rows, tokens).astype(np.int32),
        rng.normal(size=(tokens, width)).astype(np.float32),
    )


OPTIONS = {"learning_rate": 0.1, "eps": 1e-6, "decay_factor": 0.99}


def batches(count, rows=16, tokens=40):
    return np.random.default_rng(5).integers(-1, rows, (count, tokens))


def drawn_gradients(rows, ids, step):
    noise = np.random.default_rng(step).normal(size=rows.shape).astype(np.float32)
    return noise + rows, step != 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_is_looked_up_exactly_staleness_updates_late(staleness):
    table, state, _, _ = problem(7)
    simulation = reference.Simulation(
        table, state, staleness=staleness, options=OPTIONS, id_policy="drop", padding_id=-1
    )
    tables = [(table, state)]  # tables[k]: after the updates of steps 0 .. k-1
    for step, ids in enumerate(batches(6)):
        seen = simulation.step(ids, drawn_gradients)
        expected_rows = reference.lookup(tables[max(step - staleness, 0)][0], ids)
        assert same_bits(seen.rows, expected_rows)
        grads, pending = drawn_gradients(expected_rows, ids, step)
        result = update(*tables[-1], ids, grads, pending=pending, **OPTIONS)
        tables.append((result.table, result.row_state))
        assert same_bits(simulation.table, tables[step + 1 - staleness][0])
    simulation.flush()
    assert same_bits(simulation.table, tables[-1][0])
    assert same_bits(simulation.row_state, tables[-1][1])
    assert simulation.valids == [True, True, False, True, True, True]
    assert [record.gradient_step for record in simulation.updates] == list(range(6))
    assert [record.applied_step for record in simulation.updates] == [k + staleness for k in range(6)]
    assert len(simulation.norms) == 6


def test_a_flush_makes_the_next_step_a_first_step():
    table, state, _, _ = problem(8)
    simulation = reference.Simulation(table, state, staleness=1, options=OPTIONS)
    ids = batches(3).clip(0)
    assert simulation.flush() is None
    assert simulation.step(ids[0], drawn_gradients).update is None
    assert simulation.flush().valid
    after = simulation.step(ids[1], drawn_gradients)
    assert after.update is None
    assert same_bits(after.rows, reference.lookup(simulation.table, ids[1]))
    assert simulation.step(ids[2], drawn_gradients).update.gradient_step == 1


def test_options_may_follow_the_step_that_staged_or_the_one_that_applies():
    calls = []

    def options(gradient_step, applied_step):
        calls.append((gradient_step, applied_step))
        return OPTIONS

    simulation = reference.Simulation(*problem(9)[:2], staleness=1, options=options)
    for ids in batches(2).clip(0):
        simulation.step(ids, drawn_gradients)
    simulation.flush()
    assert calls == [(0, 1), (1, 2)]


def test_the_lazy_form_keeps_the_step_of_each_gradient():
    table, state, _, _ = problem(10)
    simulation = reference.Simulation(
        table,
        state,
        staleness=1,
        last_step=np.zeros(16, np.int32),
        options={"learning_rate": 0.1, "eps": 1e-6, "accum_decay_rate": 0.1, "weight_decay_rate": 0.01},
    )
    for row in (3, 4, 3):
        simulation.step([row], lambda rows, ids, step: (np.ones_like(rows), True))
    assert simulation.last_step[[3, 4]].tolist() == [0, 1]
    simulation.flush()
    assert simulation.last_step[[3, 4]].tolist() == [2, 1]


def test_a_simulation_reports_bad_ids_and_leaves_its_inputs_alone():
    table, state, _, _ = problem(11)
    kept = table.copy()
    simulation = reference.Simulation(table, state, staleness=0, options=OPTIONS)
    seen = simulation.step([2, 16], lambda rows, ids, step: (np.ones_like(rows), True))
    assert seen.ids == (1, (1, 16))
    assert not seen.rows[1].any()
    assert same_bits(table, kept)
    assert not same_bits(simulation.table, kept)


def test_staleness_is_zero_or_one():
    with pytest.raises(ValueError, match="staleness=2"):
        reference.Simulation(*problem(0)[:2], staleness=2, options=OPTIONS)
