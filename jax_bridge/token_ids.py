"""Token ids as a user gives them, made into what the native calls take. Nothing wraps around."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_ext.common.ids import advice_on_ids, require_in_table

from .errors import IdError

__all__ = ["advice_on_ids", "as_int32", "as_integers", "require_in_table"]

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
