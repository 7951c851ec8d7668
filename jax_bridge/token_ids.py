"""Token ids as a user gives them, made into what the native calls take. Nothing wraps around."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import IdError

_INT32 = np.iinfo(np.int32)


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
    """Raises IdError for the first id that is neither in [0, rows) nor ``padding_id``."""
    bad = (ids < 0) | (ids >= rows)
    if padding_id is not None:
        bad &= ids != padding_id
    if not bad.any():
        return
    position = int(np.argmax(bad))
    error = IdError(
        f"async_emb {table!r}: token id {int(ids.reshape(-1)[position])} at position {position} is outside of the "
        f"table's rows [0, {rows})"
    )
    error.add_note("Fix the ids, or choose id_policy='drop' or 'clamp', or name it as padding_id.")
    raise error


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
