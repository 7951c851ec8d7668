"""Host arrays onto a mesh and back, whichever processes the mesh spans.

Over several processes every one of them makes the same calls with the same host arrays, and each device takes its part.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def spans_processes(mesh: Mesh) -> bool:
    """Whether some device of the mesh is another process's."""
    here = jax.process_index()
    return any(device.process_index != here for device in mesh.devices.flat)


def put(x: Any, sharding: Sharding) -> Any:
    """A host array, the same in every process, or an array that is on the mesh already, sharded as asked."""
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(x: Any) -> np.ndarray[Any, Any]:
    """The whole of an array, on every process that has a part of it; all of these must call this, in the same order. A
    copy, bit for bit, of what is in memory now."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.array(jax.device_get(_not_read_before(x)))
    replicated = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.asarray(_replicate(x, replicated))
    # As integers: on its way between processes XLA turns bfloat16 into float32 and back, which changes NaNs. Two
    # programs, or it would move the one conversion past the other.
    return np.asarray(_replicate(_bits(x), replicated)).view(x.dtype)


def _not_read_before(x: Any) -> Any:
    """``x``, without the host copy that JAX keeps of an array once it was read: torch may have written to it since
    (``dlpack.view``)."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])


@jax.jit
def _bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@functools.partial(jax.jit, static_argnums=1)
def _replicate(x: Any, replicated: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(x, replicated)
