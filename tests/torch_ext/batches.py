"""Random batches, and the way between torch tensors and NumPy arrays that keeps every bit."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BIT_TYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NUMPY_TYPES = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same elements; bfloat16 too."""
    if tensor.dtype in BIT_TYPES:
        return tensor.contiguous().view(BIT_TYPES[tensor.dtype]).numpy().view(NUMPY_TYPES[tensor.dtype])
    return tensor.numpy()


def bits(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """Bit patterns, so that a comparison sees -0 and the payload of NaN."""
    array = to_numpy(values) if isinstance(values, torch.Tensor) else np.ascontiguousarray(values)
    return array.view(f"i{array.dtype.itemsize}")


def assert_same_bits(actual: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray) -> None:
    np.testing.assert_array_equal(bits(actual), bits(expected))


@dataclass(frozen=True)
class Batch:
    """table, grads: [rows or tokens, width]; row_state, last_step: [rows]; ids: [tokens], -1 in places."""

    table: torch.Tensor
    row_state: torch.Tensor
    last_step: torch.Tensor
    ids: torch.Tensor
    grads: torch.Tensor


def make_batch(
    *,
    rows: int = 50,
    width: int = 12,
    tokens: int = 300,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Batch:
    """A batch in which some rows occur often, some once, some never, and a few tokens have no row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ids = (torch.rand(tokens, generator=generator) ** 3 * rows).to(torch.int32)
    ids[torch.rand(tokens, generator=generator) < 0.05] = -1
    return Batch(
        table=normal(rows, width).to(dtype),
        row_state=torch.rand(rows, generator=generator),
        last_step=torch.randint(0, 90, (rows,), generator=generator, dtype=torch.int32),
        ids=ids,
        grads=normal(tokens, width).to(grad_dtype or dtype),
    )
