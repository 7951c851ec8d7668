"""Order between calls and dense compute.

XLA orders by data alone. A pin is data that a call returns, a gate is data that a call waits for; ``depend`` makes any
array wait for a pin. It is an identity on an aliased buffer: no copy, no change of a bit (``x + 0 * pin`` would lose
-0.0 and NaN payloads), and unlike ``lax.optimization_barrier`` it is still there when the program runs.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .errors import ContextError
from .ffi import as_varying, call, shape_of, varies

Tree = TypeVar("Tree")


def depend(x: Tree, pin: Any, *, axes: tuple[Any, ...] = ()) -> Tree:
    """``x``, which is not used before ``pin`` is there. Differentiable: the gradient passes unchanged.

    Args:
        x: an array or a tree of arrays, of any shape and dtype.
        pin: what to wait for: a pin, or any other array.
        axes: mesh axes over which the results shall vary besides those that ``x`` varies over.
    """
    pin = lax.stop_gradient(pin)
    return jax.tree.map(lambda leaf: _depend_leaf(as_varying(jnp.asarray(leaf), axes), pin), x)


@jax.custom_jvp
def _depend_leaf(x: Any, pin: Any) -> Any:
    before = varies(x)
    everything = tuple(before | varies(pin))
    (out,) = call(
        "async_emb_depend",
        "depend",
        [x, pin],
        [shape_of(x)],
        axes=everything,
        replicated=(0,),
        aliases={0: 0},
        side_effect=False,
    )
    return as_varying(out, tuple(before))


@_depend_leaf.defjvp
def _depend_leaf_jvp(primals: Any, tangents: Any) -> Any:
    return _depend_leaf(*primals), tangents[0]


def mark(x: Any, label: str, *, mesh: Mesh | None = None, spec: PartitionSpec | None = None) -> Any:
    """``x``, and an event ``label`` in the recorded timeline, on each device, when ``x`` has been computed there.

    Differentiable: the gradient passes unchanged, and without an event of its own.

    Args:
        x: an array of any shape and dtype: a shard inside of ``jax.shard_map``, a global array with ``mesh``.
        label: the event's name.
        mesh, spec: how a global array lies on its mesh. Give both, or neither.
    """
    if (mesh is None) != (spec is None):
        raise ContextError("async_emb mark: mesh and spec go together; give both or neither")
    if mesh is None:
        return _mark(x, label)
    return jax.shard_map(lambda x: _mark(x, label), mesh=mesh, in_specs=spec, out_specs=spec)(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _mark(x: Any, label: str) -> Any:
    before = varies(x)
    (out,) = call(
        "async_emb_mark",
        "mark",
        [x],
        [shape_of(x)],
        axes=tuple(before),
        replicated=(0,),
        aliases={0: 0},
        attrs={"label": label},
    )
    return as_varying(out, tuple(before))


@_mark.defjvp
def _mark_jvp(label: str, primals: Any, tangents: Any) -> Any:
    return _mark(*primals, label), tangents[0]
