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

from torch_ext import operator_rules

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather_rows", "gradient_norm", "rowwise_adagrad_", "rowwise_adagrad_lazy_", "segment_sum", "unique_ids"]

_ops = torch.ops.async_emb


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Looks rows up: ``out[i] = table[ids[i]]``, bit for bit.

    Args:
      table: [rows, width], float32, bfloat16 or float16, contiguous.
      ids: any shape, int32 or int64, contiguous.

    Returns:
      [*ids.shape, width], the dtype of ``table``. Differentiable in ``table``, with a sparse gradient.

    Raises RuntimeError inside of transformations that differentiate a function (``torch.func.grad``, ``jvp``,
    ``jacfwd``) and in forward mode: torch would have no gradient for it, or take it for zero. ``torch.func.vmap``
    works.
    """
    if not torch.compiler.is_compiling():
        _require_no_transformation("gather_rows", table)
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


def register_rules() -> None:
    """Gives torch the fake kernels and gradients. The loader calls this, once the native module has defined the
    operators; the module names this file as the place where torch finds them."""
    for name, fake in operator_rules.FAKE_KERNELS.items():
        torch.library.register_fake(f"async_emb::{name}", fake)
    torch.library.register_autograd(
        "async_emb::gather_rows", operator_rules.gradient_of_gather_rows, setup_context=operator_rules.keep_ids
    )


def _require_no_transformation(operator: str, table: Tensor) -> None:
    """Refuses what torch would answer with zeros, or with words that name none of our functions."""
    functorch: Any = torch._C._functorch
    differentiates = functorch.is_gradtrackingtensor(table)
    if not differentiates and torch.autograd.forward_ad.unpack_dual(table).tangent is None:
        return
    raise RuntimeError(
        f"torch_ext.{operator}: table is being differentiated by torch.func (grad, jvp, jacfwd, jacrev) or in forward "
        "mode, which this operator has no rule for; use backward() or torch.autograd.grad, and let torch.func "
        "transform a function of the rows that it returned"
    )
