"""Cases for any backend: a table, its batches and a rule, with what the oracle makes of them.

`on_cpu` runs every case through the CPU pipeline, `test_same_bits.py` through CUDA; both compare with the oracle bit
for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jax_bridge import pad_width, reference
from jax_bridge.context import IdPolicy
from tests.jax_bridge import _fifty_steps as fifty_steps
from tests.jax_bridge import _programs as programs
from tests.jax_bridge._programs import Batch, Rule, Run, Start, assert_same_run

DTYPES: dict[str, Any] = fifty_steps.DTYPES
TOKENS, ROWS = 240, 97  # 240 tokens divide over 1, 2, 3, 4, 5, 6 and 8 ranks
PLAIN = Rule()
ODD_WIDTHS = (1, 3, 17, 31, 33, 64, 100, 129, 256)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Everything that a run needs.

    Attributes:
        name: for the test's id, and for the context.
        ranks: of the one group; columns and tokens divide over them.
        token_blocks: which block of the tokens a rank holds; block r on rank r unless given.
        reports: the error that the host is told after the run: "id", "unique" or None.
    """

    name: str
    start: Start
    batches: tuple[Batch, ...]
    rule: Rule = PLAIN
    ranks: int = 1
    staleness: int = 0
    logical_width: int | None = None
    id_policy: IdPolicy = "drop"
    padding_id: int | None = None
    num_unique: int | None = None
    token_blocks: tuple[int, ...] | None = None
    reports: str | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.start.table.dtype)

    @property
    def rows(self) -> int:
        return int(self.start.table.shape[0])

    @property
    def width(self) -> int:
        """Of a whole row, padding columns included."""
        return int(self.start.table.shape[1])

    @property
    def tokens(self) -> int:
        return int(self.batches[0].ids.size)

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.token_blocks or tuple(range(self.ranks))

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} ranks, staleness {self.staleness}"


class Outcome(NamedTuple):
    """A run, the context's counters after it, and the ids or refusal that it reported."""

    run: Run
    stats: dict[str, float]
    reported: str | None


@functools.cache
def expected(case: Case) -> Run:
    return programs.expected(
        case.start,
        case.batches,
        case.rule,
        staleness=case.staleness,
        id_policy=case.id_policy,
        padding_id=case.padding_id,
        num_unique=case.num_unique,
        logical_width=case.logical_width,
    )


def assert_like_the_oracle(outcome: Outcome, case: Case) -> None:
    wanted = expected(case)
    assert_same_run(outcome.run, wanted)
    assert outcome.reported == case.reports
    applied = int(wanted.valids.sum())
    # With staleness 1 the last batch is looked up twice: once more to have something armed at the end.
    looked_up = [*case.batches, *case.batches[-1:]] if case.staleness else case.batches
    bad = [
        reference.clean_ids(b.ids, case.rows, id_policy=case.id_policy, padding_id=case.padding_id)[1].bad
        for b in looked_up
    ]
    counts = {
        "lookups": len(looked_up),
        "updates": applied,
        "skipped_updates": len(case.batches) - applied,
        "bad_ids": sum(bad),
        "padding_ids": sum(int(np.count_nonzero(b.ids == case.padding_id)) for b in looked_up),
        "refused_calls": 0,
    }
    assert {name: int(outcome.stats[name]) for name in counts} == counts


# ---- what is in them


def random_start(dtype: Any, width: int, *, rows: int = ROWS, seed: int = 1) -> Start:
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, width)).astype(dtype)
    return Start(table, rng.random(rows).astype(np.float32), rng.integers(-20, 5, rows).astype(np.int32))


def random_batches(
    dtype: Any, width: int, count: int, *, rows: int = ROWS, tokens: int = TOKENS, seed: int = 2, scale: float = 0.5
) -> tuple[Batch, ...]:
    """A few ids come often, many once, and gradient rows are of any sign and size."""
    rng = np.random.default_rng(seed)
    return tuple(
        Batch(
            ((rng.zipf(1.3, tokens) - 1) % rows).astype(np.int32),
            rng.normal(scale=scale, size=(tokens, width)).astype(dtype),
        )
        for _ in range(count)
    )


def with_segments(batch: Batch, rows: int, num_unique: int) -> Batch:
    """The same batch with its distinct ids found by the caller; every fifth token is not trained any more."""
    ids = np.where(np.arange(batch.ids.size) % 5 == 4, -1, batch.ids)
    unique, inverse = np.unique(ids[ids >= 0], return_inverse=True)
    segments = np.full(ids.size, -1, np.int32)
    segments[ids >= 0] = inverse
    padded = np.full(num_unique, rows, np.int32)
    padded[: unique.size] = unique
    return batch._replace(ids=ids.astype(np.int32), segment_ids=segments, unique_tokens=padded)


# ---- the cases


def of_fifty_steps(ranks: int, case: tuple[str, str, str, bool], staleness: int = 0) -> Case:
    """Fifty steps with all that a batch can hold: empty ranks, NaN and infinite gradients, skips, denormal numbers."""
    return Case(
        f"fifty steps, {fifty_steps.name_of(case)}",
        fifty_steps.start_of(case[0]),
        fifty_steps.batches_of(case[0]),
        fifty_steps.rule_of(*case[1:]),
        ranks=ranks,
        staleness=staleness,
        logical_width=fifty_steps.LOGICAL_WIDTH,
        padding_id=fifty_steps.PADDING_ID,
    )


