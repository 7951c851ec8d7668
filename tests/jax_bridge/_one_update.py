"""One update of a small table, for tests of what an update does."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from . import _programs as programs
from ._programs import Batch, Rule, fresh

BF16 = ml_dtypes.bfloat16
PLAIN = Rule(learning_rate=1.0, eps=0.0)
RANKS = [1, 2, 4]
WIDTH = 80


def handle_for(ranks: int, tokens: int, width: int, *, logical_width: int | None = None, **options):
    options = {"name": "update semantics"} | options
    mesh = programs.mesh_of(ranks)
    return programs.handle_on(mesh, tokens=tokens, width=width, logical_width=logical_width or width, **options)


def update(table, ids, grads, *, ranks=2, rule=PLAIN, row_state=0.0, logical_width=None, pending=True, **options):
    """The outcome of one step. Ids may have any shape; grads are [tokens, width]."""
    table, grads = np.asarray(table), np.asarray(grads)
    ids = np.asarray(ids, np.int32)
    handle = handle_for(ranks, ids.size, table.shape[1], logical_width=logical_width, dtype=table.dtype, **options)
    return programs.observe(handle, fresh(table, row_state), [Batch(ids, grads.astype(table.dtype), pending)], rule)
