"""How the devices of a mesh lie on nodes (machines), as far as their processes tell: a process runs on one node."""

from __future__ import annotations

from typing import Any

import numpy as np


def processes_in_order(mesh: Any) -> list[int]:
    """The process of each device, in the order of the mesh."""
    return [device.process_index for device in np.asarray(mesh.devices).flat]


def split_process(processes: list[int], per_node: int) -> tuple[int, int, int] | None:
    """(process, position, position) of the first two devices of one process that would lie on two nodes, where each
    node has ``per_node`` devices that follow each other in the mesh. None where there are none, or is one process."""
    if len(set(processes)) == 1:
        return None
    first: dict[int, int] = {}
    for position, process in enumerate(processes):
        start = first.setdefault(process, position)
        if start // per_node != position // per_node:
            return process, start, position
    return None


def node_sizes(mesh: Any) -> list[int]:
    """Devices per node that fit the mesh: divisors of its size that split no process. The whole mesh always does."""
    processes = processes_in_order(mesh)
    sizes = [size for size in range(1, len(processes) + 1) if len(processes) % size == 0]
    return [size for size in sizes if split_process(processes, size) is None]
