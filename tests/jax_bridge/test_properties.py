"""Random batches, tables and rules: one step gives the oracle's bits, whatever the numbers are."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import _programs as programs
from ._programs import Batch, Rule, Start


class Shape(NamedTuple):
    """What a program is compiled for."""

    ranks: int
    tokens: int
    rows: int
    width: int
    logical_width: int
    dtype: Any
    id_policy: str
    padding_id: int | None
    num_unique: int
    lazy: bool
    clips: bool
    rounding: str


BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
# Few, because each is compiled once; between them every option, and sizes around the edges of blocks and trees.
SHAPES = [
    Shape(1, 48, 9, 64, 61, F32, "drop", None, 48, False, True, "nearest"),
    Shape(2, 2, 1, 160, 159, F32, "error", None, 2, True, False, "nearest"),
    Shape(2, 96, 5, 26, 26, BF16, "clamp", 0, 96, True, True, "stochastic"),
    Shape(3, 33, 50, 21, 19, F16, "drop", 7, 33, False, True, "stochastic"),
    Shape(4, 64, 70, 12, 5, F32, "clamp", None, 64, True, True, "nearest"),
    Shape(4, 40, 20, 256, 255, F16, "error", -1, 11, True, False, "nearest"),
    Shape(8, 128, 2, 24, 24, BF16, "drop", None, 128, False, False, "nearest"),
    Shape(8, 16, 300, 16, 2, F16, "clamp", 299, 6, True, False, "stochastic"),
]
INT32 = np.iinfo(np.int32)

# Ordinary numbers first, and often; then those at which formats begin and end.
grad_scales = st.sampled_from([1.0, 0.3, 1e-3, 1e3, 1.0, 1e-20, 1e-38, 1e-42, 1e17])
weight_scales = st.sampled_from([1.0, 1.0, 1e-3, 3e4, 1e-20, 1e-38, 1e-42, 1e37])
amounts = st.sampled_from([0.1, 0.5, 0.9, 1.0, 1e-3, 3.0, 1e-8, 1e4, 1e-38, 1e-45, 0.0, 1e20, 3e38, np.inf])
rates = st.sampled_from([0.07, 1e-3, 1e-9, 0.0, 1.0, 30.0, 1e10])


def float_arrays(rng: np.random.Generator, shape: Any, dtype: Any, scale: float, special: list[float]) -> np.ndarray:
    """Normal numbers, of which some are replaced by special ones."""
    with np.errstate(over="ignore"):
        values = (rng.normal(size=shape) * scale).astype(dtype)
        if special:
            chosen = rng.random(shape) < 0.1
            values[chosen] = rng.choice(np.array(special, np.float64), int(chosen.sum())).astype(dtype)
    return values


def ids_of(rng: np.random.Generator, shape: Shape, spread: float, bad_share: float) -> np.ndarray:
    ids = rng.integers(0, max(1, int(shape.rows * spread)), shape.tokens)
    outside = rng.choice([-1, shape.rows, shape.rows + 1, INT32.max, INT32.min, -shape.rows], shape.tokens)
    ids = np.where(rng.random(shape.tokens) < bad_share, outside, ids)
    if shape.padding_id is not None:
        ids = np.where(rng.random(shape.tokens) < 0.2, shape.padding_id, ids)
    return ids.astype(np.int32)


small_numbers = st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 6e-8, 1e-30]), max_size=3)
large_numbers = st.sampled_from([[], [], [65504.0], [-3e38], [np.nan], [np.inf], [-np.inf, np.inf]])
not_finite = st.sampled_from([[], [], [], [], [], [np.nan], [-np.inf], [3e38]])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([1.0, 0.5, 0.1, 0.0]),
    bad_share=st.sampled_from([0.0, 0.0, 0.1, 0.3, 1.0]),
    grad_scale=grad_scales,
    weight_scale=weight_scales,
    small=small_numbers,
    grads_not_finite=not_finite,
    table_large=large_numbers,
    learning_rate=amounts,
    eps=amounts,
    factors=st.tuples(amounts, amounts),
    lazy_rates=st.tuples(rates, rates),
    max_grad_norm=amounts,
    step=st.sampled_from([0, 1, 17, 1000, INT32.max, INT32.min]),
    pending=st.sampled_from([True, True, True, True, False]),
)
def test_one_step_gives_the_bits_of_the_oracle(
    shape,
    seed,
    spread,
    bad_share,
    grad_scale,
    weight_scale,
    small,
    grads_not_finite,
    table_large,
    learning_rate,
    eps,
    factors,
    lazy_rates,
    max_grad_norm,
    step,
    pending,
):
    rng = np.random.default_rng(seed)
    table = float_arrays(rng, (shape.rows, shape.width), shape.dtype, weight_scale, small + table_large)
    row_state = np.abs(float_arrays(rng, shape.rows, np.float32, 1.0, small + table_large))
    last_step = rng.choice([0, step, step // 2, 5, INT32.max, INT32.min], shape.rows).astype(np.int32)
    grads = float_arrays(rng, (shape.tokens, shape.width), shape.dtype, grad_scale, small + grads_not_finite)
    batch = Batch(ids_of(rng, shape, spread, bad_share), grads, pending)
    state_decay, weight_decay = lazy_rates if shape.lazy else factors
    rule = Rule(
        lazy=shape.lazy,
        state_decay=state_decay,
        weight_decay=weight_decay,
        learning_rate=learning_rate,
        eps=eps,
        max_grad_norm=max_grad_norm if shape.clips else None,
        rounding=shape.rounding,
        seed=seed,
    )
    start = Start(table, row_state, last_step)
    options = {
        "id_policy": shape.id_policy,
        "padding_id": shape.padding_id,
        "num_unique": shape.num_unique,
        "logical_width": shape.logical_width,
    }
    handle = programs.handle_on(
        programs.mesh_of(shape.ranks), tokens=shape.tokens, width=shape.width, dtype=shape.dtype, name="any", **options
    )
    outcome = programs.observe(handle, start, [batch], rule, first_step=step)
    expected = programs.expected(start, [batch], rule, first_step=step, **options)
    programs.assert_same_run(outcome.run, expected)
