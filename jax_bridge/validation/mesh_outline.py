"""A mesh as the rules see it: sizes of axes, and devices by number and process. For machines that are not there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class OutlineDevice(NamedTuple):
    """A device that nobody has: what the rules ask of one."""

    id: int
    process_index: int
    platform: str = "cpu"


class MeshOutline:
    """What ``jax.sharding.Mesh`` would be of devices that are numbered in row-major order, as many in each process.

    Args:
        shape: axis sizes by name, in the order of the mesh; not negative.
        processes: divides the number of devices.
    """

    def __init__(self, shape: Mapping[str, int], processes: int = 1) -> None:
        self.shape: dict[Any, int] = dict(shape)
        self.axis_names: tuple[Any, ...] = tuple(shape)
        count = math.prod(shape.values())
        if processes < 1 or count % processes:
            raise ValueError(f"{count} devices do not lie evenly on {processes} processes")
        devices = np.empty(count, dtype=object)
        for number in range(count):
            devices[number] = OutlineDevice(number, number * processes // count)
        self.devices = devices.reshape(tuple(shape.values()))

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{name!r}: {size}' for name, size in self.shape.items())})"
