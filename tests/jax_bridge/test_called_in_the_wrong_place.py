"""Calls inside of a transformation that are for the host, and calls on the host that are for a compiled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_bridge import AsyncEmbedding, RowwiseAdagrad, TransformationError, global_ops, ops, order, runtime

from . import _per_shard as per_shard
from ._programs import assert_same_bits, mesh_of, opened

IDS = np.array([3, 1, 4, 1], np.int32)


@pytest.fixture(scope="module")
def table():
    table = AsyncEmbedding(
        mesh_of(2), table_axis="table", rows=20, width=6, name="words", optimizer=RowwiseAdagrad(0.1)
    )
    yield table
    table.close()


@pytest.fixture(scope="module")
def state(table):
    return table.init(jax.random.key(0))


@pytest.fixture
def handle():
    with opened(per_shard.make_handle(2)) as handle:
        yield handle


# ---- AsyncEmbedding.lookup, which is for the host ----


def in_jit_with_ids(table, state):
    return jax.jit(lambda ids: table.lookup(state, ids))(IDS)


def in_jit_with_the_state(table, state):
    return jax.jit(lambda state: table.lookup(state, IDS))(state)


def in_jit_with_nothing(table, state):
    return jax.jit(lambda: table.lookup(state, IDS))()


def in_grad(table, state):
    return jax.grad(lambda weights: table.lookup(state._replace(weights=weights), IDS).sum())(state.weights)


def in_vmap(table, state):
    return jax.vmap(lambda id_: table.lookup(state, id_))(IDS)


def in_scan(table, state):
    return jax.lax.scan(lambda carry, ids: (carry, table.lookup(state, ids)), 0, IDS.reshape(2, 2))


@pytest.mark.parametrize(
    ("call", "traced"),
    [
        (in_jit_with_ids, "token_ids"),
        (in_jit_with_the_state, "state"),
        (in_jit_with_nothing, "the call"),
        (in_grad, "state"),
        (in_vmap, "token_ids"),
        (in_scan, "token_ids"),
    ],
)
def test_a_lookup_for_evaluation_inside_of_a_transformation_names_the_route(table, state, call, traced):
    wanted = np.asarray(table.lookup(state, IDS))
    with pytest.raises(TransformationError) as e:
        call(table, state)
    assert str(e.value) == (
        "async_emb 'words': AsyncEmbedding.lookup was called inside of jax.jit, jax.grad, jax.vmap or another "
        f"transformation (traced: {traced}), but it is for evaluation on the host"
    )
    (note,) = [note for note in e.value.__notes__ if "JAX has removed" not in note]
    assert "Call it outside" in note
    assert "step.program, or with lookup_start and lookup_done inside of jax.shard_map" in note
    assert_same_bits(table.lookup(state, IDS), wanted)


# ---- operations in place, which are for a compiled program ----

ADAGRAD: dict[str, Any] = {"learning_rate": 0.1, "eps": 1e-8}
CALLS = {
    "lookup_start": lambda o, ids, a, gate, h: o.lookup_start(ids, a.table, gate, h),
    "rowwise_adagrad_update_start": lambda o, ids, a, gate, h: o.rowwise_adagrad_update_start(
        *a, gate, h, **ADAGRAD, decay_factor=1.0
    ),
    "rowwise_adagrad_lazy_update_start": lambda o, ids, a, gate, h: o.rowwise_adagrad_lazy_update_start(
        *a, jnp.zeros(per_shard.ROWS, jnp.int32), 1, gate, h, **ADAGRAD, accum_decay_rate=0.0, weight_decay_rate=0.0
    ),
    "settle": lambda o, ids, a, gate, h: o.settle(a.table, gate, h),
}


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("where", ["global", "shard_map", "one device", "disable_jit"])
def test_an_operation_in_place_outside_of_jit_is_refused_before_it_runs(handle, operation, where):
    call = CALLS[operation]
    ids = per_shard.make_batches(1)[0].ids

    def run(handle: Any) -> Any:
        arrays, gate = per_shard.place(handle, per_shard.make_start())
        tokens, table = global_ops.token_spec(handle), global_ops.table_spec(handle)
        if where == "global":
            return call(global_ops, ids, arrays, gate, handle)
        if where == "one device":
            return call(ops, ids, arrays, gate, handle)
        # What of the results comes first lies on the mesh as a table does; the others are not looked at.
        body = lambda ids, arrays, gate: jax.tree.leaves(call(ops, ids, arrays, gate, handle))[0]  # noqa: E731
        mapped = jax.shard_map(
            body, mesh=handle.mesh, in_specs=(tokens, per_shard.Arrays(table, P()), tokens), out_specs=table
        )
        if where == "shard_map":
            return mapped(ids, arrays, gate)
        with jax.disable_jit():
            return jax.jit(mapped)(ids, arrays, gate)

    def refused(handle: Any) -> None:
        with pytest.raises(TransformationError) as e:
            run(handle)
        assert str(e.value) == (
            f"async_emb {operation} was called outside of jax.jit: call by call, XLA works on copies of the table, but "
            "an update in place needs the one buffer of the program"
        )
        assert f"Call {operation} inside of jax.jit, with the table donated (donate_argnums)" in e.value.__notes__[0]
        # The context has seen nothing, and works.
        assert runtime.stats(handle)["lookup_begin_calls"] == 0
        per_shard.assert_trains_like_the_oracle(handle)

    if where == "one device":
        with opened(per_shard.make_handle(1)) as one:
            refused(one)
    else:
        refused(handle)


# ---- jax.checkpoint ----


def lookup_in_checkpoint(handle: Any, arrays: Any, gate: Any) -> Any:
    ids = per_shard.make_batches(1)[0].ids

    @jax.checkpoint
    def loss(scale: Any, table: Any) -> Any:
        _, pin = global_ops.lookup_start(ids, table, gate, handle)
        return (global_ops.lookup_done(pin, handle, token_ids=ids) * scale).sum()

    return jax.jit(jax.grad(loss))(1.0, arrays.table)


def mark_in_checkpoint(handle: Any, arrays: Any, gate: Any) -> Any:
    return jax.grad(jax.checkpoint(lambda scale: (order.mark(scale, "inside") * scale).sum()))(1.0)


@pytest.mark.parametrize("call", [lookup_in_checkpoint, mark_in_checkpoint])
def test_an_operation_inside_of_a_differentiated_checkpoint_is_refused_by_jax_in_these_words(handle, call):
    """JAX looks for effects before it asks any operation, so these words are JAX's. docs/step.md has them.

    The route is to look up outside, and to checkpoint what follows (test_gradients.py).
    """
    arrays, gate = per_shard.place(handle, per_shard.make_start())
    with pytest.raises(NotImplementedError) as e:
        call(handle, arrays, gate)
    assert str(e.value) == "Effects not supported in partial-eval of `checkpoint`/`remat`: [FfiEffect()]"
