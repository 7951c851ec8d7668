"""A case through ``torch_ext.AsyncEmbedding``, with threads as ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import torch_ext
from torch_ext import AsyncEmbedding, RowwiseAdagrad, ThreadRanks, with_next
from torch_ext.common.errors import IdError
from torch_ext.logical import from_numpy, to_numpy

from .cases import COUNTS, ROWS, SHOWN_BY_FACES, TOKENS, Batch, Case, Outcome


def make(case: Case, ranks: torch_ext.Ranks, **options: Any) -> AsyncEmbedding:
    return AsyncEmbedding(
        ROWS,
        case.width,
        name="table",
        optimizer=RowwiseAdagrad(**case.full_rule()),
        staleness=case.staleness,
        dtype=getattr(torch, case.dtype),
        init=lambda generator, shape: torch.from_numpy(case.weights()),
        id_policy=case.id_policy,
        padding_id=case.padding_id,
        num_unique=case.num_unique,
        ranks=ranks,
        **options,
    )


def share_of(batch: Batch, ranks: torch_ext.Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a batch: ids and gradient rows."""
    size = TOKENS // ranks.size
    mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
    return torch.from_numpy(batch.ids)[mine], from_numpy(batch.grads)[mine]


def train(table: AsyncEmbedding, batches: list[Batch], *, prefetch: bool = True) -> tuple[Any, Any, Any]:
    """(rows of each step on this rank, reports of each update, errors)."""
    ranks = table.table.ranks
    rows_seen, reports, errors = [], [], []
    for step, (batch, upcoming) in enumerate(with_next(batches)):
        ids, grads = share_of(batch, ranks)
        try:
            rows = table(ids)
        except IdError as error:
            errors.append((step, str(error)))
            rows = table(ids)  # nothing of the call has run
        if table.staleness and prefetch:
            if step > 0:
                reports.append(table.finish())
            if upcoming is not None:
                table.prefetch(share_of(upcoming, ranks)[0])
        rows_seen.append(rows.detach())
        rows.backward(grads)
        table.step(apply=batch.apply)
        if not table.staleness or (not prefetch and step > 0):
            reports.append(table.finish())
    try:
        reports_of_flush = [table.flush()]
    except IdError as error:
        errors.append((len(batches), str(error)))
        reports_of_flush = [table.finish()]
    if table.staleness:
        reports += reports_of_flush
    return rows_seen, reports, errors


def run(case: Case, *, ranks: int | None = None, prefetch: bool = True) -> Outcome:
    def on(rank: torch_ext.Ranks) -> Any:
        with make(case, rank) as table:
            rows, reports, errors = train(table, case.batches(), prefetch=prefetch)
            arrays = table.to_arrays()  # the ranks meet, so that none is still at work
            return rows, reports, errors, table.stats(), arrays

    results = ThreadRanks(case.ranks if ranks is None else ranks).run(on)
    rows = [np.concatenate([to_numpy(result[0][step]) for result in results]) for step in range(case.steps)]
    _, reports, errors, stats, arrays = results[0]
    for _, other_reports, other_errors, other_stats, other_arrays in results[1:]:
        assert repr(other_reports) == repr(reports), "every rank hears the same; a norm may be NaN"
        assert other_errors == errors
        assert {k: stats[k] for k in COUNTS} == {k: other_stats[k] for k in COUNTS}
        np.testing.assert_array_equal(other_arrays["weight"].view(np.uint8), arrays["weight"].view(np.uint8))
    return Outcome(
        arrays["weight"],
        arrays["accumulator"],
        arrays.get("last_step"),
        np.stack(rows),
        [(np.float32(report.norm), report.valid) for report in reports],
        errors,
        {key: int(stats[key]) for key in (*COUNTS, *SHOWN_BY_FACES)},
    )
