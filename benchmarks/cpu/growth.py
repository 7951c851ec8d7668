"""How the time of a lookup and of an update grows: with ids at fixed rows, and with rows at fixed ids."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.ids import make_ids
from benchmarks.timing import Times, alternately

from .one_device_update import OurUpdate
from .row import Options, Row, at_most

WIDTH, DTYPE, KIND = 64, "float32", "uniform"
FIXED_ROWS, FIXED_IDS = 1_000_000, 16_384
IDS = tuple(2**power for power in range(6, 21, 2))
ROWS = (100_000, 1_000_000, 5_000_000, 20_000_000)
QUICK_IDS, QUICK_ROWS = (64, 1024, 16_384), (10_000, 100_000)


def rows(options: Options) -> Iterator[Row]:
    yield from _along("ids", [(FIXED_ROWS, ids) for ids in (QUICK_IDS if options.quick else IDS)], options)
    yield from _along("rows", [(count, FIXED_IDS) for count in (QUICK_ROWS if options.quick else ROWS)], options)


def _along(what: str, cases: Sequence[tuple[int, int]], options: Options) -> Iterator[Row]:
    """Each size beside the one before it. The goal is linear growth with ids; with rows there is none for a pair, since
    rows that no longer fit into a cache come from further away: the power over all sizes says whether it is flat."""
    found = [_measure(table_rows, tokens, options) for table_rows, tokens in cases]
    for work in ("lookup", "update"):
        sizes = [tokens if what == "ids" else table_rows for table_rows, tokens in cases]
        slope = log_log_slope(sizes, [times[work].p50 for times in found])
        print(f"  {work}, by {what}: time goes with the power {slope:.2f}", file=sys.stderr)
        pairs = zip(itertools.pairwise(sizes), itertools.pairwise(found), strict=True)
        for (smaller, larger), (earlier, later) in pairs:
            yield Row(
                work=f"growth of {work} with {what}",
                setting=f"{larger:,} {what}",
                peer=f"{smaller:,} {what}",
                ours=later[work],
                theirs=earlier[work],
                checked="–",
                goal=at_most(larger / smaller) if what == "ids" else None,
                note=f"over all sizes, time goes with the power {slope:.2f} of {what}",
            )


def _measure(table_rows: int, tokens: int, options: Options) -> dict[str, Times]:
    rng = np.random.default_rng(0)
    batches = [make_ids(KIND, table_rows, tokens, rng) for _ in range(4)]
    grads = rng.normal(scale=0.01, size=(tokens, WIDTH)).astype(np.float32)
    ours = OurUpdate("growth", table_rows, WIDTH, DTYPE, batches, grads)
    return {
        "lookup": alternately({"lookup": ours.look_up}, options.repetitions)["lookup"],
        "update": alternately({"update": ours.update}, options.repetitions, before={"update": ours.look_up})["update"],
    }


def log_log_slope(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The power of the size that time goes with, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
