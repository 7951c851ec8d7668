"""``AsyncEmbedding`` and ``TrainStep`` as objects: evaluation, counters, layouts that do not show, closing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_bridge import AsyncEmbedding, ContextError, IdError, PipelineError, RowwiseAdagrad, train_step
from jax_bridge.runtime import native

from . import _training as training
from ._programs import assert_same_bits, mesh_of
from ._training import NAMES, ROWS, TOKENS, WIDTH, Rehearsal


def make_table(mesh: Any, **options: Any) -> AsyncEmbedding:
    defaults = {"table_axis": mesh.axis_names, "rows": 13, "width": 10, "name": "t", "optimizer": RowwiseAdagrad(0.1)}
    return AsyncEmbedding(mesh, **(defaults | options))


@pytest.fixture(autouse=True)
def _nothing_is_open():
    training.close_everything()
    yield
    training.close_everything()


# ---- evaluation ----


def test_evaluation_in_the_middle_of_training_reads_the_table_and_disturbs_nothing():
    batches = training.make_batches(5)
    finals = []
    with training.shared_step(2, 1) as step:
        for evaluates in (False, True):
            state = training.start(step)
            for k, batch in enumerate(batches):
                state, _ = step(state, batch, batches[k + 1] if k < 4 else None)
                if evaluates:
                    ids = np.random.default_rng(k).integers(0, 31, 5 * k + 1)
                    weights, _ = step.tables["users"].to_arrays(state.tables["users"])
                    rows = step.tables["users"].lookup(state.tables["users"], ids)
                    assert_same_bits(rows, weights[ids])
            finals.append(training.arrays_of(step, step.flush(state)))
            stats = step.stats()["users"]
            assert (stats["lookups"], stats["tokens"]) == (6, 6 * 24), "evaluation is not counted"
    training.assert_same_arrays(*finals)


@pytest.mark.parametrize("ranks", [1, 3])
def test_evaluation_takes_any_number_of_ids_of_any_shape(ranks):
    table = make_table(mesh_of(ranks), init=training.quick_init)
    state = table.init(jax.random.key(0))
    weights, _ = table.to_arrays(state)
    rng = np.random.default_rng(0)
    for shape in [(), (0,), (3, 0), (1,), (2,), (5,), (24,), (25,), (4, 7), (2, 3, 4)]:
        ids = rng.integers(0, 13, shape)
        for given in (ids, ids.astype(np.int32), jnp.asarray(ids), ids.tolist()):
            rows = table.lookup(state, given)
            assert rows.shape == (*shape, 10)
            assert_same_bits(rows, weights[ids])
    table.close()


def test_evaluation_of_few_and_many_ids_compiles_a_handful_of_programs():
    table = make_table(mesh_of(2))
    state = table.init(jax.random.key(0))
    table.lookup(state, np.arange(3))
    with training.count_compilations() as compiled:
        for count in range(1, 130):
            table.lookup(state, np.arange(count) % 13)
    assert len(compiled) <= 2 * 4, "two small programs for each power of two at most"
    table.close()


def test_evaluation_reports_bad_ids_at_once_or_follows_the_policy():
    ids = np.array([[0, 5], [13, -1], [2**40 + 1, 3]])
    strict = make_table(mesh_of(2))
    with pytest.raises(IdError, match=r"'t': 3 of 6 token ids are outside of .* \[0, 13\): 13 at position 2, -1 at"):
        strict.lookup(strict.init(jax.random.key(0)), ids)
    with pytest.raises(IdError, match="token ids are float64, but must be integers"):
        strict.lookup(strict.init(jax.random.key(0)), ids.astype(float))
    for policy, wanted in (("drop", [[0, 5], [-1, -1], [-1, 3]]), ("clamp", [[0, 5], [12, 0], [12, 3]])):
        table = make_table(mesh_of(2), id_policy=policy, padding_id=3, name=policy, init=training.quick_init)
        state = table.init(jax.random.key(0))
        weights, _ = table.to_arrays(state)
        wanted = np.array(wanted)
        expected = np.where((wanted < 0) | (wanted == 3), -1, wanted)
        rows = np.vstack([weights, np.zeros((1, 10), np.float32)])[expected]
        assert_same_bits(table.lookup(state, ids), rows)
        table.close()


def test_evaluation_goes_on_after_close():
    table = make_table(mesh_of(2))
    state = table.init(jax.random.key(0))
    first = table.lookup(state, np.arange(5))
    table.close()
    assert native().open_contexts() == []
    assert_same_bits(table.lookup(state, np.arange(5)), first)
    table.close()


# ---- layouts do not show ----


def test_a_fresh_table_has_the_same_bits_on_any_number_of_ranks():
    tables = [make_table(mesh_of(ranks), dtype=jnp.bfloat16) for ranks in (1, 3, 4)]
    first, *others = (table.to_arrays(table.init(jax.random.key(7))) for table in tables)
    assert first[0].shape == (13, 10)
    assert 0.03 < first[0].astype(np.float32).std() < 0.07
    for other in others:
        training.assert_same_arrays(other, first)
    assert [table.padded_width for table in tables] == [10, 12, 12]


def test_arrays_go_in_and_come_out_and_stay_the_callers():
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(ROWS[name], WIDTH[name])).astype(np.float32) for name in NAMES}
    accumulators = {name: {"accumulator": rng.random(ROWS[name]).astype(np.float32)} for name in NAMES}
    kept = jax.tree.map(np.copy, (arrays, accumulators))
    for ranks in (1, 4):
        with training.shared_step(ranks, 1) as step:
            state = training.start(step)
            tables = {n: step.tables[n].from_arrays(arrays[n], accumulators[n]) for n in NAMES}
            for name in NAMES:
                training.assert_same_arrays(
                    step.tables[name].to_arrays(tables[name]), (arrays[name], accumulators[name])
                )
            state, _ = training.run(step, state._replace(tables=tables), training.make_batches(3))
            step.flush(state)
            training.assert_same_arrays((arrays, accumulators), kept)


def test_arrays_of_another_shape_are_refused_by_name():
    table = make_table(mesh_of(2))
    with pytest.raises(ContextError, match=r"'t': weights have shape \[13, 12\], but the table is \[13, 10\]"):
        table.from_arrays(np.zeros((13, 12), np.float32))
    with pytest.raises(ContextError, match=r"'t': the optimizer's arrays are .* needs .*float32\[13\]"):
        table.from_arrays(np.zeros((13, 10), np.float32), {"accumulator": np.zeros(12, np.float32)})


def test_padding_columns_never_show_and_never_count():
    """Width 10 on 4 ranks: rows, state and metrics are those of one rank, whatever lies in the padding."""
    batches = training.make_batches(4)
    results = []
    for ranks in (1, 4):
        with training.shared_step(ranks, 1) as step:
            state = training.start(step)
            if ranks == 4:
                weights = jax.device_get(state.tables["users"].weights)
                assert weights.shape == (31, 12)
                filled = np.concatenate([weights[:, :10], np.full((31, 2), 7.0, np.float32)], axis=1)
                sharding = state.tables["users"].weights.sharding
                placed = jax.jit(jnp.copy, out_shardings=sharding)(filled)
                users = state.tables["users"]._replace(weights=placed)
                state = state._replace(tables=state.tables | {"users": users})
            state, history = training.run(step, state, batches)
            rows = step.tables["users"].lookup(state.tables["users"], np.arange(31))
            assert rows.shape == (31, 10)
            snapshot = step.snapshot(state)
            state = step.flush(state)
            results.append((rows, snapshot, [m["norm"] for m in history], training.arrays_of(step, state)))
    training.assert_same_arrays(*results)


def test_tokens_may_be_sharded_in_another_order_than_columns():
    mesh = mesh_of(2, 2, names=("a", "b"))
    batches = training.make_batches(4)
    with training.make_step(mesh, 1, tables={"data_axis": ("b", "a")}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1)
        state, _ = training.run(step, state, batches)
        for batch in batches:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)


def test_a_loader_may_reuse_its_buffers():
    """Ids are taken when a batch is given, not when a device gets to them. (What the model reads is JAX's business.)"""
    batches = training.make_batches(5)
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1)
        buffers = [training.make_batch(np.random.default_rng(0))["ids"] for _ in range(2)]
        for k, batch in enumerate(batches):
            now, following = (
                {name: x.copy() for name, x in ids.items()} for ids in (batch["ids"], batches[min(k + 1, 4)]["ids"])
            )
            for name in NAMES:
                buffers[0][name][...], buffers[1][name][...] = now[name], following[name]
            state, _ = step(state, batch | {"ids": buffers[0]}, batch | {"ids": buffers[1]} if k < 4 else None)
            for buffer in buffers:
                for name in NAMES:
                    buffer[name][...] = 1
        for batch in batches:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)


