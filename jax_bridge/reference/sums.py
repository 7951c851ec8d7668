"""Sums whose order is part of the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .formats import canonical, to_fp32
from .tokens import UniqueIds

SEGMENT_BLOCK = 32


def segment_sum(grads: ArrayLike, index: UniqueIds) -> NDArray[np.float32]:
    """Sums the gradient rows of each unique id in float32, in the canonical order.

    Occurrences in token order are cut into blocks of 32; each block is summed first to last, then the block sums first
    to last. A sum starts from its first element. An id without occurrences gets zeros.

    Args:
        grads: `[tokens, width]`, float32, bfloat16 or float16. Rows of tokens outside the index are not read.
        index: of u ids over those tokens.

    Returns:
        float32 `[u, width]`, NaNs canonical.

    Raises:
        TypeError: another dtype.
        ValueError: grads is not of rank 2 or has too few rows for the index.
    """
    grads = np.asarray(grads)
    if grads.ndim != 2:
        raise ValueError(f"gradient rows are [tokens, width], got shape {grads.shape}")
    if len(index.positions) and index.positions.max() >= grads.shape[0]:
        raise ValueError(f"the ids have a token at position {index.positions.max()}, but there are {len(grads)} rows")
    occurrences = to_fp32(grads[index.positions])
    counts = np.diff(index.offsets)
    blocks = -(-counts // SEGMENT_BLOCK)
    first_block = np.cumsum(blocks) - blocks
    segment = np.repeat(np.arange(len(counts)), blocks)
    starts = index.offsets[segment] + SEGMENT_BLOCK * (np.arange(len(segment)) - first_block[segment])
    lengths = np.minimum(SEGMENT_BLOCK, index.offsets[segment + 1] - starts)
    return canonical(_sum_runs(_sum_runs(occurrences, starts, lengths), first_block, blocks))


def _sum_runs(rows: NDArray[np.float32], starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float32]:
    """Sums each run `rows[start : start + length]` first to last: addition j of all runs at once."""
    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    sums = np.zeros((len(starts), rows.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for j in range(int(lengths[0]) if len(lengths) else 0):
            active = int(np.searchsorted(-lengths, -j))  # runs with more than j rows
            addend = rows[starts[:active] + j]
            sums[:active] = sums[:active] + addend if j else addend
    result = np.empty_like(sums)
    result[longest_first] = sums
    return result


def dyadic_sum(values: ArrayLike) -> NDArray[np.float32]:
    """Sums the last axis as a binary tree over the index: neighbours first, missing leaves are +0.

    The nodes are the aligned blocks of 2^k leaves, so a cut into aligned blocks and a tree over their sums gives the
    same bits, however the blocks are spread over ranks. Values are meant to be non-negative (adding +0 then changes
    nothing).

    Args:
        values: float32 `[..., n]`; n may be 0, which gives 0.

    Returns:
        float32 `[...]`, NaNs canonical.
    """
    level = to_fp32(values)
    if level.shape[-1] == 0:
        return np.zeros(level.shape[:-1], np.float32)
    with np.errstate(all="ignore"):
        while level.shape[-1] > 1:
            if level.shape[-1] % 2:
                level = np.concatenate([level, np.zeros((*level.shape[:-1], 1), np.float32)], axis=-1)
            level = level[..., 0::2] + level[..., 1::2]
    return canonical(level[..., 0])


def row_statistics(summed: ArrayLike, logical_width: int | None = None) -> NDArray[np.float32]:
    """`ss = sum of squares` of each summed gradient row, a dyadic tree over the logical columns.

    Args:
        summed: float32 `[u, width]`, from `segment_sum`.
        logical_width: columns that count, the first ones; the rest is padding. All by default.

    Returns:
        float32 `[u]`.
    """
    summed = to_fp32(summed)
    logical = summed[:, : summed.shape[1] if logical_width is None else logical_width]
    with np.errstate(all="ignore"):
        return dyadic_sum(logical * logical)


def global_norm(statistics: ArrayLike) -> np.float32:
    """The gradient norm: square root of the dyadic sum of the row statistics, float32 `[u]` in ascending order of id.

    0 for no rows. NaN is canonical.
    """
    with np.errstate(all="ignore"):
        return np.float32(canonical(np.sqrt(dyadic_sum(statistics)))[()])
