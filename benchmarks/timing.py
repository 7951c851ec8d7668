"""Times of one thing and of several in turn, so that what the machine does meanwhile meets all of them alike."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one thing, over `count` repetitions: the median and the 90th percentile."""

    p50: float
    p90: float
    count: int

    def share(self, moved: int, bandwidth: float) -> float:
        """The part of `bandwidth` (bytes a second) that moving so many bytes in the median time is."""
        return moved / (self.p50 * 1e-6) / bandwidth


def times_of(microseconds: Sequence[float]) -> Times:
    p50, p90 = np.percentile(np.asarray(microseconds, np.float64), [50, 90])
    return Times(float(p50), float(p90), len(microseconds))


def alternately(
    runs: Mapping[str, Callable[[], Any]],
    repetitions: int,
    *,
    warm_up: int = 3,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Times]:
    """Times several runs in turn: one of each in every round, and a round begins where the one before it left off.

    Args:
        runs: by name. A run returns when its work is done, and not earlier: block on what JAX returns.
        repetitions: rounds that count.
        warm_up: rounds before them, which do not.
        before: by name, what a run needs and what is not timed, such as the forward before a backward.
    """
    names = list(runs)
    prepare = dict(before or {})
    if unknown := set(prepare) - set(names):
        raise ValueError(f"no runs named {', '.join(sorted(unknown))} to prepare; there are {', '.join(names)}")
    found: dict[str, list[float]] = {name: [] for name in names}
    was_collecting = gc.isenabled()
    gc.disable()  # a collection would be charged to whoever runs then
    try:
        for round_ in range(warm_up + repetitions):
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                prepare.get(name, _nothing)()
                began = time.perf_counter_ns()
                runs[name]()
                ended = time.perf_counter_ns()
                if round_ >= warm_up:
                    found[name].append((ended - began) / 1000)
    finally:
        if was_collecting:
            gc.enable()
    return {name: times_of(times) for name, times in found.items()}


def _nothing() -> None:
    pass