# ---- counters ----


@pytest.mark.parametrize("ranks", [1, 2])
def test_counters_are_exact(ranks):
    batches = training.make_batches(4)
    batches[2] = batches[2] | {"slope": np.float32(np.nan)}
    with training.shared_step(ranks, 1) as step:
        assert step.stats() == {"items": {}, "users": {}}
        state, _ = training.run(step, training.start(step), batches)
        step.flush(state)
        for name, stats in step.stats().items():
            unique = sum(len(np.unique(batch["ids"][name])) for batch in batches)
            bytes_of_rows = TOKENS[name] * WIDTH[name] * 4 // ranks * (ranks - 1)
            expected = {
                "lookups": 5,  # the last step had no upcoming batch, and looked row 0 up
                "tokens": 5 * TOKENS[name],
                "updates": 3,
                "skipped_updates": 1,
                "trained_tokens": 4 * TOKENS[name],
                "unique_tokens": unique,
                "unique_share": unique / (4 * TOKENS[name]),
                "bytes_moved": (5 + 4) * bytes_of_rows,  # rows, and gradient rows
                "bad_ids": 0,
                "padding_ids": 0,
                "refused_calls": 0,
                "saturated": 0,
                "lookup_begin_calls": 5 * ranks,
                "lookup_lease_calls": 5 * ranks,
                "lookup_done_calls": 5 * ranks,
                "stage_calls": 4 * ranks,
                "update_begin_calls": 5 * ranks,  # the first of them had nothing staged
                "update_lease_calls": 5 * ranks,
                "update_done_calls": 5 * ranks,
            }
            assert {key: stats[key] for key in expected} == expected
            assert stats["exposed_wait_seconds"] >= 0
            assert stats["arena_bytes"] > 0


