"""An exponential made of plain multiplies and adds, so that every device and NumPy give the same bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .formats import CANONICAL_NAN

_OVERFLOW = np.float32(88.72283)
_UNDERFLOW = np.float32(-103.97208)
_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts: the first has so few bits that n * _LN2_HIGH is exact for every n that occurs.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


def exp32(x: ArrayLike) -> NDArray[np.float32]:
    """e to the power of x, float32 in and out, any shape.

    Source: `expf` of the Cephes library (S. Moshier, single/expf.c): x = n ln 2 + r, a polynomial of degree 7 in r,
    times 2^n. The scale is applied as two exact powers of two, one after the other, so that n = 128 does not overflow
    early and a denormal result is rounded once.

    NaN gives the canonical NaN, x > 88.72283 gives +inf, x < -103.97208 gives 0.
    """
    x = np.asarray(x, dtype=np.float32)
    with np.errstate(all="ignore"):
        inside = (x <= _OVERFLOW) & (x >= _UNDERFLOW)
        z = np.where(inside, x, np.float32(0))
        n = np.floor(z * _LOG2_E + np.float32(0.5))
        r = (z - n * _LN2_HIGH) - n * _LN2_LOW
        p = np.full_like(r, _COEFFICIENTS[0])
        for coefficient in _COEFFICIENTS[1:]:
            p = p * r + coefficient
        y = (p * (r * r) + r) + np.float32(1)
        exponent = n.astype(np.int32)
        half = exponent >> 1
        y = (y * _power_of_two(half)) * _power_of_two(exponent - half)
        y = np.where(x > _OVERFLOW, np.float32(np.inf), np.where(x < _UNDERFLOW, np.float32(0), y))
        return np.where(np.isnan(x), CANONICAL_NAN, y).astype(np.float32)


def _power_of_two(exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    """2^exponent as float32, written as bits: exact, for -126 <= exponent <= 127."""
    return ((exponent.astype(np.int32) + 127) << 23).astype(np.int32).view(np.float32)
