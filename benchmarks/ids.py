"""The token ids that benchmarks look up: uniform, or by Zipf's law with the hot rows anywhere in the table."""

from __future__ import annotations

import functools

import numpy as np

IDS = ("uniform", "zipf 1.05", "zipf 1.15")


def make_ids(kind: str, rows: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Token ids, int32 [tokens]. "zipf S": the row of rank r has a share that goes with r^-S, and ranks lie anywhere in
    the table."""
    if kind == "uniform":
        return rng.integers(0, rows, tokens, dtype=np.int32)
    name, exponent = kind.split()
    if name != "zipf":
        raise ValueError(f"ids {kind!r} are none of {', '.join(IDS)}")
    ranks = np.searchsorted(_shares(float(exponent), rows), rng.random(tokens)).clip(max=rows - 1)
    return _places(rows)[ranks]


@functools.cache
def _shares(exponent: float, rows: int) -> np.ndarray:
    """Cumulative."""
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return shares / shares[-1]


@functools.cache
def _places(rows: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(rows).astype(np.int32)
