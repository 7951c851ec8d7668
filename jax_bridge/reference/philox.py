"""The counter-based generator behind stochastic rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Philox4x32-10: four random words for each counter and key.

    Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        counter: uint32 `[..., 4]`.
        key: uint32 `[..., 2]`, broadcast against the counter's leading axes.

    Returns:
        uint32 `[..., 4]`.

    Raises:
        ValueError: the last axes are not 4 and 2 long, or the leading axes do not broadcast.
    """
    counter = np.asarray(counter, dtype=np.uint32)
    key = np.asarray(key, dtype=np.uint32)
    if counter.shape[-1:] != (4,) or key.shape[-1:] != (2,):
        raise ValueError(
            f"philox4x32 takes counters [..., 4] and keys [..., 2], got shapes {counter.shape} and {key.shape}"
        )
    shape = np.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    # One element arrays at least: integer arrays wrap in silence, NumPy's integer scalars warn.
    c0, c1, c2, c3 = (np.broadcast_to(counter[..., i], shape).reshape(-1) for i in range(4))
    k0, k1 = (np.broadcast_to(key[..., i], shape).reshape(-1) for i in range(2))
    for round_number in range(_ROUNDS):
        if round_number:
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return np.stack([c0, c1, c2, c3], axis=-1).reshape(*shape, 4)


def _multiply(word: NDArray[np.uint32], multiplier: np.uint64) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    product = word.astype(np.uint64) * multiplier
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)
