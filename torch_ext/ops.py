"""Building blocks of an embedding table as torch operators, on the kernels that the JAX side uses too.

One exact training step on one device:

    rows = gather_rows(table, ids)
    ...                                        # forward and backward, giving grads [tokens, width]
    unique, offsets, positions = unique_ids(ids)
    sums, statistics = segment_sum(grads, offsets, positions)
    rowwise_adagrad_(table, row_state, unique, sums, statistics, learning_rate=0.05, eps=1e-8)

The operators are ``torch.ops.async_emb.*``; the functions here only document them. They work under ``torch.compile``
and ``torch.export``, and give the same bits for any number of threads. ``gather_rows`` is differentiable in the table:
its gradient is sparse (COO, one row for each id), as that of ``torch.nn.functional.embedding(..., sparse=True)``.

Everywhere, the id -1 stands for "no row": it reads zeros and its gradient goes nowhere. Any other id outside of the
table raises IndexError, with the id, its position and the number of rows. A wrong dtype raises TypeError, a wrong shape
ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_ext._load import load

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather_rows", "gradient_norm", "rowwise_adagrad_", "rowwise_adagrad_lazy_", "segment_sum", "unique_ids"]

load()
_ops = torch.ops.async_emb


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Looks rows up: ``out[i] = table[ids[i]]``, bit for bit.

    Args:
      table: [rows, width], float32, bfloat16 or float16, contiguous.
      ids: any shape, int32 or int64, contiguous.

    Returns:
      [*ids.shape, width], the dtype of ``table``. Differentiable in ``table``, with a sparse gradient.
    """
    return _ops.gather_rows(table, ids)


