"""Which process holds which ranks of a table."""

from __future__ import annotations

import functools

from jax.sharding import Mesh

from ..context import AsyncEmbContextHandle


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own a device of the mesh, ascending."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


@functools.lru_cache(maxsize=64)
def group_processes(handle: AsyncEmbContextHandle) -> tuple[tuple[int, ...], ...]:
    """For each group, its processes in the order of their first ranks: the peers of its transport, by number."""
    owner = _owners(handle.mesh)
    size = handle.group_size
    return tuple(
        tuple(dict.fromkeys(owner[device] for device in handle.flatten_replicas[start : start + size]))
        for start in range(0, len(handle.flatten_replicas), size)
    )


def ranks_of(handle: AsyncEmbContextHandle, process: int) -> dict[int, tuple[int, ...]]:
    """The ranks that ``process`` holds, by group; groups of which it holds none are left out."""
    owner = _owners(handle.mesh)
    held: dict[int, list[int]] = {}
    for position, device in enumerate(handle.flatten_replicas):
        if owner[device] == process:
            held.setdefault(position // handle.group_size, []).append(position % handle.group_size)
    return {group: tuple(ranks) for group, ranks in held.items()}


def describe_process(handle: AsyncEmbContextHandle, process: int) -> str:
    """For messages: "process 1 (ranks 2, 3; devices 2048, 2049)"."""
    held = ranks_of(handle, process)
    devices = [device for device in handle.flatten_replicas if _owners(handle.mesh)[device] == process]
    several_groups = len(handle.flatten_replicas) > handle.group_size
    ranks = "; ".join(
        f"rank{'s' if len(of_group) > 1 else ''} {_some(of_group)}" + (f" of group {group}" if several_groups else "")
        for group, of_group in list(held.items())[:4]
    )
    if not held:
        return f"process {process} (no rank)"
    return f"process {process} ({ranks}; device{'s' if len(devices) > 1 else ''} {_some(devices)})"


def describe_processes(handle: AsyncEmbContextHandle, processes: tuple[int, ...] | list[int]) -> str:
    """As `describe_process`, of several."""
    shown = ", ".join(describe_process(handle, process) for process in processes[:8])
    return shown if len(processes) <= 8 else f"{shown} and {len(processes) - 8} more"


@functools.lru_cache(maxsize=64)
def _owners(mesh: Mesh) -> dict[int, int]:
    return {int(device.id): int(device.process_index) for device in mesh.devices.flat}


def _some(numbers: list[int] | tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... {numbers[-1]}"
