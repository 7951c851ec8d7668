"""Batches of a loop, and widths that ranks can share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Batch = TypeVar("Batch")


def with_next(loader: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Pairs of each batch and the one after it; the last has None."""
    iterator = iter(loader)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for upcoming in iterator:
        yield current, upcoming
        current = upcoming
    yield current, None


def pad_width(width: int, group_size: int) -> int:
    """The smallest multiple of `group_size` that is not below `width` (columns, both positive)."""
    if width < 1 or group_size < 1:
        raise ValueError(f"pad_width needs a positive width and group_size, got {width} and {group_size}")
    return -(-int(width) // int(group_size)) * int(group_size)