def unique_ids(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the distinct ids of a batch and where each occurs.

    Args:
      ids: any shape, int32 or int64, contiguous; at most 2147483646.

    Returns:
      unique: [U], int32, ascending.
      offsets: [U + 1], int32, from 0 ascending.
      positions: [P], int32: ``unique[u]`` occurs at ``positions[offsets[u]:offsets[u + 1]]`` of the flattened ids,
        ascending. P is the number of ids that are not -1.
    """
    return _ops.unique_ids(ids)


def segment_sum(grads: Tensor, offsets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the gradient rows of each distinct id, in one canonical order.

    Args:
      grads: [tokens, width], float32, bfloat16 or float16, contiguous: one row for each of the flattened ids.
      offsets, positions: from ``unique_ids``.

    Returns:
      sums: [U, width], float32. Blocks of 32 occurrences in token order, then the block sums in order.
      statistics: [U], float32: the sum of squares of each row of ``sums``, as a dyadic tree over the columns.
    """
    return _ops.segment_sum(grads, offsets, positions)


def gradient_norm(statistics: Tensor) -> Tensor:
    """The norm of the whole gradient: the root of the dyadic sum of ``statistics``.

    Args:
      statistics: [U], float32, from ``segment_sum``.

    Returns:
      [], float32; 0 where there are no rows.
    """
    return _ops.gradient_norm(statistics)


def rowwise_adagrad_(
    table: Tensor,
    row_state: Tensor,
    unique: Tensor,
    sums: Tensor,
    statistics: Tensor,
    *,
    learning_rate: float,
    eps: float,
    decay_factor: float = 1.0,
    weight_decay_factor: float = 1.0,
    max_grad_norm: float | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int | None = None,
    rounding_step: int | None = None,
) -> None:
    """Updates rows in place by row-wise Adagrad, every operation rounded to float32.

    For each row u with a statistic other than 0, where D is the width::

        a <- a * decay_factor + statistic / D
        w <- round(w * weight_decay_factor - learning_rate / (sqrt(a) + eps) * sum)

    Other rows keep their bits. So does everything if the norm of the gradient is not finite: compare ``gradient_norm``.

    Args:
      table: [rows, width], float32, bfloat16 or float16, contiguous; updated. float16 saturates at 65504.
      row_state: [rows], float32; updated.
      unique: [U], int32, ascending.
      sums: [U, width], float32.
      statistics: [U], float32.
      max_grad_norm: scales the gradient down to this norm where it is larger.
      rounding: how weights are rounded to the dtype of ``table``. "stochastic" draws from a generator that is keyed by
        (``seed``, ``rounding_step``, row, column), both in [0, 2^32): the same arguments give the same bits.
    """
    _ops.rowwise_adagrad_(
        table,
        row_state,
        unique,
        sums,
        statistics,
        learning_rate=learning_rate,
        eps=eps,
        decay_factor=decay_factor,
        weight_decay_factor=weight_decay_factor,
        max_grad_norm=max_grad_norm,
        rounding=rounding,
        seed=seed,
        rounding_step=rounding_step,
    )


def rowwise_adagrad_lazy_(
    table: Tensor,
    row_state: Tensor,
    last_step: Tensor,
    unique: Tensor,
    sums: Tensor,
    statistics: Tensor,
    *,
    step: int,
    learning_rate: float,
    eps: float,
    accum_decay_rate: float,
    weight_decay_rate: float,
    max_grad_norm: float | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int | None = None,
    rounding_step: int | None = None,
) -> None:
    """``rowwise_adagrad_`` with decays that follow the steps since a row was last touched.

    For each touched row, with ``elapsed = max(0, step - last_step)``::

        decay_factor = exp(-accum_decay_rate * elapsed)
        weight_decay_factor = exp(-weight_decay_rate * elapsed)
        last_step <- step

    Args:
      last_step: [rows], int32; updated.
      step: the number of this step, in [0, 2^31).
      accum_decay_rate, weight_decay_rate: per step.
      others: as in ``rowwise_adagrad_``.
    """
    _ops.rowwise_adagrad_lazy_(
        table,
        row_state,
        last_step,
        unique,
        sums,
        statistics,
        step=step,
        learning_rate=learning_rate,
        eps=eps,
        accum_decay_rate=accum_decay_rate,
        weight_decay_rate=weight_decay_rate,
        max_grad_norm=max_grad_norm,
        rounding=rounding,
        seed=seed,
        rounding_step=rounding_step,
    )


# Fake kernels: shapes and dtypes of the results, for torch.compile and torch.export. The real kernels check the values.


@torch.library.register_fake("async_emb::gather_rows")
def _(table: Tensor, ids: Tensor) -> Tensor:
    torch._check(table.dim() == 2, lambda: f"gather_rows: table must have the shape [rows, width], got {table.shape}")
    return table.new_empty((*ids.shape, table.shape[1]))


def _keep_ids(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    table, ids = inputs
    ctx.save_for_backward(ids)
    ctx.shape = table.shape


def _gradient_rows(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (ids,) = ctx.saved_tensors
    rows = grad.reshape(-1, ctx.shape[1])
    ids = ids.reshape(-1).long()
    keep = ids >= 0  # -1 reads zeros, which do not depend on the table
    gradient = torch.sparse_coo_tensor(ids[keep][None], rows[keep], ctx.shape, check_invariants=False)
    return gradient, None


torch.library.register_autograd("async_emb::gather_rows", _gradient_rows, setup_context=_keep_ids)


@torch.library.register_fake("async_emb::unique_ids")
def _(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    distinct = context.new_dynamic_size(min=0)
    kept = context.new_dynamic_size(min=0)
    return (
        ids.new_empty((distinct,), dtype=torch.int32),
        ids.new_empty((distinct + 1,), dtype=torch.int32),
        ids.new_empty((kept,), dtype=torch.int32),
    )


@torch.library.register_fake("async_emb::segment_sum")
def _(grads: Tensor, offsets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(grads.dim() == 2, lambda: f"segment_sum: grads must have the shape [tokens, width], got {grads.shape}")
    distinct = offsets.shape[0] - 1
    sums = grads.new_empty((distinct, grads.shape[1]), dtype=torch.float32)
    return sums, grads.new_empty((distinct,), dtype=torch.float32)


@torch.library.register_fake("async_emb::gradient_norm")
def _(statistics: Tensor) -> Tensor:
    return statistics.new_empty((), dtype=torch.float32)


@torch.library.register_fake("async_emb::rowwise_adagrad_")
def _(table: Tensor, *arguments: object, **numbers: object) -> None:
    torch._check(table.dim() == 2, lambda: f"rowwise_adagrad_: table must be [rows, width], got {table.shape}")


@torch.library.register_fake("async_emb::rowwise_adagrad_lazy_")
def _(table: Tensor, *arguments: object, **numbers: object) -> None:
    torch._check(table.dim() == 2, lambda: f"rowwise_adagrad_lazy_: table must be [rows, width], got {table.shape}")
