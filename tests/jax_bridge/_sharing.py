"""What tests of memory that torch and JAX share have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from jax_bridge import dlpack, loans

WIDE = tuple(dlpack.NARROWED)  # dtypes that JAX has with x64 only


@contextlib.contextmanager
def x64(name: str) -> Iterator[None]:
    """With x64 where the dtype of this name needs it."""
    jax.config.update("jax_enable_x64", name in WIDE)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def bits_of(name: str) -> np.ndarray[Any, Any]:
    """64 elements of a dtype with many bit patterns, NaNs and infinities among them, as bytes."""
    size = np.dtype(jax.numpy.dtype(name)).itemsize
    patterns = np.random.default_rng(size).integers(0, 256, 64 * size, np.uint8)
    return patterns & 1 if name == "bool" else patterns


def tensor_of(name: str) -> torch.Tensor:
    return torch.from_numpy(bits_of(name)).clone().view(getattr(torch, name))


def bytes_of(x: Any) -> bytes:
    if isinstance(x, torch.Tensor):
        return x.contiguous().view(torch.uint8).numpy().tobytes()
    return np.asarray(x).tobytes()


def address_of(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def addresses_of(array: jax.Array) -> list[int]:
    return [address for address, _ in loans.blocks_of(array)]


def notes(error: Any) -> str:
    return "\n".join(getattr(error.value, "__notes__", ()))
