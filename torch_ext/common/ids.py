"""Token ids outside of a table, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .errors import IdError

# Bad ids that a message lists.
_SHOWN = 5


def require_in_table(ids: np.ndarray[Any, Any], *, table: str, rows: int, padding_id: int | None) -> None:
    """Raises IdError where ids are neither in [0, rows) nor ``padding_id``: how many, and where the first ones are."""
    bad = (ids < 0) | (ids >= rows)
    if padding_id is not None:
        bad &= ids != padding_id
    positions = np.flatnonzero(bad)
    if not len(positions):
        return
    first = [(int(ids.reshape(-1)[position]), int(position)) for position in positions[:_SHOWN]]
    outside = f"outside of the table's rows [0, {rows})"
    if len(positions) == 1:
        ((bad_id, position),) = first
        message = f"token id {bad_id} at position {position} is {outside}"
    else:
        shown = ", ".join(f"{bad_id} at position {position}" for bad_id, position in first)
        more = f", and {len(positions) - _SHOWN} more" if len(positions) > _SHOWN else ""
        message = f"{len(positions)} of {ids.size} token ids are {outside}: {shown}{more}"
    error = IdError(f"async_emb {table!r}: {message}")
    error.add_note(advice_on_ids(ids.reshape(-1)[positions].tolist(), padding_id))
    raise error


def id_error(
    table: str, problem: Mapping[str, int], *, num_unique: int, tokens_per_batch: int, padding_id: int | None
) -> IdError:
    """What a context has kept of a batch's bad ids (native ``take_id_problem``), as an exception."""
    if problem["too_many_unique"]:
        error = IdError(
            f"async_emb {table!r}: the batch of update step {problem['step']} has {problem['unique']} unique "
            f"ids, more than num_unique={num_unique}"
        )
        error.add_note(
            f"The {num_unique} smallest were trained. Raise num_unique; "
            f"{tokens_per_batch} (tokens_per_batch) is always enough."
        )
        return error
    error = IdError(
        f"async_emb {table!r}: token id {problem['id']} at position {problem['position']} of lookup step "
        f"{problem['step']} is outside of the table's rows [0, {problem['rows']})"
    )
    error.add_note(
        "It was dropped: its row read as zeros and its gradient went nowhere. "
        + advice_on_ids([problem["id"]], padding_id)
    )
    return error


def advice_on_ids(bad: Iterable[int], padding_id: int | None) -> str:
    """What to do about ids outside of a table."""
    if padding_id is None and -1 in bad:
        return (
            "If -1 is padding here, make the table with padding_id=-1: it reads zeros and is never trained. Otherwise "
            "fix the ids, or choose id_policy='drop' or 'clamp'."
        )
    return "Fix the ids, or choose id_policy='drop' or 'clamp', or name it as padding_id."
