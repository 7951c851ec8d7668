"""The oracle's numbers: exp32, the random generator, rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_bridge import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
DTYPES = (F32, BF16, F16)
CANONICAL = {F32: 0x7FC00000, BF16: 0x7FC0, F16: 0x7E00}


def bits(values):
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}")


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def floats(pattern):
    return np.asarray(pattern, np.uint32).view(np.float32)


def test_importing_it_needs_neither_jax_nor_torch():
    package = Path(reference.__file__).parent
    code = (
        "import sys, importlib.util\n"
        "sys.modules['jax'] = sys.modules['torch'] = None\n"
        f"spec = importlib.util.spec_from_file_location('oracle', {str(package / '__init__.py')!r},"
        f" submodule_search_locations=[{str(package)!r}])\n"
        "oracle = importlib.util.module_from_spec(spec)\n"
        "sys.modules['oracle'] = oracle\n"
        "spec.loader.exec_module(oracle)\n"
        "assert float(oracle.exp32(0.0)) == 1.0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def ulps(y):
    """The spacing of float32 at the exact values y, denormals included."""
    return np.maximum(2.0 ** (np.floor(np.log2(np.maximum(y, 1e-300))) - 23), 2.0**-149)


def test_exp32_is_within_an_ulp_of_exp_where_results_are_normal():
    x = np.linspace(-87.3, 88.72, 400_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(reference.exp32(x).astype(np.float64) - exact) / ulps(exact)) < 1.0


def test_exp32_keeps_denormal_results():
    x = np.linspace(-103.9, -87.4, 50_001, dtype=np.float32)
    y = reference.exp32(x)
    exact = np.exp(x.astype(np.float64))
    assert np.all(y > 0)
    assert np.max(np.abs(y.astype(np.float64) - exact) / ulps(exact)) < 1.0


def test_exp32_at_its_limits():
    x = np.array([0.0, -0.0, 88.73, np.inf, -103.98, -np.inf, np.nan, -np.nan], np.float32)
    expected = np.array([1, 1, np.inf, np.inf, 0, 0, np.nan, np.nan], np.float32)
    assert same_bits(reference.exp32(x), floats(np.where(np.isnan(x), 0x7FC00000, bits(expected))))


def test_exp32_of_a_scalar_is_exp32_of_the_array():
    x = np.linspace(-100, 88, 101, dtype=np.float32)
    assert same_bits([reference.exp32(v)[()] for v in x], reference.exp32(x))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # The known answers published with Random123.
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert reference.philox4x32(counter, key).tolist() == expected


def test_philox_works_on_arrays_as_on_single_counters():
    counters = np.random.default_rng(0).integers(0, 2**32, (3, 5, 4), dtype=np.uint32)
    together = reference.philox4x32(counters, [1, 2])
    assert together.shape == (3, 5, 4)
    assert np.array_equal(together[2, 3], reference.philox4x32(counters[2, 3], [1, 2]))


def float32_samples():
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # Every float16 and bfloat16, the ties between them, and their neighbours.
    near = []
    for dtype in (BF16, F16):
        exact = bits(np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32))
        near += [exact, exact + np.uint32(0x8000), exact + np.uint32(0x1000), exact + np.uint32(0x1001), exact - 1]
    return floats(np.concatenate([patterns, *near]))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_nearest_agrees_with_ml_dtypes_and_numpy(dtype):
    x = float32_samples()
    values, saturated = reference.round_to(x, dtype)
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    if dtype == F16:
        overflow = np.isinf(expected)
        assert saturated == np.count_nonzero(overflow)
        expected = np.where(overflow, np.copysign(np.float16(65504), expected), expected).astype(F16)
    else:
        assert saturated == 0
    nan = np.isnan(x)
    assert same_bits(values[~nan], expected[~nan])
    assert np.all(bits(values[nan]) == CANONICAL[dtype])


def test_float32_keeps_its_bits_and_gets_canonical_nans():
    x = float32_samples()
    values, saturated = reference.round_to(x, F32)
    nan = np.isnan(x)
    assert saturated == 0
    assert same_bits(values[~nan], x[~nan])
    assert np.all(bits(values[nan]) == CANONICAL[F32])
    stochastic, _ = reference.round_to(x[None], F32, "stochastic", seed=1, rounding_step=1, rows=[0])
    assert same_bits(stochastic[0], values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widening_is_exact_and_canonical(dtype):
    patterns = np.arange(2**16, dtype=np.uint16) if dtype != F32 else bits(float32_samples())
    values = patterns.view(dtype)
    wide = reference.to_fp32(values)
    nan = np.isnan(values.astype(np.float32))
    assert same_bits(wide[~nan], values.astype(np.float32)[~nan])
    assert np.all(bits(wide[nan]) == CANONICAL[F32])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_stochastic_rounding_takes_only_the_two_neighbours(dtype):
    x = float32_samples()
    x = x[np.isfinite(x) & (np.abs(x) < 6e4)].reshape(1, -1)
    x = np.concatenate([x, x])
    values, saturated = reference.round_to(x, dtype, "stochastic", seed=3, rounding_step=4, rows=[5, 2**31 - 2])
    wide = values.astype(np.float64)
    spacing = (
        np.spacing(np.abs(values)).astype(np.float64)
        if dtype == F16
        else np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 1e-300))) - 7), 2.0**-133)
    )
    exact = x.astype(dtype).astype(np.float32) == x
    assert saturated == 0
    assert np.all(np.abs(wide - x) <= spacing)  # equal only for values so small that the difference rounds
    assert np.all(np.signbit(wide) == np.signbit(x))
    assert same_bits(values[exact], x[exact].astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "low", "step"),
    [(BF16, 1.0, 2.0**-7), (F16, 1.0, 2.0**-10), (F16, 2.0**-20, 2.0**-24), (F16, 0.0, 2.0**-24), (F16, -8.0, 2.0**-8)],
)
@pytest.mark.parametrize("fraction", [0.125, 0.5, 0.8125])
def test_stochastic_rounding_is_unbiased(dtype, low, step, fraction):
    x = np.full((400, 100), low + fraction * step, np.float32)
    values, _ = reference.round_to(x, dtype, "stochastic", seed=7, rounding_step=1, rows=np.arange(400))
    wide = values.astype(np.float64)
    assert set(np.unique(wide)) == {low, low + step}
    assert abs(np.mean((wide - low) / step) - fraction) < 5 * np.sqrt(fraction * (1 - fraction) / x.size)


def test_stochastic_rounding_depends_on_row_column_seed_and_step_alone():
    x = np.random.default_rng(0).normal(size=(6, 11)).astype(np.float32)
    rows, columns = np.array([9, 4, 7, 1, 0, 30]), np.arange(11)

    def rounded(x, rows, columns, seed=1, step=2):
        return reference.round_to(x, BF16, "stochastic", seed=seed, rounding_step=step, rows=rows, columns=columns)[0]

    whole = rounded(x, rows, columns)
    assert same_bits(rounded(x[::-1, 3:8], rows[::-1], columns[3:8]), whole[::-1, 3:8])
    assert not same_bits(rounded(x, rows, columns, seed=2), whole)
    assert not same_bits(rounded(x, rows, columns, step=3), whole)
    assert not same_bits(rounded(x, rows + 1, columns), whole)
    assert same_bits(rounded(x, rows, columns, seed=1 + 2**32), whole)


def test_stochastic_rounding_of_bfloat16_uses_the_upper_half_of_a_philox_word():
    x = np.array([[1.0 + 2.0**-8]], np.float32)
    for column in range(5):
        word = reference.philox4x32([3, column // 4, 9, 0], [8, 0x61656D62])[column % 4]
        value, _ = reference.round_to(x, BF16, "stochastic", seed=8, rounding_step=9, rows=[3], columns=[column])
        assert value.astype(np.float32) == (1.0 + 2.0**-7 if (int(word) >> 16) >= 0x8000 else 1.0)


@pytest.mark.parametrize("exponent", [-25, -31, -32, -33, -40, -47, -55, -56, -100, -140])
def test_stochastic_rounding_of_tiny_float16_has_the_right_probability(exponent):
    """A value that is a fraction f of the smallest float16 rounds up for a fraction f of the random words, to 2^-31."""
    x = np.full((1000, 64), 1.5 * 2.0**exponent, np.float32)
    fraction = 1.5 * 2.0 ** (exponent + 24)
    rows = np.arange(1000, dtype=np.uint32)
    counters = np.stack(np.broadcast_arrays(rows[:, None], np.arange(16, dtype=np.uint32), 3, 0), axis=-1)
    words = reference.philox4x32(counters, [2, 0x61656D62]).reshape(1000, 64)
    up = words.astype(np.int64) >> 1 >= 2**31 - int(fraction * 2**31)
    values, _ = reference.round_to(x, F16, "stochastic", seed=2, rounding_step=3, rows=rows)
    assert np.array_equal(values, np.where(up, np.float16(2.0**-24), np.float16(0)))


def test_special_values_under_stochastic_rounding():
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, -65519.0, 65504.0]], np.float32)
    arguments = {"seed": 0, "rounding_step": 0, "rows": [0]}
    half, saturated = reference.round_to(x, F16, "stochastic", **arguments)
    assert bits(half)[0].tolist()[:6] == [0x7BFF, 0xFBFF, 0x7E00, 0, 0x8000, 0x7BFF]
    assert half[0, 6:].tolist() == [-65504, 65504]
    assert saturated in (3, 4)  # -65519 rounds either way
    brain, saturated = reference.round_to(x, BF16, "stochastic", **arguments)
    assert bits(brain)[0].tolist()[:5] == [0x7F80, 0xFF80, 0x7FC0, 0, 0x8000]
    assert saturated == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounding": "up"}, "nearest, stochastic"),
        ({"rounding": "stochastic", "rows": [0]}, "needs a seed"),
        ({"rounding": "stochastic", "seed": 1, "rounding_step": 1}, "row numbers"),
        ({"rounding": "stochastic", "seed": 1, "rounding_step": 1, "rows": [0, 1]}, "rows"),
    ],
)
def test_round_to_refuses_what_it_cannot_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        reference.round_to(np.ones((1, 2), np.float32), BF16, **arguments)
