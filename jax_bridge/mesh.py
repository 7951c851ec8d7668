"""How the ranks of a table lie on a mesh.

The communicator of a table is the set of devices along its table axes. A rank is the row-major position over the
table axes in the order given, so `("data", "table")` and `("table", "data")` number the same devices differently.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_ext.common.batches import pad_width as pad_width

from .errors import raise_problems
from .validation.axes import AxisNames, communicator_problems, mesh_problems, read_axes
from .validation.mesh_outline import MeshOutline

if TYPE_CHECKING:
    from jax.sharding import Mesh


def replica_groups(mesh: Mesh | MeshOutline, axes: AxisNames) -> tuple[int, tuple[int, ...]]:
    """The communicators along `axes`: the devices that differ in nothing but their position on these axes.

    Args:
        mesh: a mesh with devices.
        axes: one axis name, or a tuple or list of several.

    Returns:
        `(group_size, flatten_replicas)`. group_size is the product of the axes' sizes. flatten_replicas holds the
        device ids of every group in rank order, groups in mesh order (row-major over the other axes), concatenated:
        `flatten_replicas[group * group_size + rank]`.

    Raises:
        ContextError: an axis is unknown, repeated, missing or of a wrong type, or the mesh has no devices.
    """
    names = _checked_axes(mesh, "axes", axes)
    group_size = math.prod(mesh.shape[name] for name in names)
    positions = [mesh.axis_names.index(name) for name in names]
    others = [position for position in range(mesh.devices.ndim) if position not in positions]
    in_group_order = mesh.devices.transpose(others + positions)
    return group_size, tuple(int(device.id) for device in in_group_order.flat)


def token_blocks(mesh: Mesh, table_axis: AxisNames, data_axis: AxisNames) -> tuple[int, ...]:
    """For each rank, the index of the block of the global token array that it holds.

    An array sharded by `P(data_axis)` is cut into blocks numbered row-major over the data axes in *their* order, which
    need not be the order of the table axes. `np.argsort(token_blocks(...))` lists the ranks in the order of the global
    array.

    Returns:
        A permutation of `range(group_size)`, one entry a rank.

    Raises:
        ContextError: as `replica_groups`; also where a table axis is missing from `data_axis`, or a data axis of size
            above 1 is outside `table_axis`, so that ranks and blocks do not match one to one.
    """
    table_names = _checked_axes(mesh, "table_axis", table_axis)
    data_names = _checked_axes(mesh, "data_axis", data_axis)
    if problems := communicator_problems(mesh.shape, table_names, data_names):
        raise_problems(problems)
    table_sizes = [mesh.shape[name] for name in table_names]
    block_of_position = np.arange(math.prod(table_sizes)).reshape(
        [mesh.shape[name] for name in data_names if name in table_names]
    )
    shared = [name for name in data_names if name in table_names]  # Other data axes have size 1: they move nothing.
    in_rank_order = block_of_position.transpose([shared.index(name) for name in table_names])
    return tuple(int(block) for block in in_rank_order.flat)


def _checked_axes(mesh: Mesh | MeshOutline, argument: str, value: AxisNames) -> Sequence[Hashable]:
    if problems := mesh_problems(mesh):
        raise_problems(problems)
    reading = read_axes(mesh, argument, value)
    if problems := (*reading.problems, *reading.unknown):
        raise_problems(problems)
    return reading.names
