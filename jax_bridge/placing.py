"""Host arrays onto a mesh and back, whichever processes the mesh spans.

Over several processes every one of them makes the same calls with the same host arrays, and each device takes its part.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding


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
    """The whole of an array, on every process; all of them must call this, in the same order. A copy."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.array(jax.device_get(x))
