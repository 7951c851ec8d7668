"""Staleness 0 is plain training; staleness 1 is training one step late, and nothing else."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_bridge import AsyncEmbedding, ContextError, PipelineError, RowwiseAdagrad, train_step, with_next
from jax_bridge.runtime import native

from . import _training as training
from . import _two_tables as two
from ._programs import assert_same_bits, mesh_of
from ._training import NAMES, Rehearsal

STEPS = 30


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


@functools.cache
def train_real_model(
    ranks: int, staleness: int, microbatches: int = 1, explicit: bool = False
) -> tuple[Any, Any, list[float], Any]:
    """(params, tables, losses, first tables)."""
    mesh = mesh_of(ranks, explicit=explicit)
    tables = {
        name: AsyncEmbedding(
            mesh,
            table_axis="table",
            rows=two.ROWS[name],
            width=two.WIDTH,
            name=name,
            optimizer=RowwiseAdagrad(learning_rate=0.05, half_life=20),
            init=training.quick_init,
        )
        for name in two.NAMES
    }
    options = {"ids_of": two.ids_of, "staleness": staleness, "microbatches": microbatches}
    with train_step(tables, two.mean_loss, optax.sgd(0.05), **options) as step:
        state = step.init(two.make_params(), jax.random.key(0))
        first = {name: table.to_arrays(state.tables[name])[0] for name, table in step.tables.items()}
        losses = []
        for batch, upcoming in with_next(two.make_batches(STEPS)):
            state, metrics = step(state, batch, upcoming)
            losses.append(metrics["loss"])
        state = step.flush(state)
        tables = {name: table.to_arrays(state.tables[name])[0] for name, table in step.tables.items()}
        return jax.device_get(state.params), tables, [float(x) for x in losses], first


def assert_close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, wanted)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_equals_a_plain_jax_loop_with_dense_gradients_to_rounding(ranks, staleness):
    params, tables, losses, first = train_real_model(ranks, staleness)
    assert_close((params, tables, losses), plain_jax(two.make_batches(STEPS), first, late=staleness == 1))
    assert max(np.abs(tables[name] - first[name]).max() for name in NAMES) > 0.1, "nothing was learned"
    assert losses[-1] != losses[0]


def test_the_two_schedules_differ():
    exact, late = (
        plain_jax(two.make_batches(STEPS), {name: np.full((two.ROWS[name], 8), 0.1) for name in NAMES}, late=late)[2]
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


# ---- the loop ----


def test_with_next_pairs_each_batch_with_the_one_after_it():
    assert list(with_next([])) == []
    assert list(with_next(["a"])) == [("a", None)]
    assert list(with_next(iter("abc"))) == [("a", "b"), ("b", "c"), ("c", None)]


def test_with_next_reads_one_batch_ahead_and_no_more():
    read = []

    def loader():
        for i in range(4):
            read.append(i)
            yield i

    pairs = with_next(loader())
    assert next(pairs) == (0, 1)
    assert read == [0, 1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_nothing_recompiles_after_the_first_epoch(staleness):
    schedule = optax.exponential_decay(0.1, 5, 0.7)
    tables = {"optimizer": RowwiseAdagrad(learning_rate=schedule, half_life=20, weight_decay=0.01, max_grad_norm=9.0)}
    batches = training.make_batches(3)
    with training.make_step(2, staleness, tables=tables, optimizer=optax.adam(schedule)) as step:
        state = training.start(step)
        state, _ = training.run(step, state, batches)  # the last has no upcoming batch
        state, _ = training.run(step, state, batches)  # so this one looks up anew
        state = step.flush(state)
        with training.count_compilations() as compiled:
            for _ in range(3):
                state, _ = training.run(step, state, batches)
            state = step.flush(state)
            state, _ = training.run(step, state, batches)
            state = step.flush(training.start(step))
            state, _ = training.run(step, state, batches)
        assert compiled == []


def test_the_counter_of_compilations_counts():
    with training.count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert len(compiled) == 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_announcing_batches_changes_no_bit(ranks):
    """Without an announcement the lookup waits for the batch, and reads the same table."""
    batches = training.make_batches(6)
    finals = []
    with training.shared_step(ranks, 1) as step:
        for announce in (True, False):
            state, _ = training.train(step, training.start(step), with_next(batches), announce=announce)
            finals.append(training.arrays_of(step, step.flush(state)))
    training.assert_same_arrays(*finals)


@pytest.mark.parametrize("staleness", [0, 1])
def test_after_a_flush_training_goes_on_from_a_table_that_misses_nothing(staleness):
    batches = training.make_batches(7)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        for part in (batches[:3], batches[3:4], batches[4:]):
            state, history = training.run(step, state, part)
            assert history[0]["pending"]["users"] == (staleness == 0), "nothing is staged after a flush"
            state = step.flush(state)
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
            rehearsal.assert_state(step, state)


def test_flush_may_come_before_any_step_between_any_two_and_twice():
    batches = training.make_batches(2)
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        before = training.arrays_of(step, state)
        state = step.flush(step.flush(state))
        training.assert_same_arrays(training.arrays_of(step, state), before)
        state, _ = step(state, batches[0], batches[1])  # announced, but never trained
        state = step.flush(state)
        once = training.arrays_of(step, state)
        state = step.flush(state)
        training.assert_same_arrays(training.arrays_of(step, state), once)
        assert step.stats()["users"]["updates"] == 1


def test_init_begins_anew_whatever_was_under_way():
    batches = training.make_batches(5)
    with training.shared_step(2, 1) as step:
        wanted = training.arrays_of(step, step.flush(training.run(step, training.start(step), batches)[0]))
        abandoned, _ = step(training.start(step), batches[3], batches[4])
        step(training.start(step), batches[0], batches[1])
        with pytest.raises(PipelineError, match="this is not the state that the last call returned"):
            step(abandoned, batches[1])
        state = training.start(step)
        training.assert_same_arrays(training.arrays_of(step, step.flush(training.run(step, state, batches)[0])), wanted)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_closed_step_can_be_used_again(staleness):
    batches = training.make_batches(4)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        for part in (batches[:2], batches[2:]):
            state = step.flush(training.run(step, state, part)[0])
            step.close()
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(step, state)


# ---- batches of other sizes ----

SMALL = {"items": (8, 3), "users": (8,)}


def test_batches_of_two_sizes_share_tables_with_a_flush_between_them():
    training.close_everything()
    rng = np.random.default_rng(8)
    parts = [[training.make_batch(rng, shapes) for _ in range(2)] for shapes in (SMALL, training.IDS_SHAPE) * 2]
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1)
        for part in parts:
            state = step.flush(training.run(step, state, part)[0])
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(step, state)
        assert len(native().open_contexts()) == 4
        assert step.stats()["users"]["updates"] == 8, "counters of both sizes are summed"


@pytest.mark.parametrize("how", ["announced", "given"])
def test_another_batch_size_without_a_flush_is_refused_before_anything_runs(how):
    large = training.make_batches(3)
    small = training.make_batch(np.random.default_rng(8), SMALL)
    with training.shared_step(2, 1) as step:
        state, _ = step(training.start(step), large[0], large[1])
        with pytest.raises(
            PipelineError, match=r"batches of {'items': 72, 'users': 24} tokens cannot be followed by"
        ) as e:
            step(state, *((large[1], small) if how == "announced" else (small, None)))
        assert "flush before the size changes" in str(e.value)
        state, _ = step(state, large[1], None)
        state, _ = step(step.flush(state), small, None)
        step.flush(state)


def test_a_retrace_does_not_disturb_the_pipeline():
    batches = training.make_batches(5)
    other = [batch | {"slope": np.float16(batch["slope"])} for batch in batches]  # another dtype: another trace
    mixed = [*batches[:2], other[2], *batches[3:]]
    with training.shared_step(2, 1) as step:
        finals = []
        for run in (
            mixed,
            [
                b | {"slope": np.float32(o["slope"])} if b is not m else b
                for b, o, m in zip(batches, other, mixed, strict=True)
            ],
        ):
            state, _ = training.run(step, training.start(step), run)
            finals.append(training.arrays_of(step, step.flush(state)))
        training.assert_same_arrays(*finals)
        assert step.program.handles["users"].tokens_per_batch == 24


def test_two_training_steps_share_a_table():
    """A second loss on the same tables, in turns: each takes over where the other has flushed."""
    mesh = mesh_of(2)
    tables = training.make_tables(mesh)
    steps = [
        train_step(tables, loss, optax.sgd(training.DENSE_RATE), ids_of=training.ids_of, staleness=1)
        for loss in (training.loss_fn, lambda *args: training.loss_fn(*args) * 1.0)
    ]
    batches = training.make_batches(6)
    with steps[0], steps[1]:
        state = training.start(steps[0])
        rehearsal = Rehearsal(training.arrays_of(steps[0], state), 1)
        for turn, part in enumerate((batches[:2], batches[2:4], batches[4:])):
            state = steps[turn % 2].flush(training.run(steps[turn % 2], state, part)[0])
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(steps[0], state)


# ---- microbatches ----


@pytest.mark.parametrize("staleness", [0, 1])
def test_microbatches_change_nothing_but_rounding(staleness):
    wanted = train_real_model(2, staleness)[:3]
    for pieces in (2, 4):
        assert_close(train_real_model(2, staleness, microbatches=pieces)[:3], wanted)


@pytest.mark.parametrize("staleness", [0, 1])
def test_microbatches_share_one_lookup_and_one_update(staleness):
    """Also with ids of two dimensions, and an auxiliary output."""

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        assert rows["items"].shape[1:] == (3, 6)
        score = rows["users"].sum(-1) + rows["items"].sum((1, 2)) * params
        return ((score - batch["label"]) ** 2).mean(), score

    def run(pieces: int) -> Any:
        rng = np.random.default_rng(0)
        batches = [
            {"ids": training.make_batch(rng)["ids"], "label": rng.normal(size=24).astype(np.float32)} for _ in range(3)
        ]
        step = training.make_step(2, staleness, loss_fn=loss_fn, has_aux=True, microbatches=pieces)
        with step:
            state, history = training.run(step, step.init(np.float32(1), jax.random.key(1)), batches)
            state = step.flush(state)
            stats = step.stats()["items"]
            assert (stats["updates"], stats["tokens"]) == (3, 72 * (3 + staleness))  # flush drops the last lookup
            assert stats["lookups"] == 3 + staleness
            assert stats["stage_calls"] == 3 * 2, "one for each rank"
            return training.arrays_of(step, state), history

    arrays, history = run(1)
    in_pieces, pieces_history = run(3)
    assert_close(in_pieces, arrays)
    assert history[0]["aux"].shape == (24,)
    # Each rank's tokens are cut into pieces: piece p has the p-th part of every rank's.
    scores = pieces_history[-1]["aux"].reshape(3, 2, 4).swapaxes(0, 1).reshape(24)
    np.testing.assert_allclose(scores, history[-1]["aux"], rtol=2e-5, atol=1e-6)


def test_microbatches_need_batches_that_can_be_cut():
    step = training.make_step(2, 1, microbatches=5)
    with step:
        state = training.start(step)
        with pytest.raises(
            ContextError, match=r"microbatches=5 over 2 ranks need .* multiple of 10, but batch\['ids'\]"
        ):
            step(state, training.make_batches(1)[0])
    with training.make_step(2, 1, microbatches=2) as step:
        state = training.start(step)
        with pytest.raises(ContextError, match=r"batch\['slope'\] has shape \[\]"):
            step(state, training.make_batches(1)[0])


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
    wanted = train_real_model(2, 1)[:3]
    assert_close(train_real_model(2, 1, microbatches=microbatches, explicit=True)[:3], wanted)


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
