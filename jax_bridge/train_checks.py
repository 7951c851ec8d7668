"""What ``train_step`` asks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from .embedding import AsyncEmbedding
from .errors import ContextError, PipelineError


def check_arguments(
    tables: Mapping[str, AsyncEmbedding],
    loss_fn: Any,
    optimizer: Any,
    ids_of: Any,
    staleness: int,
    microbatches: int,
    donate: bool,
) -> None:
    """Raises ContextError for a configuration that cannot work."""
    if not tables:
        raise ContextError("async_emb train_step: tables is empty; give at least one AsyncEmbedding")
    if wrong := {name: type(table).__name__ for name, table in tables.items() if not isinstance(table, AsyncEmbedding)}:
        raise ContextError(f"async_emb train_step: tables must be AsyncEmbedding, but are {wrong}")
    if not callable(loss_fn) or not callable(ids_of):
        raise ContextError("async_emb train_step: loss_fn and ids_of must be functions")
    if not callable(getattr(optimizer, "update", None)):
        raise ContextError(
            f"async_emb train_step: optimizer={optimizer!r} has no update: give an optax optimizer, for the dense "
            "parameters (a table's own optimizer is given to its AsyncEmbedding)"
        )
    if staleness not in (0, 1) or isinstance(staleness, bool):
        raise ContextError(f"async_emb train_step: staleness={staleness!r} must be 0 or 1")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ContextError(f"async_emb train_step: microbatches={microbatches!r} must be an integer of at least 1")
    if staleness == 1 and not donate:
        raise ContextError(
            "async_emb train_step: staleness=1 needs donate=True (donate_argnums of jax.jit). Lookup and update of a "
            "step work on one buffer over two calls; without donation XLA would put a copy of the table between them"
        )
    if len({table.mesh for table in tables.values()}) > 1:
        raise ContextError(f"async_emb train_step: the tables {sorted(tables)} are on different meshes; use one")
    handles = {name: table.smallest_handle() for name, table in tables.items()}
    if len({(handle.table_axis, handle.data_axis) for handle in handles.values()}) > 1:
        axes = {name: (handle.table_axis, handle.data_axis) for name, handle in handles.items()}
        raise ContextError(
            f"async_emb train_step: the tables lie on different axes (table_axis, data_axis): {axes}; use the same"
        )
    names = [table.name for table in tables.values()]
    if len(set(names)) < len(names):
        raise ContextError(f"async_emb train_step: table names {names} repeat; contexts are told apart by name")


def require_usable(state: Any, *batches: Any, staleness: int) -> None:
    """Refuses a state that a step has taken already, and a step with staleness 1 inside of another program."""
    leaves = jax.tree.leaves(state)
    if any(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in leaves):
        raise PipelineError(
            "async_emb: this state was given to a step before, which has taken its buffers (donate=True). Go on from "
            "the state that the last call returned, or, where that call was interrupted, from a snapshot or init"
        )
    if len({id(x) for x in leaves}) < len(leaves):
        names = [jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(state)]
        first, again = next(
            (names[i], names[j]) for j in range(len(leaves)) for i in range(j) if leaves[i] is leaves[j]
        )
        raise PipelineError(
            f"async_emb: state{first} and state{again} are one array, but a step works on each in place. Copy one of "
            "them with jnp.copy"
        )
    if staleness and any(isinstance(x, jax.core.Tracer) for x in [*leaves, *jax.tree.leaves(batches)]):
        raise PipelineError(
            "async_emb: a step with staleness 1 was called inside of jax.jit, jax.lax.scan or another transformation. "
            "It is compiled already, and keeps on the host what is under way between two calls: call it directly. For "
            "a compiled loop use step.program, whose parts are pure"
        )
