"""The operations on global arrays: the per-shard ones, wrapped in ``jax.shard_map`` over the handle's mesh.

Call them inside ``jax.jit``. Shapes are those of the whole arrays: token_ids [...] with tokens_per_batch elements,
their first dimension sharded over ``data_axis``; table [rows, emb_width]; rows [*token_ids.shape, logical_width]
(padding columns are cut off); gates and pins [group_size].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from . import ops, order
from .context import AsyncEmbContextHandle
from .errors import ContextError
from .ffi import as_varying, call
from .placing import put
from .runtime import open_context


def token_spec(handle: AsyncEmbContextHandle) -> P:
    """How token ids, and everything else that has one entry for each token, lie on the mesh."""
    return P(handle.data_axis)


def table_spec(handle: AsyncEmbContextHandle) -> P:
    """How a table lies on the mesh."""
    return P(None, handle.table_axis)


def first_gate(handle: AsyncEmbContextHandle) -> Any:
    """A gate that waits for nothing: float32 [group_size]."""
    return put(np.zeros(handle.group_size, np.float32), NamedSharding(handle.mesh, token_spec(handle)))


def lookup_start(token_ids: Any, table: Any, gate: Any, handle: AsyncEmbContextHandle) -> tuple[Any, Any]:
    """``ops.lookup_start`` on global arrays. Returns (table, pin)."""
    _require_tokens(token_ids, handle)
    return _map(
        handle,
        lambda ids, table, gate: ops.lookup_start(ids, table, gate, handle),
        (token_spec(handle), table_spec(handle), token_spec(handle)),
        (table_spec(handle), token_spec(handle)),
    )(token_ids, table, gate)


def lookup_start_beside_update(
    token_ids: Any, table: Any, gate: Any, handle: AsyncEmbContextHandle
) -> tuple[Any, Any, Any]:
    """``ops.lookup_start_beside_update`` on global arrays. Returns (table, pin, issued)."""
    _require_tokens(token_ids, handle)
    tokens = token_spec(handle)
    return _map(
        handle,
        lambda ids, table, gate: ops.lookup_start_beside_update(ids, table, gate, handle),
        (tokens, table_spec(handle), tokens),
        (table_spec(handle), tokens, tokens),
    )(token_ids, table, gate)


def lookup_done(pin: Any, handle: AsyncEmbContextHandle, *, token_ids: Any) -> Any:
    """``ops.lookup_done`` on global arrays: rows [*token_ids.shape, logical_width]."""
    _require_tokens(token_ids, handle)

    def per_shard(pin: Any, ids: Any) -> Any:
        return _rows_of_tokens(ops.lookup_done(pin, handle, token_ids=ids), ids, handle)

    return _map(handle, per_shard, (token_spec(handle), token_spec(handle)), token_spec(handle))(pin, token_ids)


def lookup_discard(pin: Any, handle: AsyncEmbContextHandle) -> Any:
    """Consumes a lookup whose rows nobody needs. Returns a pin."""

    def per_shard(pin: Any) -> Any:
        return order.depend(pin, ops.lookup_done(pin, handle))

    return _map(handle, per_shard, (token_spec(handle),), token_spec(handle))(pin)


def lookup_now(token_ids: Any, table: Any, handle: AsyncEmbContextHandle) -> Any:
    """Looks up without a pair, and without taking the table: rows [*token_ids.shape, logical_width].

    For evaluation. Calls of one context must not overlap: the caller waits for each before the next.
    """
    _require_tokens(token_ids, handle)

    def per_shard(ids: Any, table: Any) -> Any:
        open_context(handle)
        rows = jax.ShapeDtypeStruct((handle.tokens_per_rank, handle.emb_width), handle.dtype)
        (out,) = call(
            "async_emb_lookup_now",
            "lookup",
            [ids, table],
            [rows],
            axes=handle.table_axis,
            attrs={"context_id": np.int64(handle.context_id)},
        )
        return _rows_of_tokens(out, ids, handle)

    return _map(handle, per_shard, (token_spec(handle), table_spec(handle)), token_spec(handle))(token_ids, table)


def settle(table: Any, after: Any, handle: AsyncEmbContextHandle) -> Any:
    """``ops.settle`` on a global table; ``after`` is a gate or pin."""
    return _map(
        handle,
        lambda table, after: ops.settle(table, after, handle),
        (table_spec(handle), token_spec(handle)),
        table_spec(handle),
    )(table, after)


def stage_update(grads: Any, pending: Any, gate: Any, handle: AsyncEmbContextHandle) -> Any:
    """``ops.stage_update`` on global arrays: grads as ``lookup_done`` gives rows. Returns a pin."""

    def per_shard(grads: Any, pending: Any, gate: Any) -> Any:
        flat = grads.reshape(handle.tokens_per_rank, handle.logical_width)
        padded = jnp.pad(flat, ((0, 0), (0, handle.emb_width - handle.logical_width)))
        return ops.stage_update(padded, None, None, pending, gate, handle)

    tokens = token_spec(handle)
    return _map(handle, per_shard, (tokens, P(), tokens), tokens)(grads, jnp.asarray(pending), gate)


def rowwise_adagrad_update_start(
    table: Any, row_state: Any, gate: Any, handle: AsyncEmbContextHandle, **options: Any
) -> tuple[Any, Any, Any]:
    """``ops.rowwise_adagrad_update_start`` on global arrays. Returns (table, row_state, pin)."""
    arrays, static = _split(options)

    def per_shard(table: Any, state: Any, gate: Any, arrays: dict[str, Any]) -> Any:
        return ops.rowwise_adagrad_update_start(table, state, gate, handle, **arrays, **static)

    specs = (table_spec(handle), P(), token_spec(handle))
    return _map(handle, per_shard, (*specs, P()), specs)(table, row_state, gate, arrays)


def rowwise_adagrad_lazy_update_start(
    table: Any, row_state: Any, last_step: Any, step: Any, gate: Any, handle: AsyncEmbContextHandle, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """``ops.rowwise_adagrad_lazy_update_start`` on global arrays. Returns (table, row_state, last_step, pin)."""
    arrays, static = _split(options)

    def per_shard(table: Any, state: Any, last: Any, step: Any, gate: Any, arrays: dict[str, Any]) -> Any:
        return ops.rowwise_adagrad_lazy_update_start(table, state, last, step, gate, handle, **arrays, **static)

    table_, tokens = table_spec(handle), token_spec(handle)
    return _map(handle, per_shard, (table_, P(), P(), P(), tokens, P()), (table_, P(), P(), tokens))(
        table, row_state, last_step, step, gate, arrays
    )


def rowwise_adagrad_update_done(gate: Any, handle: AsyncEmbContextHandle) -> tuple[Any, Any, Any, Any]:
    """``ops.rowwise_adagrad_update_done`` on global arrays. Returns (norm, valid, pending, pin)."""
    tokens = token_spec(handle)
    return _map(handle, lambda gate: ops.rowwise_adagrad_update_done(gate, handle), (tokens,), (P(), P(), P(), tokens))(
        gate
    )


def wait_for(gate: Any, value: Any, value_spec: P, handle: AsyncEmbContextHandle) -> Any:
    """A gate that also waits for ``value``, an array that lies on the mesh as ``value_spec`` says."""
    tokens = token_spec(handle)

    def per_shard(gate: Any, value: Any) -> Any:
        return order.depend(gate, value)

    return _map(handle, per_shard, (tokens, value_spec), tokens)(gate, value)


def hold_until(value: Any, gate: Any, value_spec: P, handle: AsyncEmbContextHandle) -> Any:
    """``value``, not used before ``gate``; it lies on the mesh as ``value_spec`` says. The gradient passes
    unchanged."""

    def per_shard(value: Any, gate: Any) -> Any:
        return order.depend(value, gate)

    return _map(handle, per_shard, (value_spec, token_spec(handle)), value_spec)(value, gate)


def _map(
    handle: AsyncEmbContextHandle, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    mapped = jax.shard_map(function, mesh=handle.mesh, in_specs=in_specs, out_specs=out_specs)
    if AxisType.Explicit not in handle.mesh.axis_types:
        return mapped

    def placed(*args: Any) -> Any:
        # With explicit axes a value's type says where it lies, and shard_map moves nothing.
        moved = [
            jax.tree.map(lambda x, spec=spec: jax.sharding.reshard(x, NamedSharding(handle.mesh, spec)), arg)
            for arg, spec in zip(args, in_specs, strict=True)
        ]
        return mapped(*moved)

    return placed


def _rows_of_tokens(rows: Any, ids: Any, handle: AsyncEmbContextHandle) -> Any:
    rows = rows.reshape(*ids.shape, handle.emb_width)
    return as_varying(rows[..., : handle.logical_width], handle.table_axis)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that are operands, and those that are decisions of the program."""
    static = {name: value for name, value in options.items() if isinstance(value, str) or value is None}
    arrays = {name: jnp.asarray(value) for name, value in options.items() if name not in static}
    return arrays, static


def _require_tokens(token_ids: Any, handle: AsyncEmbContextHandle) -> None:
    shape = tuple(np.shape(token_ids))
    if int(np.prod(shape)) != handle.tokens_per_batch or not shape or shape[0] % handle.group_size:
        error = ContextError(
            f"async_emb {handle.name!r}: token_ids of shape {list(shape)} do not fit the handle, which has "
            f"tokens_per_batch={handle.tokens_per_batch} over {handle.group_size} ranks"
        )
        error.add_note(
            "The first dimension is sharded over data_axis, so it must be a multiple of the number of ranks, and all "
            "dimensions together must give tokens_per_batch."
        )
        raise error
