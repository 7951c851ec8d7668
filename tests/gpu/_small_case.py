"""A few steps with every launch in them, for compute-sanitizer: `python -m tests.gpu._small_case`.

Two ranks on one GPU; a width with 16-byte accesses and one without, every dtype, both rules, long and short segments,
clipping, stochastic rounding, padding and bad ids. Compares with the oracle, so a wrong bit fails it as well.
"""

from __future__ import annotations

import numpy as np

from jax_bridge import pad_width

from ._cases import DTYPES, PLAIN, Case, Rule, assert_like_the_oracle, random_batches, random_start, with_segments
from ._native_ranks import NativeRanks

TOKENS, ROWS = 512, 60


def small_cases() -> list[Case]:
    cases = []
    rules = (PLAIN, Rule(lazy=True, state_decay=0.1, weight_decay=0.01, rounding="stochastic", seed=3, max_grad_norm=2))
    for i, (dtype, width) in enumerate(
        zip(["float32", "bfloat16", "float16"] * 2, [64, 64, 64, 33, 7, 100], strict=True)
    ):
        padded = pad_width(width, 2)
        start = random_start(DTYPES[dtype], padded, rows=ROWS)
        batches = list(random_batches(DTYPES[dtype], padded, 3, rows=ROWS, tokens=TOKENS))
        ids = batches[0].ids.copy()
        ids[::2] = 7  # a segment of several blocks
        ids[[3, 5]] = [-4, ROWS]
        batches[0] = batches[0]._replace(ids=ids)
        batches[2] = with_segments(batches[2]._replace(ids=np.abs(batches[2].ids)), ROWS, TOKENS)
        case = Case(
            f"small, width {width}, {dtype}",
            start,
            tuple(batches),
            rules[i % 2],
            ranks=2,
            staleness=i % 2,
            logical_width=width,
            padding_id=-1,
        )
        cases.append(case)
    return cases


if __name__ == "__main__":
    for case in small_cases():
        with NativeRanks(case) as ranks:
            assert_like_the_oracle(ranks.run(), case)
    print("small case: every bit as in the oracle")
