"""What both faces must make the same bits of: tables, rules, and batches with their gradient rows from a generator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

ROWS = 23
TOKENS = 24  # of a batch, over all ranks; 1, 2, 3, 4 and 8 ranks divide it
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Batch(NamedTuple):
    """ids int32 [TOKENS]; grads [TOKENS, width]; apply: whether every other gradient of the step was finite."""

    ids: Any
    grads: Any
    apply: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of training.

    Attributes:
        ranks: of both faces.
        rule: of ``RowwiseAdagrad``.
        change: (step, batch) -> batch, of one that has duplicates, repeats in the next batch, and nothing bad.
    """

    name: str
    staleness: int = 0
    ranks: int = 4
    width: int = 8
    dtype: str = "float32"
    steps: int = 4
    rule: dict[str, Any] = dataclasses.field(default_factory=dict)
    id_policy: str = "error"
    padding_id: int | None = None
    num_unique: int | None = None
    change: Callable[[int, Batch], Batch] = lambda step, batch: batch

    def weights(self) -> np.ndarray[Any, Any]:
        """float32 [ROWS, width], what the table begins with."""
        return np.random.default_rng(5).normal(scale=0.3, size=(ROWS, self.width)).astype(np.float32)

    def batches(self) -> list[Batch]:
        rng = np.random.default_rng(7)
        made = []
        for step in range(self.steps):
            ids = (rng.random(TOKENS) ** 2 * ROWS).astype(np.int32)
            grads = rng.normal(size=(TOKENS, self.width)).astype(DTYPES[self.dtype])
            made.append(self.change(step, Batch(ids, grads)))
        return made

    def full_rule(self) -> dict[str, Any]:
        return {"learning_rate": 0.1, "eps": 1e-6} | self.rule


class Outcome(NamedTuple):
    """All that a run shows, as NumPy arrays.

    Attributes:
        weights, accumulator, last_step: at the end; last_step is None in the other form of the rule.
        rows: of every step, [steps, TOKENS, width].
        reports: (norm, valid) of the update of each step.
        errors: (step of the call that raised it, first line) of what ids had to say.
        counts: counters that both faces and the oracle must agree on.
    """

    weights: Any
    accumulator: Any
    last_step: Any
    rows: Any
    reports: Any
    errors: list[tuple[int, str]]
    counts: dict[str, int]


COUNTS = ("lookups", "updates", "skipped_updates", "tokens", "bad_ids", "padding_ids", "saturated")
SHOWN_BY_FACES = ("trained_tokens", "unique_tokens", "refused_calls")


def at(step: int, change: Callable[[Batch], Batch]) -> Callable[[int, Batch], Batch]:
    return lambda number, batch: change(batch) if number == step else batch


def _with_id(position: int, value: int) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        ids = batch.ids.copy()
        ids[position] = value
        return batch._replace(ids=ids)

    return change


def _with_grad(position: int, value: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        grads = batch.grads.copy()
        grads[position, -1] = value
        return batch._replace(grads=grads)

    return change


def _empty_rank(step: int, batch: Batch) -> Batch:
    ids = batch.ids.copy()
    rank = step % 4
    ids[rank * 6 : (rank + 1) * 6] = -1
    return batch._replace(ids=ids)


def _one_id(step: int, batch: Batch) -> Batch:
    return batch._replace(ids=np.full(TOKENS, 3 + step % 2, np.int32))


def _bad_ids(step: int, batch: Batch) -> Batch:
    ids = batch.ids.copy()
    if step == 1:
        ids[[2, 13]] = [ROWS, -5]
    if step == 2:
        ids[20] = 2**31 - 1
    return batch._replace(ids=ids)


def _rate_of_step_1(rate: str) -> Callable[[Any], Any]:
    """A schedule of 0.125, and of ``rate`` at step 1."""
    return lambda step: jnp.where(step == 1, float(rate), 0.125)


_LAZY = {"lazy": True, "half_life": 5.0, "weight_decay": 0.25}
_STOCHASTIC = {"rounding": "stochastic", "seed": 11}

CASES = [
    *(Case("plain", staleness=s, dtype=d, width=10) for s in (0, 1) for d in DTYPES),
    *(Case("one rank", staleness=s, ranks=1) for s in (0, 1)),
    *(Case("one id in every place", staleness=s, change=_one_id) for s in (0, 1)),
    Case("columns of one rank are padding alone", width=3),
    Case("an odd width on an odd number of ranks", width=7, ranks=3),
    *(Case("a rank without ids", staleness=s, padding_id=-1, change=_empty_rank) for s in (0, 1)),
    *(Case(f"bad ids, {p}", staleness=s, id_policy=p, change=_bad_ids) for s in (0, 1) for p in ("error", "drop")),
    Case("bad ids, clamp", id_policy="clamp", change=_bad_ids),
    Case("more distinct ids than fit", num_unique=4),
    *(Case("a NaN step", staleness=s, change=at(1, _with_grad(9, np.nan))) for s in (0, 1)),
    Case("an infinite step", change=at(2, _with_grad(23, -np.inf))),
    *(Case("a step that is not to be applied", staleness=s, change=at(1, lambda b: b._replace(apply=False)))
      for s in (0, 1)),
    Case("decay", rule={"half_life": 3.0}),
    Case("weight decay", rule={"weight_decay": 0.25, "learning_rate": 0.125}),
    *(Case("lazy decays", staleness=s, rule=_LAZY) for s in (0, 1)),
    Case("clipping", staleness=1, rule={"max_grad_norm": 0.5}),
    Case("an accumulator that begins above 0", rule={"initial_accumulator": 2.0}),
    *(Case("stochastic rounding", staleness=s, dtype="bfloat16", rule=_STOCHASTIC) for s in (0, 1)),
    Case("float16 that saturates", dtype="float16", rule={"learning_rate": 3e6}),
    *(Case("a learning-rate schedule", staleness=s, rule={"learning_rate": lambda step: 0.125 * (step + 1)})
      for s in (0, 1)),
    *(Case(f"a schedule that gives {rate}", staleness=s, rule={"learning_rate": _rate_of_step_1(rate), **decay})
      for s, rate, decay in ((0, "nan", {}), (1, "inf", _LAZY), (1, "-0.125", {"half_life": 3.0}), (0, "nan", _LAZY))),
    Case("weight decay that turns signs", rule={"weight_decay": 4.0, "learning_rate": 0.5}),
]  # fmt: skip


def name_of(case: Case) -> str:
    return f"{case.name}, staleness {case.staleness}, {case.dtype}".replace(" ", "-")
