"""float32, bfloat16 and float16: exact widening, and the one rounding at the store."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .philox import philox4x32

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

CANONICAL_NAN = np.array(0x7FC00000, np.uint32).view(np.float32)[()]
ROUNDINGS = ("nearest", "stochastic")

_BFLOAT16_NAN = np.uint16(0x7FC0)
_FLOAT16_NAN = np.uint16(0x7E00)
_FLOAT16_MAX = np.uint16(0x7BFF)  # 65504
_FLOAT16_INFINITY = 0x7C00
_SIGN16 = np.uint16(0x8000)
_PHILOX_KEY = 0x61656D62  # "aemb"


def table_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype as a NumPy dtype, if tables and gradients may have it. Raises TypeError otherwise."""
    dtype = np.dtype(dtype)
    if dtype not in (FLOAT32, BFLOAT16, FLOAT16):
        raise TypeError(f"tables and gradients are float32, bfloat16 or float16, got {dtype}")
    return dtype


def as_bits(values: NDArray[Any]) -> NDArray[Any]:
    """The values' bits, as an array of unsigned integers of the same shape. A view where the layout allows one."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def canonical(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x with every NaN replaced by 0x7fc00000."""
    return np.where(np.isnan(x), CANONICAL_NAN, x).astype(np.float32)


