"""Calls of the native handlers from traced code: types that say what varies, and transformations that say no.

Results of ``jax.ffi.ffi_call`` count as replicated inside ``jax.shard_map``. Where they are not, ``jax.grad`` would
silently give wrong gradients of replicated parameters, so ``call`` states for every result whether it varies over the
table axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import DynamicJaxprTracer

from .errors import AsyncEmbError, ContextError
from .runtime import native

Axes = tuple[Any, ...]


class TransformationError(AsyncEmbError, NotImplementedError):
    """A JAX transformation met an operation that it cannot go through. The message names a route that works."""


def varies(x: Any) -> frozenset[Any]:
    """The mesh axes over which ``x`` varies, as far as ``shard_map`` tracks them (``check_vma=True``)."""
    aval = jax.typeof(x)
    # The type's name for it has changed: `vma` before it became part of the manual axis type.
    manual_axis_type = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if manual_axis_type is None else manual_axis_type.varying)


def as_varying(x: Any, axes: Axes) -> Any:
    """``x`` with a type that varies over ``axes``; outside of ``shard_map`` and with ``check_vma=False``, ``x``."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    missing = tuple(axis for axis in axes if axis in manual and axis not in varies(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def call(
    target: str,
    operation: str,
    operands: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    axes: Axes,
    replicated: Sequence[int] = (),
    aliases: Mapping[int, int] | None = None,
    side_effect: bool = True,
    lends: bool = False,
    attrs: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Calls a native handler.

    Args:
        target: name of the handler.
        operation: the public function that the user has called, for messages.
        operands: arrays; their types become varying over ``axes``.
        results: shapes and dtypes. One that aliases an operand varies over what that operand varies over, and over
            ``axes``; the others over what any operand varies over; ``replicated`` ones over nothing.
        axes: the table axes.
        replicated: indices of results that are the same on every shard.
        aliases: operand index to result index, for what works in place.
        side_effect: run the call even where nobody reads its results, and merge no two of them.
        lends: work goes on in the buffer of an operand when the call has returned: refused outside of a compiled
            program, where that buffer is a copy.
        attrs: attributes of the call.
    """
    native()  # registers the handlers
    operands = refuse_transformations(operation, [as_varying(x, axes) for x in operands])
    if lends:
        _require_compiled(operation, operands)
    # A data axis of size 1 that is no table axis makes ids vary, but must not make the table vary.
    of_result = {result: varies(operands[operand]) for operand, result in (aliases or {}).items()}
    common: frozenset[Any] = frozenset().union(*(varies(x) for x in operands))
    operands = [as_varying(x, tuple(common)) for x in operands]
    out = jax.ffi.ffi_call(
        target, list(results), has_side_effect=side_effect, input_output_aliases=dict(aliases) if aliases else None
    )(*operands, **(attrs or {}))
    return tuple(x if i in replicated else as_varying(x, tuple(of_result.get(i, common))) for i, x in enumerate(out))


_SUPPORTED_ROUTE = {
    "lookup_start": "differentiate the loss with respect to the rows that lookup_done returns, and hand their "
    "gradient to stage_update",
    "lookup_done": "differentiate the loss with respect to the rows that it returns, and hand their gradient to "
    "stage_update",
    "stage_update": "call it outside of the differentiated function, on the gradient of the rows",
    "depend": "order a whole batch at once",
}
_OTHER_ROUTE = "call it outside of the transformed function"


def refuse_transformations(operation: str, operands: Sequence[Any]) -> list[Any]:
    """``operands``, through which neither differentiation nor ``vmap`` goes."""
    return list(_refuse_p.bind(*operands, operation=operation))


def _require_compiled(operation: str, operands: Sequence[Any]) -> None:
    # What an operation gives while a program is traced, and neither on arrays nor in a shard_map that runs eagerly.
    if any(isinstance(x, DynamicJaxprTracer) for x in operands):
        return
    error = TransformationError(
        f"async_emb {operation} was called outside of jax.jit: call by call, XLA works on copies of the table, but an "
        "update in place needs the one buffer of the program"
    )
    error.add_note(
        f"Call {operation} inside of jax.jit, with the table donated (donate_argnums). AsyncEmbedding.lookup and "
        "train_step do that for you. (jax.disable_jit makes every call one outside of jax.jit.)"
    )
    raise error


def _refused(operation: str, transformation: str, what: str) -> TransformationError:
    if transformation == "vmap":
        route = "give it the whole batch in one call: ids of any shape are looked up at once"
    else:
        route = _SUPPORTED_ROUTE.get(operation, _OTHER_ROUTE)
    return TransformationError(f"async_emb {operation} cannot be {what}: {route}")


def _refuse_jvp(primals: Any, tangents: Any, *, operation: str) -> Any:
    raise _refused(operation, "jvp", "differentiated (jax.grad, jax.jvp, jax.jacfwd, jax.jacrev)")


def _refuse_batching(args: Any, dims: Any, *, operation: str) -> Any:
    raise _refused(operation, "vmap", "mapped with jax.vmap")


def _require_one_shard(context: mlir.LoweringRuleContext, *operands: Any, operation: str) -> Any:
    # Inside of shard_map this is another kind of context, which counts no devices.
    devices = getattr(context.module_context.axis_context, "num_devices", 1)
    if devices > 1:
        error = ContextError(
            f"async_emb {operation} was called outside of jax.shard_map in a program for {devices} devices: XLA would "
            "gather sharded operands and hand the whole arrays to every device"
        )
        error.add_note(
            "Call it inside jax.shard_map over the handle's mesh, or call its form for global arrays, in "
            "jax_bridge.global_ops."
        )
        raise error
    return operands


# An identity in the program, gone when it is lowered.
_refuse_p = Primitive("async_emb_operands")
_refuse_p.multiple_results = True
_refuse_p.def_impl(lambda *args, operation: list(args))
_refuse_p.def_abstract_eval(lambda *avals, operation: list(avals))
ad.primitive_jvps[_refuse_p] = _refuse_jvp
batching.primitive_batchers[_refuse_p] = _refuse_batching
mlir.register_lowering(_refuse_p, _require_one_shard, cacheable=False)


def shape_of(x: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of ``x``, without what it varies over."""
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if dtype is None else dtype)
