"""Fifty steps on ids and gradient rows of a fixed generator, with all that a batch can hold, and rules to run them by.

`python -m tests.jax_bridge._fifty_steps RANKS` prints the instruction set of the kernels and the digest of each case.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import ml_dtypes
import numpy as np

from . import _programs as programs
from ._programs import Batch, Rule, Run, Start

ROWS, LOGICAL_WIDTH, TOKENS, STEPS = 40, 20, 48, 50
WIDTH = 24  # with its padding it divides by every number of ranks below; 48 tokens do too
RANKS = (1, 2, 3, 4, 6, 8)
PADDING_ID = 3
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

DECAYS = {
    "no decay": Rule(),
    "decay": Rule(state_decay=0.9, weight_decay=0.999),
    "lazy decay": Rule(lazy=True, state_decay=0.02, weight_decay=1e-3),
}


def rule_of(decay: str, rounding: str, clips: bool) -> Rule:
    # A bound that clips about half of the steps.
    return DECAYS[decay]._replace(rounding=rounding, seed=0xDEADBEEF, max_grad_norm=15.0 if clips else None)


CASES = [
    (dtype, decay, rounding, clips)
    for dtype in DTYPES
    for decay in DECAYS
    for rounding in ("nearest", "stochastic")
    for clips in (False, True)
    if dtype != "float32" or (rounding, decay) != ("stochastic", "no decay")  # fp32 stores need no rounding
]
# Every value of an option, and every pair of rounding and clipping, with each half-precision dtype.
PAIRWISE = [
    *((d, "no decay", "nearest", False) for d in DTYPES),
    *((d, "decay", "stochastic", True) for d in DTYPES),
    *((d, "lazy decay", "nearest", True) for d in DTYPES),
    *((d, "lazy decay", "stochastic", False) for d in DTYPES if d != "float32"),
]
ONE_OF_EACH_DTYPE = [
    ("float32", "lazy decay", "nearest", True),
    ("bfloat16", "lazy decay", "stochastic", False),
    ("float16", "decay", "stochastic", True),
]


def name_of(case: tuple[str, str, str, bool]) -> str:
    dtype, decay, rounding, clips = case
    return f"{dtype}, {decay}, {rounding}, {'clipped' if clips else 'not clipped'}"


@functools.cache
def start_of(dtype: str) -> Start:
    rng = np.random.default_rng(1)
    table = rng.normal(size=(ROWS, WIDTH)).astype(DTYPES[dtype])
    table[1, :4] = [-0.0, 0.0, 1e-7, np.inf]
    table[2, :3] = [1e-40, -3e-39, 2e-38]
    # A NaN with a payload, in a row that no batch trains.
    programs.bits(table)[PADDING_ID, 5] |= {4: 0x7F812345, 2: 0x7FA5}[table.dtype.itemsize]
    row_state = np.where(rng.random(ROWS) < 0.5, 0, rng.random(ROWS)).astype(np.float32)
    # Some rows are ahead of the steps that come.
    last_step = rng.integers(-20, 5, ROWS).astype(np.int32)
    last_step[7] = 1000
    return Start(table, row_state, last_step)


@functools.cache
def batches_of(dtype: str) -> tuple[Batch, ...]:
    rng = np.random.default_rng(2)
    return tuple(_batch(rng, k, DTYPES[dtype]) for k in range(STEPS))


def _batch(rng: np.random.Generator, step: int, dtype: Any) -> Batch:
    ids = (rng.zipf(1.3, TOKENS) - 1) % ROWS  # a few rows come many times
    grads = rng.normal(scale=0.5, size=(TOKENS, WIDTH)).astype(np.float32)
    pending = True
    if step % 10 == 3:  # the first rank has nothing to do, whatever the number of ranks (with one: half of its tokens)
        ids[: TOKENS // 2] = PADDING_ID
    if step == 7:
        ids[:] = PADDING_ID
    if step == 11:  # more occurrences of one id than a block of the canonical sum holds
        ids[:] = np.where(rng.random(TOKENS) < 0.9, 5, ids)
    if step == 17:
        grads[9, 2] = np.nan
    if step == 18:
        grads[30, 19] = -np.inf
    if step == 23:
        pending = False
    if step == 29:
        grads[:] = 0
    if step == 31:
        grads *= 1e-7 if dtype == np.float16 else 1e-20  # denormal in fp16, or squares that are in fp32
    if step == 32:
        grads[:, :3] *= 1e-39
    if step == 37:
        ids[[0, 20, 47]] = [-1, ROWS, 2**31 - 1]
    if step == 41:
        grads *= 1e3
    if step == 43:
        grads[np.isin(ids, ids[:4])] = -0.0
    grads[:, LOGICAL_WIDTH:] = np.nan  # what padding columns hold is nobody's business
    return Batch(ids.astype(np.int32), grads.astype(dtype), pending)


def handle_of(dtype: str, ranks: int) -> Any:
    return handle_on_mesh(dtype, programs.mesh_of(ranks))


def handle_on_mesh(dtype: str, mesh: Any, **options: Any) -> Any:
    return programs.handle_on(
        mesh,
        tokens=TOKENS,
        width=WIDTH,
        logical_width=LOGICAL_WIDTH,
        dtype=DTYPES[dtype],
        id_policy="drop",
        padding_id=PADDING_ID,
        **{"name": "fifty steps"} | options,
    )


def run_on(handle: Any, case: tuple[str, str, str, bool], **options: Any) -> Run:
    dtype, *rule = case
    with programs.opened(handle):
        return programs.run(handle, start_of(dtype), batches_of(dtype), rule_of(*rule), **options)


@functools.cache
def expected(case: tuple[str, str, str, bool], staleness: int = 0) -> Run:
    dtype, *rule = case
    return programs.expected(
        start_of(dtype),
        batches_of(dtype),
        rule_of(*rule),
        staleness=staleness,
        id_policy="drop",
        padding_id=PADDING_ID,
        logical_width=LOGICAL_WIDTH,
    )


if __name__ == "__main__":
    from jax_bridge import runtime

    print(runtime.native().instruction_set())
    for case in ONE_OF_EACH_DTYPE:
        print(run_on(handle_of(case[0], int(sys.argv[1])), case).digest())
