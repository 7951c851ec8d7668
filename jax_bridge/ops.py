"""The per-shard operations, called inside ``jax.shard_map`` over the mesh of the handle.

Every operation is a pair: a start, which returns at once, and a done, which gives the result. ``gate`` and ``pin``
(float32 [1], P(data_axis)) carry order: an operation runs after its gate, and its pin is there when it has
been issued. See ``docs/step.md`` for one training step.

| argument or result | shape on a shard | dtype | spec |
|---|---|---|---|
| token_ids | any, tokens_per_rank elements | int32, or int64 with x64 | P(data_axis) |
| table | [rows, shard_width] | the handle's | P(None, table_axis) |
| rows, grads | [tokens_per_rank, emb_width] | the handle's | P(data_axis, None) |
| segment_ids | [tokens_per_rank] | int32 | P(data_axis) |
| unique_tokens | [num_unique] | int32 | P() |
| row_state, last_step | [rows] | float32, int32 | P() |
| step, pending, valid, norm | [] | int32, bool or int32, int32, float32 | P() |
| gate, pin | [1] | float32 | P(data_axis) |
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .context import AsyncEmbContextHandle
from .errors import ContextError
from .ffi import call, shape_of
from .runtime import open_context

_PIN = jax.ShapeDtypeStruct((1,), np.float32)
_FLOAT = jax.ShapeDtypeStruct((), np.float32)
_INT = jax.ShapeDtypeStruct((), np.int32)


def lookup_start(token_ids: Any, table: Any, gate: Any, handle: AsyncEmbContextHandle) -> tuple[Any, Any]:
    """Starts to look up ``token_ids`` in ``table``.

    Returns:
        ``(table, pin)``: the same table, to use from here on, and the pin of this lookup.

    Raises:
        ContextError: shapes or dtypes that do not fit the handle.
    """
    open_context(handle)
    _require(handle, "token_ids", token_ids, dtypes=(np.int32, np.int64), elements=handle.tokens_per_rank)
    _require(handle, "table", table, dtypes=(handle.dtype,), shape=(None, handle.shard_width))
    gate = _gate(handle, gate)
    pin, table = call(
        "async_emb_lookup_begin",
        "lookup_start",
        [token_ids, table, gate],
        [_PIN, shape_of(table)],
        axes=handle.table_axis,
        aliases={1: 1},
        lends=True,
        attrs=_context(handle),
    )
    (table,) = call(
        "async_emb_lookup_lease",
        "lookup_start",
        [table, _no_pin()],
        [shape_of(table)],
        axes=handle.table_axis,
        aliases={0: 0},
        lends=True,
        attrs=_context(handle),
    )
    return table, pin


def lookup_start_beside_update(
    token_ids: Any, table: Any, gate: Any, handle: AsyncEmbContextHandle
) -> tuple[Any, Any, Any]:
    """As ``lookup_start``, between an update start on ``table`` and its done, without waiting for that update.

    The ids are taken at once; the rows are read when the update has ended, so they have it. With ``lookup_start`` what
    waits for the pin would wait for the update too, because a table that is lent is not there before.

    Args:
        token_ids: as of ``lookup_start``.
        table: as the update start returned it.
        gate: what to wait for.
        handle: the handle.

    Returns:
        ``(table, pin, issued)``: the same table; the pin of this lookup, for ``lookup_done`` in a later step (it comes
        back with the table, so what waits for it here waits for the update and the lookup); and ``issued``, float32
        [1], for what shall run beside both.

    Raises:
        ContextError: shapes or dtypes that do not fit the handle.
    """
    open_context(handle)
    _require(handle, "token_ids", token_ids, dtypes=(np.int32, np.int64), elements=handle.tokens_per_rank)
    _require(handle, "table", table, dtypes=(handle.dtype,), shape=(None, handle.shard_width))
    issued, pin = call(
        "async_emb_lookup_begin_beside_update",
        "lookup_start_beside_update",
        [token_ids, _gate(handle, gate)],
        [_PIN, _PIN],
        axes=handle.table_axis,
        lends=True,
        attrs=_context(handle),
    )
    # A pin of its own, which lives on to the end of the step: see _no_pin.
    table, pin = call(
        "async_emb_lookup_lease_beside_update",
        "lookup_start_beside_update",
        [table, pin],
        [shape_of(table), _PIN],
        axes=handle.table_axis,
        aliases={0: 0, 1: 1},
        lends=True,
        attrs=_context(handle),
    )
    return table, pin, issued


def lookup_done(pin: Any, handle: AsyncEmbContextHandle, *, token_ids: Any = None) -> Any:
    """The rows of the lookup that ``pin`` belongs to: [tokens_per_rank, emb_width], bit for bit as in the table.

    Args:
        pin: of the last ``lookup_start``; an older one is refused.
        handle: the handle.
        token_ids: the ids that the rows are wanted for. If they are not the ids that were looked up, the call is
            refused.
    """
    open_context(handle)
    pin = _gate(handle, pin, "pin")
    rows = jax.ShapeDtypeStruct((handle.tokens_per_rank, handle.emb_width), handle.dtype)
    operands = [pin]
    target = "async_emb_lookup_done"
    if token_ids is not None:
        _require(handle, "token_ids", token_ids, dtypes=(np.int32, np.int64), elements=handle.tokens_per_rank)
        operands.append(token_ids)
        target = "async_emb_lookup_done_checked"
    (out,) = call(target, "lookup_done", operands, [rows], axes=handle.table_axis, attrs=_context(handle))
    return out


def stage_update(
    grads: Any, segment_ids: Any, unique_tokens: Any, pending: Any, gate: Any, handle: AsyncEmbContextHandle
) -> Any:
    """Hands over the gradient rows of the last lookup that was consumed. The next update start takes them.

    Args:
        grads: gradient of the loss with respect to the rows of ``lookup_done``.
        segment_ids: each token's index into ``unique_tokens``, -1 for a token that is not trained; or None.
        unique_tokens: the batch's distinct rows, ascending, padded with the number of rows; or None. With both None the
            context finds the distinct ids itself, on the side.
        pending: whether to apply the update; 0 or False skips it, and counts the skip.
        gate: what to wait for.
        handle: the handle.

    Returns:
        a pin.
    """
    open_context(handle)
    grads = lax.stop_gradient(grads)
    _require(handle, "grads", grads, dtypes=(handle.dtype,), shape=(handle.tokens_per_rank, handle.emb_width))
    pending = jnp.asarray(pending)
    _require(handle, "pending", pending, dtypes=(np.int32, np.bool_), elements=1)
    if (segment_ids is None) != (unique_tokens is None):
        raise ContextError("async_emb stage_update: give both segment_ids and unique_tokens, or None for both")
    operands = [grads, lax.stop_gradient(pending), _gate(handle, gate)]
    target = "async_emb_stage_update"
    if segment_ids is not None:
        _require(handle, "segment_ids", segment_ids, dtypes=(np.int32,), shape=(handle.tokens_per_rank,))
        _require(handle, "unique_tokens", unique_tokens, dtypes=(np.int32,), shape=(handle.num_unique,))
        operands[1:1] = [segment_ids, unique_tokens]
        target = "async_emb_stage_update_segments"
    (pin,) = call(target, "stage_update", operands, [_PIN], axes=handle.table_axis, attrs=_context(handle))
    return pin


def rowwise_adagrad_update_start(
    table: Any,
    row_state: Any,
    gate: Any,
    handle: AsyncEmbContextHandle,
    *,
    learning_rate: Any,
    eps: Any,
    decay_factor: Any,
    weight_decay_factor: Any = 1.0,
    max_grad_norm: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    rounding_step: Any = None,
) -> tuple[Any, Any, Any]:
    """Starts to apply the staged gradients, in place, by row-wise Adagrad (design of the rule: ``docs/numerics.md``).

    For every row of the batch, with G the sum of its gradient rows and D the logical width, in fp32:
    ``a = a * decay_factor + sum(G**2) / D``; ``w = round(w * weight_decay_factor - learning_rate / (sqrt(a) + eps)
    * G)``. Row-wise Adagrad is Adagrad (Duchi et al. 2011) with one accumulator for each row, as in FBGEMM's exact
    row-wise Adagrad.

    Args:
        table, row_state: to update in place; use what is returned from here on.
        gate: what to wait for.
        handle: the handle.
        learning_rate, eps, decay_factor, weight_decay_factor: numbers, or float32 scalars: changing them recompiles
            nothing.
        max_grad_norm: scales gradients so that their global norm is at most this; None for no limit.
        rounding: "nearest" or "stochastic", of the stored weights.
        seed, rounding_step: with "stochastic", uint32 scalars that key the generator.

    Returns:
        ``(table, row_state, pin)``.
    """
    _require_state(handle, table, row_state)
    table, row_state, pin = _update_start(
        handle,
        gate,
        [table, row_state],
        [learning_rate, eps, decay_factor, weight_decay_factor],
        step=0,
        max_grad_norm=max_grad_norm,
        rounding=rounding,
        seed=seed,
        rounding_step=rounding_step,
    )
    return table, row_state, pin


def rowwise_adagrad_lazy_update_start(
    table: Any,
    row_state: Any,
    last_step: Any,
    step: Any,
    gate: Any,
    handle: AsyncEmbContextHandle,
    *,
    learning_rate: Any,
    eps: Any,
    accum_decay_rate: Any,
    weight_decay_rate: Any,
    max_grad_norm: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    rounding_step: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """As ``rowwise_adagrad_update_start``, with decay by the steps since a row was last touched.

    With ``delta = max(0, step - last_step)`` of the row: ``decay_factor = exp(-accum_decay_rate * delta)``,
    ``weight_decay_factor = exp(-weight_decay_rate * delta)``, and then ``last_step = step``.

    Args:
        last_step: int32 [rows], updated in place.
        step: int32 scalar.
        accum_decay_rate, weight_decay_rate: per step; numbers or float32 scalars.

    Returns:
        ``(table, row_state, last_step, pin)``.
    """
    _require_state(handle, table, row_state)
    _require(handle, "last_step", last_step, dtypes=(np.int32,), shape=(table.shape[0],))
    table, row_state, last_step, pin = _update_start(
        handle,
        gate,
        [table, row_state, last_step],
        [learning_rate, eps, accum_decay_rate, weight_decay_rate],
        step=step,
        max_grad_norm=max_grad_norm,
        rounding=rounding,
        seed=seed,
        rounding_step=rounding_step,
    )
    return table, row_state, last_step, pin


def rowwise_adagrad_update_done(gate: Any, handle: AsyncEmbContextHandle) -> tuple[Any, Any, Any, Any]:
    """Waits for the update that was started last.

    Returns:
        ``(norm, valid, pending, pin)``: the global gradient norm before clipping, whether the update was applied (its
        norm was finite and it was staged with pending), and whether one had been staged.
    """
    open_context(handle)
    norm, valid, pending, pin = call(
        "async_emb_update_done",
        "rowwise_adagrad_update_done",
        [_gate(handle, gate)],
        [_FLOAT, _INT, _INT, _PIN],
        axes=handle.table_axis,
        replicated=(0, 1, 2),
        attrs=_context(handle),
    )
    return norm, valid, pending, pin


def settle(table: Any, after: Any, handle: AsyncEmbContextHandle) -> Any:
    """``table`` at rest: what uses it from here on comes after all work that its starts have begun.

    For a table that leaves a compiled step while a lookup is under way, at the end of the step. On CPU its lease has
    ended by then; on a GPU this is where the stream waits for the side stream.

    Args:
        table: as the last start returned it.
        after: what comes first, so that the wait hides behind it: an array of any shape, a pin for example.
        handle: the handle.
    """
    open_context(handle)
    _require(handle, "table", table, dtypes=(handle.dtype,), shape=(None, handle.shard_width))
    (table,) = call(
        "async_emb_settle",
        "settle",
        [table, lax.stop_gradient(after)],
        [shape_of(table)],
        axes=handle.table_axis,
        aliases={0: 0},
        lends=True,
        attrs=_context(handle),
    )
    return table


def _update_start(
    handle: AsyncEmbContextHandle,
    gate: Any,
    buffers: list[Any],
    numbers: list[Any],
    *,
    step: Any,
    max_grad_norm: Any,
    rounding: str,
    seed: Any,
    rounding_step: Any,
) -> tuple[Any, ...]:
    """Begins an update on ``buffers`` (table, row_state and, for the lazy form, last_step) and lends them."""
    open_context(handle)
    if rounding not in ("nearest", "stochastic"):
        raise ContextError(f"async_emb rounding={rounding!r} must be 'nearest' or 'stochastic'")
    stochastic = rounding == "stochastic"
    if stochastic and (seed is None or rounding_step is None):
        raise ContextError("async_emb rounding='stochastic' needs seed and rounding_step, so that it can be repeated")
    clips = max_grad_norm is not None
    lazy = len(buffers) == 3
    operation = "rowwise_adagrad_lazy_update_start" if lazy else "rowwise_adagrad_update_start"
    operands = [
        _gate(handle, gate),
        *(_scalar(x, np.float32) for x in numbers),
        _scalar(max_grad_norm if clips else 0.0, np.float32),
        _scalar(step, np.int32),
        _scalar(seed if stochastic else 0, np.uint32),
        _scalar(rounding_step if stochastic else 0, np.uint32),
    ]
    shapes = [shape_of(x) for x in buffers]
    places = range(len(buffers))
    pin, *buffers = call(
        "async_emb_update_begin_lazy" if lazy else "async_emb_update_begin",
        operation,
        operands + buffers,
        [_PIN, *shapes],
        axes=handle.table_axis,
        replicated=[1 + i for i in places[1:]],
        aliases={len(operands) + i: 1 + i for i in places},
        lends=True,
        attrs=_context(handle) | {"clips": clips, "stochastic_rounding": stochastic},
    )
    lent = call(
        "async_emb_update_lease_lazy" if lazy else "async_emb_update_lease",
        operation,
        [*buffers, _no_pin()],
        shapes,
        axes=handle.table_axis,
        replicated=places[1:],
        aliases={i: i for i in places},
        lends=True,
        attrs=_context(handle),
    )
    return *lent, pin


def _no_pin() -> Any:
    """For a lease, which comes after its begin because of the table. A pin's buffer may be given to the dense compute
    while the lease still runs, and XLA would then hold that back until the lease has ended; a constant's may not."""
    return jnp.zeros(1, jnp.float32)


