"""The fused update: row-wise Adagrad, with decay at every touch or made up for lazily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .exponential import exp32
from .formats import ROUNDINGS, canonical, round_to, table_dtype, to_fp32
from .sums import global_norm, row_statistics, segment_sum
from .tokens import UniqueIds, cleaned_ids, unique_ids

_INT32_MAX = 2**31 - 1
# From the touched rows' numbers to their (state decay, weight decay) factors: float32, one for all or one a row.
_Factors = Callable[[NDArray[np.int64]], tuple[Any, Any]]


class AdagradUpdate(NamedTuple):
    """Result of `rowwise_adagrad_update`.

    Attributes:
        table: `[rows, width]`, new, in the old table's dtype.
        row_state: float32 `[rows]`, new.
        norm: float32, the gradient norm before clipping, whether or not the update was applied.
        valid: whether it was applied.
        saturated: stored values that float16 could not hold.
    """

    table: NDArray[Any]
    row_state: NDArray[np.float32]
    norm: np.float32
    valid: bool
    saturated: int


class LazyAdagradUpdate(NamedTuple):
    """Result of `rowwise_adagrad_lazy_update`: as `AdagradUpdate`, with the new `last_step`, int32 `[rows]`."""

    table: NDArray[Any]
    row_state: NDArray[np.float32]
    last_step: NDArray[np.int32]
    norm: np.float32
    valid: bool
    saturated: int


def rowwise_adagrad_update(
    table: ArrayLike,
    row_state: ArrayLike,
    ids: ArrayLike | UniqueIds,
    grads: ArrayLike,
    *,
    learning_rate: float,
    eps: float,
    decay_factor: float,
    weight_decay_factor: float = 1.0,
    pending: bool | int = True,
    max_grad_norm: float | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    rounding_step: int | None = None,
    num_unique: int | None = None,
    logical_width: int | None = None,
) -> AdagradUpdate:
    """One step of row-wise Adagrad: Adagrad (J. Duchi et al., JMLR 2011) with one accumulator a row.

    For each id u of the batch, G the sum of its gradient rows, ss the sum of squares of G, D the logical width:

        norm = sqrt(sum of ss); c = min(1, max_grad_norm / norm); G = G c; ss = (ss c) c
        a = a decay_factor + ss / D;  s = learning_rate / (sqrt(a) + eps), or 0 where that denominator is 0
        w = round(w weight_decay_factor - s G)

    Every operation is rounded to float32 and w once more at the store. Nothing changes, in any row, unless the norm and
    every number of the rule are finite, learning_rate, eps and decay_factor are not negative, and pending is not 0. A
    row whose (clipped) ss is 0 keeps its bits, and so do rows outside the batch and padding columns. Without clipping,
    and where max_grad_norm / norm is 0 / 0, c is 1.

    Args:
        table: `[rows, width]`, float32, bfloat16 or float16.
        row_state: float32 `[rows]`.
        ids: the tokens' cleaned ids, any shape with N elements, negative for none; or the index made from them.
        grads: `[N, width]`, one of the same three dtypes.
        learning_rate, eps, decay_factor, weight_decay_factor: rounded to float32 before use.
        pending: 0 skips the update.
        max_grad_norm: the norm to clip to, at least 0, or None.
        rounding, seed, rounding_step: as in `round_to`.
        num_unique: how many unique ids fit; the largest ids beyond it are dropped, as ids outside the table are.
        logical_width: columns of a row that are not padding, the first ones; all by default.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: shapes do not fit each other, an id lies beyond the table, or an option is out of range.
    """
    table, row_state = _owned(table), _owned(row_state)
    norm, valid, saturated, _ = update_in_place(
        table,
        row_state,
        ids,
        grads,
        lambda touched: (np.float32(decay_factor), np.float32(weight_decay_factor)),
        sound=_all_sound(decay_factor, abs(weight_decay_factor)),
        learning_rate=learning_rate,
        eps=eps,
        pending=pending,
        max_grad_norm=max_grad_norm,
        rounding=rounding,
        seed=seed,
        rounding_step=rounding_step,
        num_unique=num_unique,
        logical_width=logical_width,
    )
    return AdagradUpdate(table, row_state, norm, valid, saturated)


def rowwise_adagrad_lazy_update(
    table: ArrayLike,
    row_state: ArrayLike,
    last_step: ArrayLike,
    step: int,
    ids: ArrayLike | UniqueIds,
    grads: ArrayLike,
    *,
    learning_rate: float,
    eps: float,
    accum_decay_rate: float,
    weight_decay_rate: float,
    pending: bool | int = True,
    max_grad_norm: float | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    rounding_step: int | None = None,
    num_unique: int | None = None,
    logical_width: int | None = None,
) -> LazyAdagradUpdate:
    """`rowwise_adagrad_update` whose decay covers the steps since a row was last touched.

    With delta = max(0, step - last_step), as an int32 (saturating) and then as float32:

        decay_factor = exp32(-(accum_decay_rate delta));  weight_decay_factor = exp32(-(weight_decay_rate delta))

    and last_step = step afterwards, in touched rows only. Neither rate may be negative, or nothing changes.

    Args:
        last_step: int32 `[rows]`.
        step: the number of this step, an int32.
        accum_decay_rate, weight_decay_rate: a step, rounded to float32 before use.
        The others: as in `rowwise_adagrad_update`.

    Raises:
        TypeError, ValueError: as `rowwise_adagrad_update`; also for last_step and step.
    """
    table, row_state, last_step = _owned(table), _owned(row_state), _owned(last_step)
    norm, valid, saturated, touched = update_in_place(
        table,
        row_state,
        ids,
        grads,
        lazy_factors(last_step, step, accum_decay_rate, weight_decay_rate, table.shape[:1]),
        sound=_all_sound(accum_decay_rate, weight_decay_rate),
        learning_rate=learning_rate,
        eps=eps,
        pending=pending,
        max_grad_norm=max_grad_norm,
        rounding=rounding,
        seed=seed,
        rounding_step=rounding_step,
        num_unique=num_unique,
        logical_width=logical_width,
    )
    last_step[touched] = step
    return LazyAdagradUpdate(table, row_state, last_step, norm, valid, saturated)


def lazy_factors(
    last_step: NDArray[np.int32],
    step: int,
    accum_decay_rate: float,
    weight_decay_rate: float,
    shape: tuple[int, ...],
) -> _Factors:
    """The two decay factors of a row as a function of the rows, see `rowwise_adagrad_lazy_update`."""
    if last_step.dtype != np.int32:
        raise TypeError(f"last_step is int32, got {last_step.dtype}")
    if last_step.shape != shape:
        raise ValueError(f"last_step is [rows] = {shape}, got shape {last_step.shape}")
    if not -_INT32_MAX - 1 <= step <= _INT32_MAX:
        raise ValueError(f"step={step} is not an int32")

    def factors(touched: NDArray[np.int64]) -> tuple[Any, Any]:
        elapsed = np.clip(int(step) - last_step[touched].astype(np.int64), 0, _INT32_MAX)
        delta = elapsed.astype(np.int32).astype(np.float32)
        return exp32(-(np.float32(accum_decay_rate) * delta)), exp32(-(np.float32(weight_decay_rate) * delta))

    return factors


def update_in_place(
    table: NDArray[Any],
    row_state: NDArray[np.float32],
    ids: ArrayLike | UniqueIds,
    grads: ArrayLike,
    factors: _Factors,
    *,
    sound: bool,
    learning_rate: float,
    eps: float,
    pending: bool | int,
    max_grad_norm: float | None,
    rounding: str,
    seed: int | None,
    rounding_step: int | None,
    num_unique: int | None,
    logical_width: int | None,
) -> tuple[np.float32, bool, int, NDArray[np.int64]]:
    """The rule itself. Returns norm, valid, saturated, and the rows that it wrote: none unless the decays' numbers are
    ``sound``, and the others too."""
    width = table.shape[-1] if logical_width is None else logical_width
    index = _checked_index(table, row_state, ids, grads, width, max_grad_norm, rounding, num_unique)
    summed = segment_sum(grads, index)[:, :width]
    statistics = row_statistics(summed)
    norm = global_norm(statistics)
    if not (np.isfinite(norm) and pending and sound and _all_sound(learning_rate, eps)):
        return norm, False, 0, np.zeros(0, np.int64)
    with np.errstate(all="ignore"):
        if max_grad_norm is not None:
            ratio = np.float32(max_grad_norm) / norm
            clip = ratio if ratio < 1 else np.float32(1)
            summed = summed * clip
            statistics = (statistics * clip) * clip
        nonzero = statistics != 0
        touched = index.unique[nonzero].astype(np.int64)
        summed, statistics = summed[nonzero], statistics[nonzero]

        decay, weight_decay = factors(touched)
        accumulator = to_fp32(row_state[touched]) * decay + statistics / np.float32(width)
        denominator = np.sqrt(accumulator) + np.float32(eps)
        scale = np.where(denominator == 0, np.float32(0), np.float32(learning_rate) / denominator)
        weights = to_fp32(table[touched, :width])
        weights = weights * np.reshape(weight_decay, (-1, 1)) - scale[:, None] * summed
    stored, saturated = round_to(weights, table.dtype, rounding, seed=seed, rounding_step=rounding_step, rows=touched)
    table[touched, :width] = stored
    row_state[touched] = canonical(accumulator)
    return norm, True, saturated, touched


def _all_sound(*numbers: float) -> bool:
    """Whether numbers of a rule are finite and not negative, once they are float32."""
    with np.errstate(over="ignore"):
        narrow = np.array(numbers, np.float32)
    return bool(np.isfinite(narrow).all() and (narrow >= 0).all())


def _checked_index(
    table: NDArray[Any],
    row_state: NDArray[np.float32],
    ids: ArrayLike | UniqueIds,
    grads: ArrayLike,
    width: int,
    max_grad_norm: float | None,
    rounding: str,
    num_unique: int | None,
) -> UniqueIds:
    grads = np.asarray(grads)
    table_dtype(table.dtype)
    table_dtype(grads.dtype)
    if row_state.dtype != np.float32:
        raise TypeError(f"row_state is float32, got {row_state.dtype}")
    if table.ndim != 2 or row_state.shape != table.shape[:1]:
        raise ValueError(
            f"a table [rows, width] needs row_state [rows], got shapes {table.shape} and {row_state.shape}"
        )
    if not 1 <= width <= table.shape[1]:
        raise ValueError(f"logical_width={width} is not in [1, {table.shape[1]}], the width of the table")
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} is not a number >= 0; None turns clipping off")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {', '.join(ROUNDINGS)}")
    if num_unique is not None and num_unique < 1:
        raise ValueError(f"num_unique={num_unique} is not positive")
    if isinstance(ids, UniqueIds):
        index = ids
        cleaned_ids(index.unique, table.shape[0])
        expected: tuple[int, ...] = (grads.shape[0] if grads.ndim else 0, table.shape[1])
    else:
        cleaned = cleaned_ids(ids, table.shape[0])
        index = unique_ids(cleaned)
        expected = (len(cleaned), table.shape[1])
    if grads.shape != expected:
        raise ValueError(f"gradient rows are [tokens, width] = {expected}, got shape {grads.shape}")
    return index if num_unique is None else index.first(num_unique)


def _owned(values: ArrayLike) -> NDArray[Any]:
    return np.array(values, order="C", copy=True)