def to_fp32(values: ArrayLike) -> NDArray[np.float32]:
    """Widens float32, bfloat16 or float16 of any shape to float32: exact, a NaN becomes 0x7fc00000.

    Raises:
        TypeError: another dtype.
    """
    values = np.asarray(values)
    dtype = table_dtype(values.dtype)
    if dtype == BFLOAT16:
        wide = (as_bits(values).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    else:
        wide = values.astype(np.float32)
    return canonical(wide)


def round_to(
    x: ArrayLike,
    dtype: DTypeLike,
    rounding: str = "nearest",
    *,
    seed: int | None = None,
    rounding_step: int | None = None,
    rows: ArrayLike | None = None,
    columns: ArrayLike | None = None,
) -> tuple[NDArray[Any], int]:
    """Rounds float32 values to a table's dtype, and counts the values that had to be saturated.

    `nearest` is to nearest even. `stochastic` adds random bits below the last bit that is kept and cuts: of the two
    neighbours, the far one is taken in proportion to the distance from the near one. The random bits of one element
    depend on (seed, row, column, rounding_step) only: Philox4x32-10 with key (seed, 0x61656d62) and counter (row,
    column / 4, rounding_step, 0) gives four words, for four neighbouring columns. At most 31 random bits are used, so a
    probability is a multiple of 2^-31, rounded down: towards float16, a value below 2^-55 becomes 0.

    NaN becomes the canonical NaN of the dtype. float16 saturates to +-65504, infinities too, and counts it; bfloat16
    overflows to infinity as IEEE 754 says. Infinities are rounded as in `nearest`. float32 is stored as it is.

    Args:
        x: float32, any shape; `[n, c]` when stochastic.
        dtype: float32, bfloat16 or float16.
        rounding: "nearest" or "stochastic".
        seed, rounding_step: taken modulo 2^32. Needed when stochastic.
        rows: `[n]`, the rows' numbers in the table. Needed when stochastic.
        columns: `[c]`, the columns' numbers in the whole logical row; 0 .. c-1 by default.

    Returns:
        The values in `dtype`, of x's shape, and the number of saturated ones.

    Raises:
        TypeError: x is not float32, or dtype is not a table's dtype.
        ValueError: unknown rounding, or arguments that stochastic rounding needs are missing or have the wrong shape.
    """
    x = np.asarray(x)
    dtype = table_dtype(dtype)
    if x.dtype != FLOAT32:
        raise TypeError(f"round_to takes float32 values, got {x.dtype}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {', '.join(ROUNDINGS)}")
    noise = None
    if rounding == "stochastic":
        if seed is None or rounding_step is None:
            raise ValueError(
                f"stochastic rounding needs a seed and a rounding_step, got seed={seed}, rounding_step={rounding_step}"
            )
        if x.ndim != 2 or rows is None:
            raise ValueError(f"stochastic rounding needs values [n, c] and their row numbers, got shape {x.shape}")
        if dtype != FLOAT32:
            noise = _noise(x.shape, seed, rounding_step, rows, np.arange(x.shape[1]) if columns is None else columns)
    if dtype == FLOAT32:
        return canonical(x), 0
    if dtype == BFLOAT16:
        return _to_bfloat16(x, noise), 0
    return _to_float16(x, noise)


def _noise(
    shape: tuple[int, ...], seed: int, rounding_step: int, rows: ArrayLike, columns: ArrayLike
) -> NDArray[np.uint32]:
    """One random word for each element of `[n, c]`."""
    rows = np.asarray(rows).astype(np.uint32)
    columns = np.asarray(columns).astype(np.uint32)
    if (rows.shape, columns.shape) != ((shape[0],), (shape[1],)):
        raise ValueError(f"values {shape} need rows [n] and columns [c], got shapes {rows.shape} and {columns.shape}")
    quads, quad_of_column = np.unique(columns // np.uint32(4), return_inverse=True)
    counter = np.zeros((len(rows), len(quads), 4), np.uint32)
    counter[:, :, 0] = rows[:, None]
    counter[:, :, 1] = quads[None, :]
    counter[:, :, 2] = int(rounding_step) & 0xFFFFFFFF
    words = philox4x32(counter, np.array([int(seed) & 0xFFFFFFFF, _PHILOX_KEY], np.uint32))
    return words[:, quad_of_column.reshape(-1), columns % np.uint32(4)]


def _to_bfloat16(x: NDArray[np.float32], noise: NDArray[np.uint32] | None) -> NDArray[Any]:
    bits = as_bits(x).reshape(x.shape).astype(np.uint64)
    rounded = bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
    if noise is not None:
        rounded = np.where(np.isfinite(x), bits + (noise >> np.uint32(16)), rounded)
    stored = (rounded >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), _BFLOAT16_NAN, stored).astype(np.uint16).view(BFLOAT16)


def _to_float16(x: NDArray[np.float32], noise: NDArray[np.uint32] | None) -> tuple[NDArray[Any], int]:
    with np.errstate(all="ignore"):
        magnitude = as_bits(np.abs(x).astype(FLOAT16)).reshape(x.shape)
    if noise is not None:
        magnitude = np.where(np.isfinite(x), _stochastic_float16_magnitude(x, noise), magnitude)
    saturated = (magnitude >= _FLOAT16_INFINITY) & ~np.isnan(x)
    magnitude = np.where(saturated, _FLOAT16_MAX, magnitude).astype(np.uint16)
    signed = np.where(np.signbit(x), magnitude | _SIGN16, magnitude)
    values = np.where(np.isnan(x), _FLOAT16_NAN, signed).astype(np.uint16).view(FLOAT16)
    return values, int(np.count_nonzero(saturated))


def _stochastic_float16_magnitude(x: NDArray[np.float32], noise: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """float16 magnitude bits before saturation.

    The significand m (24 bits) loses its s lowest bits: 13, or more where the result is a float16 denormal. Adding the
    quotient to the shifted exponent lets its implicit bit, and a carry, add to the exponent.
    """
    bits = as_bits(x).reshape(x.shape)
    field = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int64)
    fraction = (bits & np.uint32(0x7FFFFF)).astype(np.uint64)
    significand = np.where(field > 0, fraction | np.uint64(1 << 23), fraction)
    exponent = np.maximum(field, 1)
    shift = np.where(exponent >= 113, 13, 13 + 113 - exponent)
    # There are 32 random bits: of more dropped bits than 31 the lowest are cut first.
    cut = np.clip(shift - 31, 0, 24).astype(np.uint64)
    dropped = np.minimum(shift, 31).astype(np.uint64)
    below = noise.astype(np.uint64) >> (np.uint64(32) - dropped)
    quotient: NDArray[np.uint64] = ((significand >> cut) + below) >> dropped
    rebased: NDArray[np.uint64] = np.maximum(exponent - 113, 0).astype(np.uint64) << np.uint64(10)
    return np.add(quotient, rebased, dtype=np.uint64)