def _context(handle: AsyncEmbContextHandle) -> dict[str, Any]:
    return {"context_id": np.int64(handle.context_id)}


def _scalar(x: Any, dtype: Any) -> Any:
    return lax.stop_gradient(jnp.reshape(jnp.asarray(x, dtype), ()))


def _gate(handle: AsyncEmbContextHandle, gate: Any, name: str = "gate") -> Any:
    _require(handle, name, gate, dtypes=(np.float32,), shape=(1,))
    return lax.stop_gradient(gate)


def _require_state(handle: AsyncEmbContextHandle, table: Any, row_state: Any) -> None:
    _require(handle, "table", table, dtypes=(handle.dtype,), shape=(None, handle.shard_width))
    _require(handle, "row_state", row_state, dtypes=(np.float32,), shape=(table.shape[0],))


def _require(
    handle: AsyncEmbContextHandle,
    name: str,
    x: Any,
    *,
    dtypes: tuple[Any, ...],
    shape: tuple[int | None, ...] | None = None,
    elements: int | None = None,
) -> None:
    actual = tuple(np.shape(x))
    fits = any(np.dtype(x.dtype) == np.dtype(dtype) for dtype in dtypes)
    if shape is not None:
        fits = fits and len(actual) == len(shape)
        fits = fits and all(want is None or got == want for got, want in zip(actual, shape, strict=True))
    if elements is not None:
        fits = fits and math.prod(actual) == elements
    if fits:
        return
    wanted_shape = (
        f"{elements} elements"
        if shape is None
        else "[" + ", ".join("rows" if n is None else str(n) for n in shape) + "]"
    )
    wanted_dtype = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    error = ContextError(
        f"async_emb {handle.name!r}: {name} is {np.dtype(x.dtype).name}{list(actual)} on a shard, but the handle needs "
        f"{wanted_dtype} with {wanted_shape}"
    )
    error.add_note(
        "Call the operation inside jax.shard_map over the handle's mesh (a plain jit hands over whole arrays), with "
        f"the specs of its documentation, and make the handle for these sizes: "
        f"tokens_per_batch={handle.tokens_per_batch}, emb_width={handle.emb_width}, "
        f"num_unique={handle.num_unique}, dtype={handle.dtype.name}."
    )
    raise error
