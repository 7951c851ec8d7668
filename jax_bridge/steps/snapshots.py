"""Snapshots: everything that a resume needs, as host arrays that know nothing of the layout.

In the middle of the asynchronous schedule that is more than tables and parameters: gradients are staged for the next
update, and a lookup is armed. A snapshot holds the gradients, and the ids of the lookup; whoever restores
looks those up again, in the same table, and gets the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..context import AsyncEmbContextHandle
from ..embedding import AsyncEmbedding, TableState, with_dtype
from ..global_ops import token_spec
from ..placing import fetch, put, spans_processes
from ..runtime import is_open, native, open_context


class StagedUpdate(TypedDict):
    """Gradient rows that wait for the next update: ids int32 [tokens] (-1 trains nothing), grads [tokens, width], and
    pending, bool []."""

    ids: np.ndarray[Any, Any]
    grads: np.ndarray[Any, Any]
    pending: np.ndarray[Any, Any]


class TableSnapshot(TypedDict):
    """weights [rows, width], and the optimizer's arrays."""

    weights: np.ndarray[Any, Any]
    optimizer: dict[str, np.ndarray[Any, Any]]


class Snapshot(TypedDict):
    """A tree of host arrays. ``staged`` is empty and ``armed`` None where nothing is under way."""

    params: Any
    opt_state: Any
    step: np.ndarray[Any, Any]
    tables: dict[str, TableSnapshot]
    staged: dict[str, StagedUpdate]
    armed: dict[str, np.ndarray[Any, Any]] | None


def take(
    tables: Mapping[str, AsyncEmbedding],
    handles: Mapping[str, AsyncEmbContextHandle],
    state: Any,
    armed: Mapping[str, Any] | None,
) -> Snapshot:
    """The snapshot of a state at rest."""
    host: Any = lambda tree: jax.tree.map(fetch, tree)  # noqa: E731
    saved: dict[str, TableSnapshot] = {}
    for name, table in tables.items():
        weights, optimizer = table.to_arrays(state.tables[name])
        saved[name] = {"weights": weights, "optimizer": optimizer}
    return {
        "params": host(state.params),
        "opt_state": host(state.opt_state),
        "step": fetch(state.step),
        "tables": saved,
        "staged": {name: _on_host(update, handles[name]) for name, update in staged_on_mesh(handles).items()},
        "armed": None if armed is None else host(dict(armed)),
    }


def tables_of(tables: Mapping[str, AsyncEmbedding], snapshot: Snapshot) -> dict[str, TableState]:
    """The tables of a snapshot, placed on their meshes."""
    return {
        name: table.from_arrays(snapshot["tables"][name]["weights"], snapshot["tables"][name]["optimizer"])
        for name, table in tables.items()
    }


def staged_of(handles: Mapping[str, AsyncEmbContextHandle]) -> dict[str, StagedUpdate]:
    """The staged gradients of those contexts that have some. Nothing may be running."""
    found = {name: _staged(handle) for name, handle in handles.items()}
    return {name: _on_host(update, handles[name]) for name, update in found.items() if update is not None}


def staged_on_mesh(handles: Mapping[str, AsyncEmbContextHandle]) -> dict[str, dict[str, Any]]:
    """The staged gradients of every table, or of none: a table without gets some that train nothing.

    As in ``StagedUpdate``, but gradient rows are as wide as the handle's; over several processes ids and gradients are
    on the mesh, sharded as tokens are. Nothing may be running."""
    found = {name: _staged(handle) for name, handle in handles.items()}
    if all(update is None for update in found.values()):
        return {}
    return {name: _nothing_staged(handles[name]) if update is None else update for name, update in found.items()}


def restore_staged(handles: Mapping[str, AsyncEmbContextHandle], staged: Mapping[str, StagedUpdate]) -> None:
    """Hands staged gradients to their contexts, which must be idle."""
    for name, update in staged.items():
        handle = handles[name]
        grads = with_dtype(update["grads"], handle.dtype)
        padded = np.pad(grads, ((0, 0), (0, handle.emb_width - handle.logical_width)))
        open_context(handle)
        ids = np.ascontiguousarray(update["ids"], dtype=np.int32)
        native().restore_staged(handle.context_id, ids.tobytes(), padded.tobytes(), bool(update["pending"]))


def _on_host(update: Mapping[str, Any], handle: AsyncEmbContextHandle) -> StagedUpdate:
    ids, grads, pending = (fetch(update[key]) for key in ("ids", "grads", "pending"))
    return {"ids": ids, "grads": grads[:, : handle.logical_width].copy(), "pending": pending}


def _staged(handle: AsyncEmbContextHandle) -> dict[str, Any] | None:
    groups = native().staged(handle.context_id) if is_open(handle) else None
    shape = (handle.group_size, handle.tokens_per_rank)
    ids = np.full(shape, -1, np.int32)
    grads = np.zeros((*shape, handle.emb_width), handle.dtype)
    pending = np.zeros(handle.group_size, bool)
    found = np.zeros(handle.group_size, bool)
    for blocks, staged in zip(_local_blocks(handle), groups or [], strict=False):
        if staged is None:
            continue
        block_ids, block_grads, all_pending = staged
        ids[blocks] = np.frombuffer(block_ids, np.int32).reshape(-1, shape[1])
        grads[blocks] = np.frombuffer(block_grads, handle.dtype).reshape(-1, *grads.shape[1:])
        pending[blocks], found[blocks] = all_pending, True
    tokens = {"ids": ids.reshape(-1), "grads": grads.reshape(handle.tokens_per_batch, -1)}
    if spans_processes(handle.mesh):
        sharding = NamedSharding(handle.mesh, token_spec(handle))
        pending, found = (fetch(put(x, sharding)) for x in (pending, found))
        if found.all():
            tokens = {key: put(x, sharding) for key, x in tokens.items()}
    return {**tokens, "pending": np.array(bool(pending.all()))} if found.all() else None


def _local_blocks(handle: AsyncEmbContextHandle) -> list[list[int]]:
    """For each group that has a rank in this process: the blocks of the token array that are here, ascending."""
    here = {device.id for device in handle.mesh.devices.flat if device.process_index == jax.process_index()}
    size = handle.group_size
    groups = [handle.flatten_replicas[first : first + size] for first in range(0, len(handle.flatten_replicas), size)]
    blocks = [
        sorted(block for block, device in zip(handle.token_blocks, group, strict=True) if device in here)
        for group in groups
    ]
    return [local for local in blocks if local]


def _nothing_staged(handle: AsyncEmbContextHandle) -> dict[str, Any]:
    return {
        "ids": np.full(handle.tokens_per_batch, -1, np.int32),
        "grads": np.zeros((handle.tokens_per_batch, handle.emb_width), handle.dtype),
        "pending": np.array(False),
    }
