"""JAX's transformations of programs with our calls: those that cannot work say which function, and which route does;
ahead-of-time compilation and export work."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_bridge import ContextError, TransformationError, global_ops, ops, order, runtime

from . import _per_shard as per_shard
from ._programs import assert_same_bits, assert_same_run, opened

RANKS = 4


@pytest.fixture(scope="module")
def handle():
    with opened(per_shard.make_handle(RANKS)) as handle:
        yield handle


def as_is(f: Any) -> Any:
    return f


def nested_jit(f: Any) -> Any:
    return jax.jit(lambda *args: jax.jit(f)(*args))


NESTINGS = pytest.mark.parametrize("nested", [as_is, nested_jit])


def lookup(handle: Any) -> Callable[[Any, Any], Any]:
    """(table, ids) -> rows, on global arrays."""

    def per_device(table: Any, ids: Any) -> Any:
        gate = jnp.zeros(1)
        _, pin = ops.lookup_start(ids, table, gate, handle)
        return ops.lookup_done(pin, handle, token_ids=ids)

    tokens = P(handle.data_axis)
    return jax.shard_map(
        per_device, mesh=handle.mesh, in_specs=(P(None, handle.table_axis), tokens), out_specs=P(handle.data_axis, None)
    )


@NESTINGS
@pytest.mark.parametrize("transform", [jax.grad, jax.jacrev, jax.jacfwd, jax.value_and_grad])
def test_derivatives_by_the_table_are_refused_and_the_message_names_the_route(handle, transform, nested):
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    look_up = nested(lookup(handle))
    loss = lambda table: look_up(table, batch.ids).sum()  # noqa: E731
    with pytest.raises(TransformationError) as caught:
        jax.jit(transform(loss))(start.table)
    message = str(caught.value)
    assert "async_emb lookup_start cannot be differentiated" in message
    assert "differentiate the loss with respect to the rows that lookup_done returns" in message
    assert "stage_update" in message
    assert isinstance(caught.value, NotImplementedError)


def test_a_tangent_of_the_table_is_refused_too(handle):
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    with pytest.raises(TransformationError, match="lookup_start cannot be differentiated"):
        jax.jvp(lambda table: lookup(handle)(table, batch.ids), (start.table,), (start.table,))
    with pytest.raises(TransformationError, match="lookup_start cannot be differentiated"):
        jax.linearize(lambda table: lookup(handle)(table, batch.ids), start.table)


@NESTINGS
def test_vmap_is_refused_and_the_message_names_the_route(handle, nested):
    start = per_shard.make_start()
    ids = np.stack([batch.ids for batch in per_shard.make_batches(3)])
    with pytest.raises(TransformationError) as caught:
        jax.vmap(nested(lookup(handle)), in_axes=(None, 0))(start.table, ids)
    message = str(caught.value)
    assert "async_emb lookup_start cannot be mapped with jax.vmap" in message
    assert "ids of any shape are looked up at once" in message


def differentiated(handle: Any, operation: str, x: Any) -> Any:
    """An operation on something that depends on `x`, as a function to be differentiated by `x`."""
    arrays = per_shard.make_start()
    gate = jnp.zeros(RANKS)
    if operation == "stage_update":
        return global_ops.stage_update(x * jnp.ones((per_shard.TOKENS, per_shard.WIDTH)), True, gate, handle).sum()
    rule = {"learning_rate": 0.1, "eps": 1e-8}
    if operation == "rowwise_adagrad_update_start":
        return global_ops.rowwise_adagrad_update_start(
            x * arrays.table, arrays.row_state, gate, handle, decay_factor=1.0, **rule
        )[0].sum()
    last_step = np.zeros(per_shard.ROWS, np.int32)
    rule |= {"accum_decay_rate": 0.0, "weight_decay_rate": 0.0}
    return global_ops.rowwise_adagrad_lazy_update_start(
        x * arrays.table, arrays.row_state, last_step, 1, gate, handle, **rule
    )[0].sum()


@pytest.mark.parametrize("operation", ["rowwise_adagrad_update_start", "rowwise_adagrad_lazy_update_start"])
def test_every_refusal_names_the_operation_that_was_called(handle, operation):
    with pytest.raises(TransformationError, match=f"async_emb {operation} cannot be differentiated"):
        jax.jit(jax.grad(lambda x: differentiated(handle, operation, x)))(1.0)


def test_a_staged_gradient_has_no_gradient_of_its_own(handle):
    """Staging ends differentiation, as `stop_gradient` does: what is staged leaves the program."""
    traced = jax.jit(jax.grad(lambda x: differentiated(handle, "stage_update", x))).trace(1.0)
    assert "async_emb_stage_update" in str(traced.jaxpr)


def test_depend_is_differentiable_and_keeps_every_bit(handle):
    x = np.array([-0.0, np.nan, 1e-40, np.inf], np.float32)
    x.view(np.uint32)[1] = 0x7FC12345  # a NaN with a payload
    pin = np.zeros(1, np.float32)
    value, pull_back = jax.vjp(jax.jit(lambda x: order.depend(x, pin)), x)
    assert_same_bits(value, x, "value")
    assert_same_bits(pull_back(x)[0], x, "cotangent")
    assert_same_bits(jax.jvp(lambda x: order.depend(x, pin), (x,), (x,))[1], x, "tangent")
    hessian = jax.hessian(lambda x: (order.depend(x, pin) ** 2).sum())(jnp.ones(3))
    assert_same_bits(hessian, 2 * np.eye(3, dtype=np.float32), "second derivative")


def test_depend_takes_trees_and_every_dtype():
    tree = {
        "a": np.arange(3, dtype=np.int8),
        "b": (np.ones((2, 0), np.float16), np.array(True)),
        "c": jnp.arange(4, dtype=jnp.bfloat16),
        "d": None,
    }
    out = jax.jit(lambda tree: order.depend(tree, jnp.zeros(1)))(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for got, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_mark_is_differentiable_and_records_an_event_on_each_device(handle):
    def loss(x: Any) -> Any:
        return (order.mark(x, "seen", mesh=handle.mesh, spec=P(handle.data_axis)) ** 3).sum()

    x = jax.device_put(np.arange(8, dtype=np.float32), per_shard.tokens_on(handle))
    runtime.start_timeline()
    gradient = jax.block_until_ready(jax.jit(jax.grad(loss))(x))
    events = [event for event in runtime.stop_timeline() if event.name == "seen"]
    assert_same_bits(gradient, 3 * np.arange(8, dtype=np.float32) ** 2, "gradient")
    assert {event.device for event in events} == set(handle.flatten_replicas)
    with pytest.raises(ContextError, match="mesh and spec go together"):
        order.mark(x, "seen", mesh=handle.mesh)


# ---- ahead of time ----


def test_a_step_compiles_ahead_of_time_from_shapes_alone(handle):
    step = per_shard.exact_step(handle)
    start, batches = per_shard.make_start(), per_shard.make_batches(3)
    arrays, gate = per_shard.place(handle, start)
    tokens = per_shard.tokens_on(handle)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", tokens)),
        (arrays, batches[0], gate),
    )
    compiled = step.lower(*shapes).compile()
    assert runtime.stats(handle)["lookup_begin_calls"] == 0
    for batch in batches:
        arrays, _, _ = compiled(arrays, jax.device_put(batch, tokens), gate)
    assert_same_bits(arrays.table, per_shard.oracle(start, batches).table, "table")
    runtime.check(handle)


def test_export_names_the_custom_calls_and_works_with_jaxs_opt_in(handle):
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    arrays, gate = per_shard.place(handle, start)
    ids, grads = jax.device_put(tuple(batch), per_shard.tokens_on(handle))
    step = per_shard.exact_step(handle)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def flat(table: Any, row_state: Any, ids: Any, grads: Any, gate: Any) -> Any:
        (table, row_state), rows, _ = step(per_shard.Arrays(table, row_state), per_shard.Batch(ids, grads), gate)
        return table, row_state, rows

    with pytest.raises(ValueError, match="async_emb_"):
        jax.export.export(flat)(*arrays, ids, grads, gate)

    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(runtime.native().ffi_targets("cpu"))]
    exported = jax.export.export(flat, disabled_checks=checks)(*arrays, ids, grads, gate)
    if importlib.util.find_spec("flatbuffers"):  # JAX needs it for this
        exported = jax.export.deserialize(exported.serialize())
    table, row_state, rows = jax.jit(exported.call, donate_argnums=(0, 1))(*arrays, ids, grads, gate)
    expected = per_shard.oracle(start, [batch])
    assert_same_bits(rows, start.table[batch.ids], "rows")
    assert_same_bits(table, expected.table, "table")
    assert_same_bits(row_state, expected.row_state, "row_state")
    runtime.check(handle)


# ---- outside of shard_map ----


def test_a_raw_jit_on_a_sharded_operand_is_refused_with_advice(handle):
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    arrays, gate = per_shard.place(handle, start)
    ids = jax.device_put(batch.ids, per_shard.tokens_on(handle))
    raw = jax.jit(lambda table, ids, gate: ops.lookup_start(ids, table, gate, handle))
    with pytest.raises(
        ContextError, match=r"token_ids is int32\[16\] on a shard, but the handle needs .* 4 el"
    ) as error:
        raw(arrays.table, ids, gate)
    assert any("jax.shard_map" in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("depend", order.depend),
        ("mark", lambda x, gate: order.mark(x, "label")),
        # Its arguments have no shape that would tell.
        ("rowwise_adagrad_update_done", lambda x, gate: ops.rowwise_adagrad_update_done(gate[:1], lone_handle())),
    ],
)
def test_a_call_that_would_gather_its_operands_is_refused_with_advice(handle, operation, function):
    x = jax.device_put(np.ones((8, 2), np.float32), per_shard.tokens_on(handle))
    _, gate = per_shard.place(handle, per_shard.make_start())
    with pytest.raises(
        ContextError, match=f"{operation} was called outside of jax.shard_map in a program for 4"
    ) as error:
        jax.jit(function)(x, gate)
    assert any("global_ops" in note for note in error.value.__notes__)


def lone_handle() -> Any:
    return per_shard.make_handle(1, name="lone")


def test_on_one_device_the_per_shard_operations_need_no_shard_map():
    start, batches = per_shard.make_start(), per_shard.make_batches(2)
    with opened(lone_handle()) as handle:
        step = jax.jit(per_shard.exact_body(handle), donate_argnums=0)
        run = per_shard.run_exact(step, handle, start, batches)
        assert_same_run(run, per_shard.oracle(start, batches))
