"""A tensor over several devices: whether a sharding can split it, and into which parts."""

from __future__ import annotations

from typing import Any

import jax

from .errors import Problem, show


def spread_problem(what: str, shape: tuple[int, ...], sharding: Any) -> Problem | None:
    """Why a tensor cannot be spread as ``sharding`` says, or None.

    Args:
        what: the tensor, for messages.
    """
    where = f"async_emb adopt: sharding={show(sharding)}"
    if not isinstance(sharding, jax.sharding.Sharding):
        message = f"{where} is a {type(sharding).__name__}, but must be a jax.sharding.Sharding"
        advice = "NamedSharding(mesh, PartitionSpec('data')) spreads it, SingleDeviceSharding(device) places it."
        return Problem(message, (advice,), wrong_type=True)
    spec = getattr(sharding, "spec", ())
    if len(spec) > len(shape):
        message = f"{where} is for {len(spec)} dimensions, but {what} has {len(shape)}"
        return Problem(message, ("A PartitionSpec has at most one entry for each dimension.",))
    try:
        devices = sharding.device_set
    except ValueError:  # of a mesh without devices
        advice = "Make the mesh of devices: jax.sharding.Mesh(jax.devices(), ('data',))."
        return Problem(f"{where} has no devices, only their outline", (advice,))
    try:
        sharding.shard_shape(shape)
    except ValueError:
        message = f"{where} does not divide {what} evenly"
        advice = "Fill it up to a multiple of the devices along each dimension that is split, or leave sharding out."
        return Problem(message, (advice,))
    kinds = {device.default_memory().kind for device in devices}  # type: ignore[attr-defined]
    if sharding.memory_kind not in {None, *kinds}:
        message = f"{where} wants memory of the kind {sharding.memory_kind!r}, but the tensor is in {sorted(kinds)}"
        return Problem(message, ("Leave memory_kind out; jax.device_put moves an array to another kind.",))
    return None


def parts_of(tensor: Any, sharding: jax.sharding.Sharding) -> list[tuple[jax.Device, Any]]:
    """Each device of this process and its part of the tensor, which shares the memory."""
    return [(device, tensor[index]) for device, index in sharding.addressable_devices_indices_map(tensor.shape).items()]
