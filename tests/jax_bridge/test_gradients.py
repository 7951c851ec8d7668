"""Gradients in programs that look up rows: those of replicated parameters, taken inside `jax.shard_map`, are those of
plain JAX, whether JAX checks what varies or not; those of the rows are what the table is trained with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_bridge import ops, order, runtime

from . import _per_shard as per_shard
from ._per_shard import Arrays
from ._programs import assert_same_bits, mesh_of, opened

HIDDEN = 5


def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(11)
    return {
        "hidden": 0.5 * rng.normal(size=(per_shard.WIDTH, HIDDEN)).astype(np.float32),
        "out": rng.normal(size=HIDDEN).astype(np.float32),
    }


def losses_of(params: Any, rows: Any, labels: Any) -> Any:
    return (jnp.tanh(rows @ params["hidden"]) @ params["out"] - labels) ** 2


def plain_gradients(start: Arrays, params: Any, ids: Any, labels: Any) -> Any:
    """(gradients of the parameters, of the table) of the mean loss, by plain JAX."""

    def loss(params: Any, table: Any) -> Any:
        return losses_of(params, table[ids], labels).mean()

    return jax.grad(loss, argnums=(0, 1))(params, jnp.asarray(start.table))


def training_step(handle: Any, check_vma: bool, *, whole_step: bool, checkpoint: bool = False) -> Any:
    """(arrays, params, ids, labels, gate) -> (arrays, params' gradients, rows' gradients), by per-shard operations.

    With `whole_step` the function that is differentiated looks up, too.
    """
    losses = jax.checkpoint(losses_of) if checkpoint else losses_of

    def step(arrays: Any, params: Any, ids: Any, labels: Any, gate: Any) -> Any:
        def look_up(gate: Any) -> Any:
            table, pin = ops.lookup_start(ids, arrays.table, gate, handle)
            rows = ops.lookup_done(pin, handle, token_ids=ids)
            return rows, per_shard.rows_gate(pin, rows), table

        def loss_of(params: Any, rows: Any) -> Any:
            rows = order.depend(rows, gate)
            return losses(params, rows, labels).sum() / per_shard.TOKENS

        if whole_step:
            # The rows' gradient by way of a perturbation, which is the usual trick where rows are made inside.
            def with_lookup(params: Any, perturbation: Any) -> Any:
                rows, pin, table = look_up(gate)
                return loss_of(params, rows + perturbation), (pin, table)

            zero = (
                jax.lax.pcast(jnp.zeros((handle.tokens_per_rank, handle.emb_width)), handle.table_axis, to="varying")
                if check_vma
                else jnp.zeros((handle.tokens_per_rank, handle.emb_width))
            )
            (grads, rows_grad), (pin, table) = jax.grad(with_lookup, argnums=(0, 1), has_aux=True)(params, zero)
        else:
            rows, pin, table = look_up(gate)
            grads, rows_grad = jax.grad(loss_of, argnums=(0, 1))(params, rows)
        if not check_vma:
            grads = jax.lax.psum(grads, handle.table_axis)  # with the check JAX does this itself
        pin = ops.stage_update(rows_grad, None, None, True, pin, handle)
        updated, _, _ = per_shard.update(Arrays(table, arrays.row_state), pin, handle)
        return updated, grads, rows_grad

    arrays, batch, gate, _ = per_shard.specs_of(handle)
    return jax.jit(
        jax.shard_map(
            step,
            mesh=handle.mesh,
            in_specs=(arrays, P(), batch.ids, batch.ids, gate),
            out_specs=(arrays, P(), batch.grads),
            check_vma=check_vma,
        ),
        donate_argnums=0,
    )


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.parametrize("explicit", [False, True], ids=["auto axes", "explicit axes"])
@pytest.mark.parametrize("whole_step", [False, True], ids=["dense part", "whole step"])
def test_gradients_inside_shard_map_are_those_of_plain_jax(check_vma, explicit, whole_step):
    name = "explicit" if explicit else "auto"
    rng = np.random.default_rng(5)
    start, params = per_shard.make_start(), make_params()
    ids = rng.integers(0, 20, per_shard.TOKENS).astype(np.int32)  # some of them twice
    labels = rng.normal(size=per_shard.TOKENS).astype(np.float32)
    with opened(per_shard.make_handle(mesh_of(4, explicit=explicit), name=name)) as handle:
        arrays, gate = per_shard.place(handle, start)
        step = training_step(handle, check_vma, whole_step=whole_step)
        ids_there, labels_there = jax.device_put((ids, labels), per_shard.tokens_on(handle))
        arrays, grads, rows_grad = step(arrays, params, ids_there, labels_there, gate)
        wanted, wanted_table = plain_gradients(start, params, ids, labels)
        for leaf in wanted:
            np.testing.assert_allclose(grads[leaf], wanted[leaf], rtol=2e-6, atol=1e-7)

        # Summed by row, the rows' gradients are the dense gradient of the table.
        dense = np.zeros_like(start.table)
        np.add.at(dense, ids, np.asarray(rows_grad))
        np.testing.assert_allclose(dense, wanted_table, rtol=2e-6, atol=1e-7)
        # And they are what the table was trained with, bit for bit.
        expected = per_shard.oracle(start, [per_shard.Batch(ids, np.asarray(rows_grad))])
        assert_same_bits(arrays.table, expected.table, "table")
        assert_same_bits(arrays.row_state, expected.row_state, "row_state")
        runtime.check(handle)


def test_checkpointing_the_dense_part_changes_nothing_in_what_is_trained():
    rng = np.random.default_rng(5)
    start, params = per_shard.make_start(), make_params()
    ids = rng.integers(0, 20, per_shard.TOKENS).astype(np.int32)
    labels = rng.normal(size=per_shard.TOKENS).astype(np.float32)
    tables = []
    with opened(per_shard.make_handle(4)) as handle:
        for checkpoint in (False, True):
            arrays, gate = per_shard.place(handle, start)
            step = training_step(handle, True, whole_step=False, checkpoint=checkpoint)
            tables.append(np.asarray(step(arrays, params, ids, labels, gate)[0].table))
            runtime.check(handle)
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)


def test_a_gradient_of_a_replicated_parameter_would_be_wrong_if_rows_counted_as_replicated(monkeypatch):
    """Why results say over which axes they vary: without that JAX adds nothing over the ranks, without complaint."""
    from jax_bridge import ffi

    monkeypatch.setattr(ffi, "as_varying", lambda x, axes: x)
    rng = np.random.default_rng(5)
    start, params = per_shard.make_start(), make_params()
    ids = rng.integers(0, 20, per_shard.TOKENS).astype(np.int32)

    with opened(per_shard.make_handle(4)) as handle:

        def step(arrays: Any, params: Any, ids: Any, gate: Any) -> Any:
            _, pin = ops.lookup_start(ids, arrays.table, gate, handle)
            rows = ops.lookup_done(pin, handle, token_ids=ids)
            return jax.grad(lambda params: losses_of(params, rows, 0.0).sum() / per_shard.TOKENS)(params)

        arrays_spec, batch, gate_spec, _ = per_shard.specs_of(handle)
        sharded = jax.shard_map(
            step, mesh=handle.mesh, in_specs=(arrays_spec, P(), batch.ids, gate_spec), out_specs=P()
        )
        arrays, gate = per_shard.place(handle, start)
        wrong = jax.jit(sharded)(arrays, params, ids, gate)
    wanted, _ = plain_gradients(start, params, ids, 0.0)
    assert not np.allclose(wrong["out"], wanted["out"], rtol=0.05)
