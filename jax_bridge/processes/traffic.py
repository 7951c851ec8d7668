"""How many bytes a step sends from one process to the others, and how long that takes. See docs/scale.md.

The model of time is Hockney's: a message of n bytes takes ``latency + n / bandwidth`` (R. Hockney, "The communication
challenge for MPP", Parallel Computing 20, 1994). A process sends to its peers one after the other over one link.
"""

from __future__ import annotations

import dataclasses

NOTICE_BYTES = 640  # what processes tell each other at each start; sizeof(Notice) of the native module, rounded up


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one process sends in one step.

    Attributes:
        lookup_bytes: of a lookup.
        update_bytes: of an update.
        lookup_rounds: messages to each peer that wait for one another, of a lookup.
        update_rounds: of an update.
        peers: other processes.
    """

    lookup_bytes: int
    update_bytes: int
    lookup_rounds: int
    update_rounds: int
    peers: int

    @property
    def step_bytes(self) -> int:
        return self.lookup_bytes + self.update_bytes

    def seconds(self, *, latency: float, bandwidth: float) -> float:
        """Of one step. latency in seconds a message, bandwidth in bytes a second."""
        rounds = self.lookup_rounds + self.update_rounds
        return rounds * (latency if self.peers else 0.0) + self.step_bytes / bandwidth


def column_sharded(
    *,
    processes: int,
    ranks_per_process: int,
    tokens_per_rank: int,
    width: int,
    itemsize: int,
    unique: int,
    logical_width: int | None = None,
    process: int = 0,
) -> Traffic:
    """A table that is sharded by columns, as this package does it: every process needs all ids, and sends its columns
    of the rows of everybody's tokens.

    Args:
        processes: of the group, with the same number of ranks each, neighbours in the order of the ranks.
        ranks_per_process: devices of the group in each process.
        tokens_per_rank: tokens of a batch on one rank.
        width: columns of a row, padding included; a multiple of the number of ranks.
        itemsize: bytes of an element: 4 or 2.
        unique: distinct ids of the whole batch.
        logical_width: columns that are not padding; all if None.
        process: whose bytes; they differ where the columns are not a power of two.
    """
    peers = processes - 1
    tokens = ranks_per_process * tokens_per_rank
    columns = width // processes
    begin, end = (min(edge * columns, logical_width or width) for edge in (process, process + 1))
    shard = columns // ranks_per_process
    own_subtrees = sum(
        subtrees(min(first, end), min(first + shard, end)) for first in range(begin, begin + columns, max(shard, 1))
    )
    rows = tokens * columns * itemsize
    # Each process works out the statistics of a slice of the distinct rows; of two, each works out all.
    own = unique * (process + 1) // processes - unique * process // processes
    sliced = 4 * (unique - own) * own_subtrees + peers * 4 * own
    statistics = sliced if processes > 2 else peers * 4 * unique * own_subtrees
    return Traffic(
        lookup_bytes=peers * (NOTICE_BYTES + 4 * tokens + rows),
        update_bytes=peers * (NOTICE_BYTES + rows) + statistics,
        lookup_rounds=2 if peers else 0,
        update_rounds=(2 if processes == 2 else 3) if peers else 0,
        peers=peers,
    )


def row_sharded(*, ranks: int, tokens_per_rank: int, width: int, itemsize: int, unique_per_rank: int) -> Traffic:
    """A table that is sharded by rows, with the ids of a rank made unique before they are sent, evenly spread over the
    owners: ids go to the owners, rows come back, and the sums of their gradients go out in fp32. Planned, not built."""
    peers = ranks - 1
    away = unique_per_rank * peers // ranks
    return Traffic(
        lookup_bytes=away * (4 + width * itemsize),
        update_bytes=away * (4 + width * 4),
        lookup_rounds=2 if peers else 0,
        update_rounds=1 if peers else 0,
        peers=peers,
    )


def subtrees(begin: int, end: int) -> int:
    """Whole dyadic subtrees that cover the columns [begin, end)."""
    count = 0
    while begin < end:
        size = begin & -begin or 1 << (end - begin).bit_length()
        while begin + size > end:
            size //= 2
        begin += size
        count += 1
    return count