# ---- closing ----


def test_closing_twice_and_closing_what_was_never_used_is_fine():
    step = training.make_step(2, 1)
    step.close()
    step.close()
    with training.shared_step(2, 1) as step:
        step(training.start(step), training.make_batches(1)[0])
        assert len(native().open_contexts()) == 2
        step.close()
        assert native().open_contexts() == []
        step.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_exception_in_the_block_closes_every_context(staleness):
    batches = training.make_batches(3)

    def interrupted() -> None:
        with training.shared_step(2, staleness) as step:
            state = training.start(step)
            for k in range(2):
                state, _ = step(state, batches[k], batches[k + 1])
            step.tables["users"].lookup(state.tables["users"], np.arange(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert native().open_contexts() == []


def test_what_was_dispatched_before_close_is_finished():
    batches = training.make_batches(4)
    with training.shared_step(2, 0) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 0)
        for batch in batches:
            state, metrics = step(state, batch)
            rehearsal.step(batch)
    assert metrics["finite"]
    rehearsal.assert_state(step, state)


def test_close_raises_what_was_still_to_be_said():
    batch = training.make_batches(1)[0]
    ids = {name: jnp.asarray(x).at[0].set(77) for name, x in batch["ids"].items()}

    def last_step(error: BaseException | None) -> None:
        with training.shared_step(2, 1) as step:
            step(training.start(step), batch | {"ids": ids})
            if error is not None:
                raise error

    with pytest.raises(IdError, match="token id 77 at position 0"):
        last_step(None)
    assert native().open_contexts() == []
    with pytest.raises(KeyboardInterrupt) as e:
        last_step(KeyboardInterrupt())
    assert "And on closing: async_emb 'items': token id 77" in "".join(e.value.__notes__)


def test_objects_made_anew_take_over_from_those_that_were_given_up():
    """As in a notebook, whose cells run again after an interrupt: nobody has closed or flushed the first."""
    batches = training.make_batches(4)
    given_up = training.make_step(2, 1)
    given_up(training.start(given_up), batches[0], batches[1])
    with training.make_step(2, 1) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1)
        state, _ = training.run(step, state, batches)
        for batch in batches:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)
    assert native().open_contexts() == []


def test_contexts_that_somebody_closed_between_two_steps_are_reported():
    batches = training.make_batches(3)
    with training.shared_step(2, 1) as step:
        state, _ = step(training.start(step), batches[0], batches[1])
        jax.block_until_ready(state)
        step.tables["users"].close()
        state, metrics = step(state, batches[1], batches[2])
        assert not metrics["finite"]
        with pytest.raises(PipelineError, match=r"'users' lookup_done .* nothing armed"):
            step(state, batches[2])
        state, metrics = step(state, batches[2])
        assert metrics["finite"]


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, r"'t': rows=0 must be an integer in \[1, 2\^31\)"),
        ({"rows": 2**31}, r"rows=2147483648 must be an integer"),
        ({"rows": 2.0}, r"rows=2.0 must be an integer"),
        ({"width": 0}, r"width=0 must be an integer"),
        ({"dtype": np.float64}, "float64"),
        ({"id_policy": "ignore"}, "id_policy"),
        ({"padding_id": 2**40}, "padding_id=1099511627776 does not fit int32"),
        ({"num_unique": 0}, "num_unique"),
        ({"table_axis": "tabel"}, r"async_emb axis 'tabel' is not a mesh axis"),
        ({"data_axis": ()}, "data_axis"),
    ],
    ids=lambda x: "-".join(map(str, *x.items())) if isinstance(x, dict) else "",
)
def test_arguments_that_cannot_work_are_refused_at_construction(arguments, message):
    with pytest.raises(ContextError, match=message):
        make_table(mesh_of(2), **arguments)


def test_a_model_without_dense_parameters_trains():
    table = make_table(mesh_of(2), init=training.quick_init)
    step = train_step(
        {"t": table}, lambda params, rows, ids: (rows["t"] ** 2).sum(), optax.sgd(1.0), ids_of=lambda ids: {"t": ids}
    )
    with step:
        state = step.init((), jax.random.key(0))
        before, _ = table.to_arrays(state.tables["t"])
        for _ in range(3):
            state, metrics = step(state, np.arange(8))
        after, _ = table.to_arrays(step.flush(state).tables["t"])
    assert metrics["finite"]
    assert (np.abs(after[:8]) < np.abs(before[:8])).mean() > 0.9
    assert_same_bits(after[8:], before[8:])
