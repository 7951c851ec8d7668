"""What the GPU benchmark measures, and by what it is measured: sizes, ids, bytes. Pure; needs no GPU."""

from __future__ import annotations

import dataclasses

from .ids import IDS

ROWS, TOKENS = 10_000_000, 1_000_000
WIDTHS = (32, 64, 128, 256)
ELEMENT = {"bfloat16": 2, "float32": 4}
# Shares of the copy bandwidth of the same run that are wanted on an H200.
LOOKUP_GOAL, UPDATE_GOAL = 0.90, 0.60
LOOKUP_GOAL_FROM_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """One line of the table."""

    width: int
    dtype: str
    ids: str

    @property
    def row_bytes(self) -> int:
        return self.width * ELEMENT[self.dtype]

    @property
    def has_lookup_goal(self) -> bool:
        return self.width >= LOOKUP_GOAL_FROM_WIDTH and self.ids == "uniform"


def configs(quick: bool) -> list[Config]:
    """All lines; with `quick` one line in six. Lines of one table follow each other."""
    if quick:
        return [Config(width, "bfloat16", ids) for width in (64, 128) for ids in (IDS[0], IDS[2])]
    return [Config(width, dtype, ids) for width in WIDTHS for dtype in ELEMENT for ids in IDS]


def lookup_bytes(tokens: int, row_bytes: int) -> int:
    """Of a lookup: ids read, a row read and a row written for each token.

    Rows that several tokens ask for may come from a cache, so with skewed ids a lookup can be faster than memory.
    """
    return 4 * tokens + 2 * tokens * row_bytes


def update_bytes(tokens: int, distinct: int, row_bytes: int) -> int:
    """The least that an update moves: ids and gradient rows read once; of each distinct row, weights and one float32 of
    state read and written."""
    return 4 * tokens + tokens * row_bytes + distinct * (2 * row_bytes + 8)


def copy_bytes(size: int) -> int:
    """Of a copy: everything is read and written."""
    return 2 * size
