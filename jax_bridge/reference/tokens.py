"""Token ids: cleaning, lookup, and the index of unique ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .formats import as_bits, table_dtype

ID_POLICIES = ("error", "drop", "clamp")


class IdReport(NamedTuple):
    """What `clean_ids` found.

    Attributes:
        bad: how many ids lie outside `[0, rows)` and are not the padding id.
        first_bad: (position in the flattened ids, id) of the first of them, or None.
    """

    bad: int
    first_bad: tuple[int, int] | None


class UniqueIds(NamedTuple):
    """The unique ids of a batch, and where each occurs.

    Attributes:
        unique: int32 `[u]`, ascending.
        offsets: int64 `[u + 1]`. Segment i is `positions[offsets[i]:offsets[i + 1]]`.
        positions: int64 `[trained tokens]`: token positions, by segment, ascending within a segment.
    """

    unique: NDArray[np.int32]
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]

    def first(self, count: int) -> UniqueIds:
        """The index without all but its `count` smallest ids."""
        kept = min(count, len(self.unique))
        return UniqueIds(self.unique[:kept], self.offsets[: kept + 1], self.positions[: self.offsets[kept]])


def clean_ids(
    ids: ArrayLike, rows: int, *, id_policy: str = "error", padding_id: int | None = None
) -> tuple[NDArray[np.int32], IdReport]:
    """Turns token ids into table rows, and -1 where there is none.

    `padding_id` becomes -1 and is no error, also when it lies outside the table. An id outside `[0, rows)` is counted;
    policies `error` and `drop` make it -1 (raising is the host's part of `error`, not this function's), `clamp` makes
    it the nearest row. A clamped id that lands on `padding_id` is padding too: that row is never read nor trained.

    Args:
        ids: integers of any shape.
        rows: number of rows of the table, at most 2^31 - 1.
        id_policy: "error", "drop" or "clamp".
        padding_id: the id that stands for no row, or None.

    Returns:
        int32 ids of the same shape, and the report.

    Raises:
        TypeError: ids are not integers.
        ValueError: unknown policy, or rows out of range.
    """
    ids = np.asarray(ids)
    if ids.size == 0 and ids.dtype.kind == "f":
        ids = ids.astype(np.int32)  # np.asarray([]) is float64
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers, got {ids.dtype}")
    if id_policy not in ID_POLICIES:
        raise ValueError(f"id_policy={id_policy!r} is not one of {', '.join(ID_POLICIES)}")
    if not 0 <= rows < 2**31:
        raise ValueError(f"rows={rows} is not in [0, 2^31)")
    padding = np.zeros(ids.shape, bool) if padding_id is None else ids == padding_id
    negative, beyond = ids < 0, ids >= rows
    bad = (negative | beyond) & ~padding
    cleaned = np.where(bad | padding, 0, ids).astype(np.int64)
    if id_policy == "clamp" and rows > 0:
        cleaned = np.where(bad & beyond, rows - 1, cleaned)
        if padding_id is not None:
            cleaned = np.where(cleaned == padding_id, -1, cleaned)
    else:
        cleaned = np.where(bad, -1, cleaned)
    cleaned = np.where(padding, -1, cleaned)
    offenders = np.flatnonzero(bad)
    first_bad = (int(offenders[0]), int(ids.reshape(-1)[offenders[0]])) if len(offenders) else None
    return cleaned.astype(np.int32), IdReport(len(offenders), first_bad)


def lookup(table: ArrayLike, ids: ArrayLike) -> NDArray[Any]:
    """`out[i] = table[ids[i]]`, bit for bit, NaN payloads included; zeros (+0) where the id is negative.

    Args:
        table: `[rows, width]`, float32, bfloat16 or float16.
        ids: cleaned integers of any shape with n elements, negative for none.

    Returns:
        `[n, width]` in the table's dtype.

    Raises:
        TypeError: the table's dtype is none of the three, or ids are not integers.
        ValueError: the table is not of rank 2, or an id lies beyond it.
    """
    table = np.asarray(table)
    table_dtype(table.dtype)
    if table.ndim != 2:
        raise ValueError(f"a table is [rows, width], got shape {table.shape}")
    ids = cleaned_ids(ids, table.shape[0])
    bits = as_bits(table)
    out = np.zeros((len(ids), table.shape[1]), bits.dtype)
    present = ids >= 0
    out[present] = bits[ids[present]]
    return out.view(table.dtype)


def unique_ids(ids: ArrayLike) -> UniqueIds:
    """The unique ids among cleaned ids (any shape, negative for none), each with its token positions in token order."""
    ids = cleaned_ids(ids, None)
    order = np.argsort(ids, kind="stable")
    positions = order[np.searchsorted(ids[order], 0) :]
    unique, counts = np.unique(ids[positions], return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return UniqueIds(unique.astype(np.int32), offsets, positions.astype(np.int64))


def unique_from_segments(segment_ids: ArrayLike, unique_tokens: ArrayLike, rows: int) -> UniqueIds:
    """The index that a caller's own `segment_ids` and `unique_tokens` describe.

    It holds the ids that a token refers to, and no others, so it is the index that `unique_ids` finds. Tokens whose
    segment is negative or lies in the padding (`unique_tokens >= rows`) are not trained.

    Args:
        segment_ids: integers with N elements, each token's place in `unique_tokens`, negative for none.
        unique_tokens: integers `[num_unique]`, ascending, padded with `rows`.
        rows: number of rows of the table.

    Raises:
        ValueError: `unique_tokens` below `rows` are negative, unsorted or repeated.
    """
    tokens = np.asarray(unique_tokens).reshape(-1).astype(np.int64)
    used = int(np.count_nonzero(tokens < rows))
    unique = tokens[:used]
    if np.any(unique >= rows) or np.any(unique < 0) or np.any(np.diff(unique) <= 0):
        raise ValueError(f"unique_tokens must ascend without repeats in [0, {rows}), then hold {rows} as padding")
    segments = np.asarray(segment_ids).reshape(-1).astype(np.int64)
    trained = (segments >= 0) & (segments < used)
    return unique_ids(np.append(unique, -1)[np.where(trained, segments, -1)])


def cleaned_ids(ids: ArrayLike, rows: int | None) -> NDArray[np.int64]:
    """Flat int64 ids, after the check that they are integers below `rows`."""
    ids = np.asarray(ids)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers, got {ids.dtype}")
    if rows is not None and np.any(ids >= rows):
        position = int(np.argmax(ids.reshape(-1) >= rows))
        raise ValueError(
            f"id {ids.reshape(-1)[position]} at position {position} lies beyond the table's {rows} rows: call clean_ids"
        )
    return ids.reshape(-1).astype(np.int64)
