"""What torch must know of the operators beside their kernels: shapes and dtypes of the results, and gradients.

Fake kernels are for torch.compile and torch.export; the real kernels check the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


# ---- fake kernels


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    torch._check(table.dim() == 2, lambda: f"gather_rows: table must have the shape [rows, width], got {table.shape}")
    return table.new_empty((*ids.shape, table.shape[1]))


def unique_ids(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    distinct = context.new_dynamic_size(min=0)
    kept = context.new_dynamic_size(min=0)
    return (
        ids.new_empty((distinct,), dtype=torch.int32),
        ids.new_empty((distinct + 1,), dtype=torch.int32),
        ids.new_empty((kept,), dtype=torch.int32),
    )


def segment_sum(grads: Tensor, offsets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(grads.dim() == 2, lambda: f"segment_sum: grads must have the shape [tokens, width], got {grads.shape}")
    distinct = offsets.shape[0] - 1
    sums = grads.new_empty((distinct, grads.shape[1]), dtype=torch.float32)
    return sums, grads.new_empty((distinct,), dtype=torch.float32)


def gradient_norm(statistics: Tensor) -> Tensor:
    return statistics.new_empty((), dtype=torch.float32)


def rowwise_adagrad_(table: Tensor, *arguments: object, **numbers: object) -> None:
    torch._check(table.dim() == 2, lambda: f"rowwise_adagrad_: table must be [rows, width], got {table.shape}")


def rowwise_adagrad_lazy_(table: Tensor, *arguments: object, **numbers: object) -> None:
    torch._check(table.dim() == 2, lambda: f"rowwise_adagrad_lazy_: table must be [rows, width], got {table.shape}")


FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        gather_rows,
        unique_ids,
        segment_sum,
        gradient_norm,
        rowwise_adagrad_,
        rowwise_adagrad_lazy_,
    )
}


# ---- the gradient of gather_rows


def keep_ids(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    table, ids = inputs
    ctx.save_for_backward(ids)
    ctx.shape = table.shape


def gradient_of_gather_rows(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (ids,) = ctx.saved_tensors
    rows = grad.reshape(-1, ctx.shape[1])
    ids = ids.reshape(-1).long()
    keep = ids >= 0  # -1 reads zeros, which do not depend on the table
    gradient = torch.sparse_coo_tensor(ids[keep][None], rows[keep], ctx.shape, check_invariants=False)
    return gradient, None
