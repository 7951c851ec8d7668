"""Batches of a training step: their token ids, checked, placed and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from torch_ext.common.batches import with_next as with_next

from .. import global_ops
from ..embedding import AsyncEmbedding
from ..errors import ContextError, PipelineError
from ..placing import put

Tables = Mapping[str, AsyncEmbedding]
Ids = dict[str, Any]


def checked_ids(tables: Tables, ids: Any) -> Ids:
    """What ``ids_of`` gave, as int32 arrays (host arrays stay on the host) that the ranks can share evenly.

    Raises:
        ContextError: other tables, or a shape that cannot be sharded.
        IdError: see ``AsyncEmbedding.prepare_ids``.
    """
    if not isinstance(ids, Mapping) or set(ids) != set(tables):
        given = sorted(ids) if isinstance(ids, Mapping) else type(ids).__name__
        raise ContextError(f"async_emb: ids_of gave {given}, but the tables are {sorted(tables)}")
    checked = {name: table.prepare_ids(ids[name]) for name, table in tables.items()}
    for name, x in checked.items():
        handle = tables[name].smallest_handle()
        if x.size == 0:
            error = ContextError(
                f"async_emb {handle.name!r}: the batch is empty: its token ids have shape {list(x.shape)}, but a step "
                f"needs at least one token on each of the {handle.group_size} ranks"
            )
            error.add_note(
                "Leave an empty batch out of the loop: a mean over it is NaN, and there is nothing to learn from it. "
                "Where only this table has no ids in the batch, give it ids that are padding_id."
            )
            raise error
        if x.ndim == 0 or x.shape[0] % handle.group_size:
            raise ContextError(
                f"async_emb {handle.name!r}: token ids have shape {list(x.shape)}, but need a first dimension that is "
                f"a multiple of the {handle.group_size} ranks: pad the batch, with padding_id for the ids"
            )
    return checked


def place(tables: Tables, ids: Ids) -> Ids:
    """The ids on the mesh, sharded as tokens are."""
    placed = {}
    for name, x in ids.items():
        handle = tables[name].smallest_handle()
        placed[name] = put(x, NamedSharding(handle.mesh, global_ops.token_spec(handle)))
    return placed


class IdleIds:
    """What to look up where no batch was announced: ids that count as nothing special, placed once for each shape."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._placed: dict[tuple[tuple[int, ...], ...], Ids] = {}

    def like(self, ids: Ids) -> Ids:
        """Shaped as ``ids``."""
        shapes = tuple(ids[name].shape for name in sorted(ids))
        if shapes not in self._placed:
            rows = {name: int(table.padding_id == 0 and table.rows > 1) for name, table in self._tables.items()}
            idle = {name: np.full(x.shape, rows[name], x.dtype) for name, x in ids.items()}
            self._placed[shapes] = place(self._tables, idle)
        return self._placed[shapes]


def sizes_of(ids: Ids) -> tuple[int, ...]:
    """Tokens by table, in the order of the tables' names."""
    return tuple(int(ids[name].size) for name in sorted(ids))


def require_announced(tables: Tables, announced: Ids, given: Ids, step: Any) -> None:
    """Refuses another batch than the one that was announced, of the same sizes, where both have their ids on the host.

    Others are compared on the devices; that refusal comes too late to keep the step from running.
    """
    for name, wanted in announced.items():
        if not isinstance(wanted, np.ndarray) or not isinstance(given[name], np.ndarray):
            continue
        wanted, got = wanted.reshape(-1), given[name].reshape(-1)
        differing = np.flatnonzero(wanted != got)
        if len(differing):
            position = int(differing[0])
            raise PipelineError(
                f"async_emb {tables[name].name!r}: the call with state.step={int(step)} was given another batch than "
                "the call before has announced as upcoming and begun to look up: token id "
                f"{got[position]} instead of {wanted[position]} "
                f"at position {position}. Nothing has run: pass the batch that was announced, or flush, and go on with "
                "any batch"
            )


def require_same_sizes(tables: Tables, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Refuses a batch of other sizes while a step is under way."""
    if before != after:
        was, becomes = (dict(zip(sorted(tables), sizes, strict=True)) for sizes in (before, after))
        raise PipelineError(
            f"async_emb: batches of {was} tokens cannot be followed by one of {becomes} without a flush: with "
            "staleness 1 a step works on two batches. Pass upcoming=None and flush before the size changes, or pad the "
            "batch, with padding_id for the ids"
        )
