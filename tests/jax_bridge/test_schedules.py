"""Staleness 0 is plain training; staleness 1 is training one step late, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_bridge import AsyncEmbedding, train_step

from . import _training as training
from . import _two_tables as two
from ._programs import assert_same_bits, mesh_of
from ._training import NAMES, Rehearsal

# ---- against plain JAX ----


def plain_jax(batches: list[Any], tables: dict[str, Any], late: bool) -> tuple[Any, Any, list[float]]:
    """The model of ``_two_tables`` with dense gradients of whole tables. ``late`` reads tables that miss one update."""
    decay = np.float32(0.5 ** (1 / 20))
    optimizer = optax.sgd(0.05)

    def loss_of(params: Any, weights: Any, batch: Any) -> Any:
        rows = {name: weights[name][batch[name]] for name in two.NAMES}
        return two.mean_loss(params, rows, batch)

    def adagrad(weights: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        square = (grad**2).mean(axis=1)
        touched = square > 0
        updated = state * decay + square
        step = 0.05 / (jnp.sqrt(updated) + 1e-8)
        return (
            jnp.where(touched[:, None], weights - step[:, None] * grad, weights),
            jnp.where(touched, updated, state),
        )

    @jax.jit
    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, seen, weights, states = carry
        read = seen if late else weights
        loss, (grad, table_grads) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, read, batch)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        new = {name: adagrad(weights[name], states[name], table_grads[name]) for name in two.NAMES}
        updated = {name: new[name][0] for name in two.NAMES}
        return (
            optax.apply_updates(params, updates),
            opt_state,
            weights,
            updated,
            {name: new[name][1] for name in two.NAMES},
        ), loss

    params = two.make_params()
    states = {name: jnp.zeros(two.ROWS[name]) for name in two.NAMES}
    carry = (params, optimizer.init(params), tables, tables, states)
    losses = []
    for batch in batches:
        carry, loss = step(carry, batch)
        losses.append(float(loss))
    return carry[0], carry[3], losses


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_equals_a_plain_jax_loop_with_dense_gradients_to_rounding(ranks, staleness):
    params, tables, losses, first = two.train_real_model(ranks, staleness)
    two.assert_close((params, tables, losses), plain_jax(two.make_batches(two.STEPS), first, late=staleness == 1))
    assert max(np.abs(tables[name] - first[name]).max() for name in NAMES) > 0.1, "nothing was learned"
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["scanned", "unrolled"])
def test_steps_of_one_program_train_as_programs_of_their_own(kind, ranks):
    """XLA runs such small programs one call after the other: a lease that waits for another must not stop them."""
    batches = two.make_batches(two.STEPS)
    with two.make_step(mesh_of(ranks), two.mean_loss, staleness=1) as step:
        state = step.init(two.make_params(), jax.random.key(0))
        first = {name: table.to_arrays(state.tables[name])[0] for name, table in step.tables.items()}
        if kind == "scanned":
            state, _ = two.scanned(step)(state, two.stacked(batches), two.next_ids_of(batches))
        else:
            state, _ = two.unrolled(step)(state, batches)
        tables = {name: table.to_arrays(state.tables[name])[0] for name, table in step.tables.items()}
    params, wanted, _ = plain_jax(batches, first, late=True)
    two.assert_close((jax.device_get(state.params), tables), (params, wanted))


def test_the_two_schedules_differ():
    exact, late = (
        plain_jax(two.make_batches(two.STEPS), {name: np.full((two.ROWS[name], 8), 0.1) for name in NAMES}, late=late)[
            2
        ]
        for late in (False, True)
    )
    assert not np.allclose(exact, late, rtol=1e-4)


# ---- bit for bit ----


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_gives_the_bits_of_one_operation_after_the_other(ranks, staleness):
    batches = training.make_batches(12)
    with training.shared_step(ranks, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        state, history = training.run(step, state, batches)
        results = [rehearsal.step(batch) for batch in batches]
        rehearsal.assert_state(step, state)
        state = step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, state)
    for metrics, result in zip(history, results, strict=True):
        for name in NAMES:
            update = result[name].update
            assert metrics["pending"][name] == (update is not None)
            assert metrics["valid"][name] == (update is not None and update.valid)
            assert_same_bits(metrics["norm"][name], np.float32(0 if update is None else update.norm), "norm")


def test_metrics_of_staleness_one_are_about_the_step_before():
    batches = training.make_batches(4)
    histories = {}
    for staleness in (0, 1):
        with training.shared_step(1, staleness) as step:
            _, histories[staleness] = training.run(step, training.start(step), batches)
    exact, late = (
        [(m["pending"]["users"], m["valid"]["users"], m["norm"]["users"]) for m in histories[s]] for s in (0, 1)
    )
    assert [pending for pending, _, _ in exact] == [1, 1, 1, 1]
    assert [pending for pending, _, _ in late] == [0, 1, 1, 1]
    assert late[0] == (0, 0, 0)
    assert late[1] == exact[0], "the first two batches are looked up in the same table"
    assert all(m["finite"] for s in (0, 1) for m in histories[s])


# ---- axis types ----


@pytest.mark.parametrize("staleness", [0, 1])
def test_explicit_axes_change_no_bit(staleness):
    batches = training.make_batches(4)
    with training.shared_step(4, staleness) as step:
        wanted = training.arrays_of(step, step.flush(training.run(step, training.start(step), batches)[0]))
    with training.make_step(mesh_of(4, explicit=True), staleness) as step:
        state, _ = training.run(step, training.start(step), batches)
        state, _ = training.run(step, step.flush(state), batches[:0])
        ids = batches[0]["ids"]["items"]
        rows = step.tables["items"].lookup(state.tables["items"], ids)
        assert_same_bits(rows, wanted["tables"]["items"]["weights"][ids])
        training.assert_same_arrays(training.arrays_of(step, state), wanted)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_real_model_trains_with_explicit_axes(microbatches):
    wanted = two.train_real_model(2, 1)[:3]
    two.assert_close(two.train_real_model(2, 1, microbatches=microbatches, explicit=True)[:3], wanted)


def test_a_mesh_with_copies_trains_every_copy_alike():
    mesh = mesh_of(2, 2, names=("copies", "table"))
    options = {"optimizer": training.default_optimizer(), "init": training.quick_init}
    table = AsyncEmbedding(mesh, table_axis="table", rows=31, width=10, name="users", **options)
    batches = training.make_batches(3)

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        return 0.5 * ((rows["users"] - batch["target"]["users"]) ** 2).sum()

    finals = []
    for embedding in (table, training.make_tables(mesh_of(2))["users"]):
        step = train_step(
            {"users": embedding}, loss_fn, optax.sgd(1.0), ids_of=lambda b: {"users": b["ids"]["users"]}, staleness=1
        )
        with step:
            state, _ = training.run(step, step.init({}, jax.random.key(0)), batches)
            state = step.flush(state)
            finals.append(training.arrays_of(step, state))
            shards = {}
            for shard in state.tables["users"].weights.addressable_shards:
                shards.setdefault(str(shard.index), []).append(np.asarray(shard.data))
            for copies in shards.values():
                for copy in copies:
                    assert_same_bits(copy, copies[0])
    training.assert_same_arrays(*finals)
