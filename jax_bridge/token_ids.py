"""Token ids as a user gives them, made into what the native calls take. Nothing wraps around."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import IdError

_INT32 = np.iinfo(np.int32)
# Bad ids that a message lists.
_SHOWN = 5


def as_integers(token_ids: Any, table: str) -> Any:
    """``token_ids`` as an integer array: a jax array as it is, everything else as a NumPy array of its own.

    A host array is copied, because its owner may write the next batch into it while this one is still being read.

    Raises:
        IdError: they are not integers.
    """
    ids: Any = token_ids if isinstance(token_ids, jax.Array) else np.array(token_ids)
    if ids.size == 0 and not isinstance(ids, jax.Array):
        return ids.astype(np.int32)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise IdError(f"async_emb {table!r}: token ids are {ids.dtype.name}, but must be integers")
    if isinstance(ids, np.ndarray):
        return ids.astype(ids.dtype.newbyteorder("="), copy=False)
    return ids


def require_in_table(ids: np.ndarray[Any, Any], *, table: str, rows: int, padding_id: int | None) -> None:
    """Raises IdError where ids are neither in [0, rows) nor ``padding_id``: how many, and where the first ones are."""
    bad = (ids < 0) | (ids >= rows)
    if padding_id is not None:
        bad &= ids != padding_id
    positions = np.flatnonzero(bad)
    if not len(positions):
        return
    first = [(int(ids.reshape(-1)[position]), int(position)) for position in positions[:_SHOWN]]
    outside = f"outside of the table's rows [0, {rows})"
    if len(positions) == 1:
        ((bad_id, position),) = first
        message = f"token id {bad_id} at position {position} is {outside}"
    else:
        shown = ", ".join(f"{bad_id} at position {position}" for bad_id, position in first)
        more = f", and {len(positions) - _SHOWN} more" if len(positions) > _SHOWN else ""
        message = f"{len(positions)} of {ids.size} token ids are {outside}: {shown}{more}"
    error = IdError(f"async_emb {table!r}: {message}")
    error.add_note(advice_on_ids(ids.reshape(-1)[positions].tolist(), padding_id))
    raise error


def advice_on_ids(bad: Iterable[int], padding_id: int | None) -> str:
    """What to do about ids outside of a table."""
    if padding_id is None and -1 in bad:
        return (
            "If -1 is padding here, make the table with padding_id=-1: it reads zeros and is never trained. Otherwise "
            "fix the ids, or choose id_policy='drop' or 'clamp'."
        )
    return "Fix the ids, or choose id_policy='drop' or 'clamp', or name it as padding_id."


def as_int32(ids: Any) -> Any:
    """Integers as int32; int64 stays where x64 is on. What int32 cannot hold becomes an id that no table has."""
    if ids.dtype == np.int32 or (ids.dtype == np.int64 and jax.config.read("jax_enable_x64")):
        return ids
    numpy: Any = jnp if isinstance(ids, jax.Array) else np
    if ids.dtype.itemsize >= 4:
        ids = numpy.minimum(ids, ids.dtype.type(_INT32.max))
        if ids.dtype.kind == "i":
            ids = numpy.maximum(ids, ids.dtype.type(_INT32.min))
    return ids.astype(np.int32)