def fifty_steps_cases() -> Iterator[Case]:
    for case in fifty_steps.PAIRWISE:
        for ranks in (1, 3, 8):
            yield of_fifty_steps(ranks, case)
    for case in fifty_steps.ONE_OF_EACH_DTYPE:
        for ranks in (1, 2, 4):
            yield of_fifty_steps(ranks, case, staleness=1)


def odd_width(width: int, ranks: int, dtype: str) -> Case:
    padded = pad_width(width, ranks)
    rules = (
        Rule(state_decay=0.9, weight_decay=0.999),
        Rule(lazy=True, state_decay=0.02, weight_decay=1e-3, rounding="stochastic", seed=0xDEADBEEF),
        Rule(max_grad_norm=5.0, rounding="stochastic", seed=7),
    )
    return Case(
        f"width {width}, {dtype}",
        random_start(DTYPES[dtype], padded),
        random_batches(DTYPES[dtype], padded, 4),
        rules[(width + ranks) % 3],
        ranks=ranks,
        staleness=ranks % 2,
        logical_width=width,
    )


def odd_width_cases() -> Iterator[Case]:
    for i, width in enumerate(ODD_WIDTHS):
        for ranks in (1, 4):
            yield odd_width(width, ranks, list(DTYPES)[(i + ranks // 2) % 3])
    for dtype in DTYPES:  # 16-byte accesses of each dtype
        yield odd_width(64, 2, dtype)


def hot_id(ranks: int, dtype: str = "float32") -> Case:
    """One id with a hundred thousand occurrences: thousands of blocks, spread over the whole GPU."""
    tokens, width = 120_000, 64
    (batch,) = random_batches(DTYPES[dtype], width, 1, tokens=tokens, rows=5000)
    ids = np.where(np.arange(tokens) % 6 == 0, batch.ids, 7).astype(np.int32)
    assert np.count_nonzero(ids == 7) >= 100_000
    start = random_start(DTYPES[dtype], width, rows=5000)
    return Case(f"hot id, {dtype}", start, (batch._replace(ids=ids),) * 2, Rule(max_grad_norm=3.0), ranks=ranks)


def id_cases() -> Iterator[Case]:
    start = random_start(np.float32, 12)
    batches = list(random_batches(np.float32, 12, 4))
    bad = batches[1].ids.copy()
    bad[[5, 100, 239]] = [-3, ROWS, 2**31 - 1]
    batches[1] = batches[1]._replace(ids=bad)
    for policy in ("error", "drop", "clamp"):
        reports = "id" if policy == "error" else None
        yield Case(f"bad ids, {policy}", start, tuple(batches), ranks=2, id_policy=policy, reports=reports)

    padded = tuple(b._replace(ids=np.where(np.arange(TOKENS) % 3 == 0, -7, b.ids).astype(np.int32)) for b in batches)
    yield Case("padding ids", start, padded, ranks=3, staleness=1, padding_id=-7)
    idle = batches[2].ids.copy()
    idle[-TOKENS // 4 :] = 11
    yield Case("an empty rank", start, (batches[0], batches[2]._replace(ids=idle)), ranks=4, padding_id=11)
    nothing = batches[0]._replace(ids=np.full(TOKENS, 11, np.int32))
    yield Case("nothing but padding", start, (nothing, batches[2]), ranks=2, padding_id=11)

    wide = tuple(b._replace(ids=b.ids.astype(np.int64)) for b in (batches[0], batches[2]))
    yield Case("64-bit ids", start, wide, ranks=2)
    two = (batches[0], batches[2])
    yield Case("more distinct ids than num_unique", start, two, ranks=2, num_unique=9, reports="unique")
    segments = tuple(with_segments(b, ROWS, TOKENS) for b in (batches[0], batches[2], batches[3]))
    yield Case("segments of the caller", start, segments, ranks=2, padding_id=-1)


def gradient_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        start, batches = random_start(DTYPES[dtype], 40), list(random_batches(DTYPES[dtype], 40, 4))
        grads = batches[1].grads.copy()
        grads[17, 3] = np.nan
        batches[1] = batches[1]._replace(grads=grads)
        batches[2] = batches[2]._replace(pending=0)
        yield Case(f"a NaN step and a skipped one, {dtype}", start, tuple(batches), ranks=2, staleness=1)
    huge = random_batches(np.float16, 16, 3, scale=8.0)
    yield Case("fp16 saturates", random_start(np.float16, 16), huge, Rule(learning_rate=6e4), ranks=2)


@functools.cache
def all_cases() -> tuple[Case, ...]:
    hot = [hot_id(1), hot_id(4, "bfloat16")]
    return (*fifty_steps_cases(), *odd_width_cases(), *id_cases(), *gradient_cases(), *hot)


# ---- tokens that do not lie in the order of the ranks


def backwards(case: Case) -> Case:
    """The same, with the blocks of tokens on other ranks: it changes no bit."""
    return dataclasses.replace(case, token_blocks=tuple(reversed(range(case.ranks))), name=f"{case.name}, backwards")
