"""How many bytes a job allocates: tables and optimizer state on each device, and what a context works in.

The sizes are those of `csrc/context/arena.cpp`, `pipeline.cpp` and `peers.cpp`, for CPU; a test runs jobs and compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..mesh import replica_groups
from ..processes import traffic
from ..validation.checks import Checked, check
from .checking import CheckedJob, handle_arguments
from .job_file import Job, TableSettings

# By staleness: sets of ids that are held at once (looked up, consumed, of the update under way). A step of staleness 0
# may do with fewer. Programs whose ranks never wait for each other in the dense part may need one more.
_BATCHES_HELD = {0: 2, 1: 3}
_SORT_COUNTERS = 3 * 2**11 // 2  # of the radix sort, in 8 bytes; csrc/core/unique.h


@dataclasses.dataclass(frozen=True)
class TableMemory:
    """Bytes of one table, of the device or process that has most of them.

    Attributes:
        name: of the table.
        weights: on each device.
        state: the optimizer's, on each device.
        arena: of a process, for all of its devices.
        devices: of that process.
    """

    name: str
    weights: int
    state: int
    arena: int
    devices: int

    @property
    def arena_of_rank(self) -> int:
        """The process's arena, shared out over its devices."""
        return -(-self.arena // self.devices)

    @property
    def per_rank(self) -> int:
        return self.weights + self.state + self.arena_of_rank


def memory_of(checked: CheckedJob) -> list[TableMemory]:
    """Of each table of a job without problems."""
    return [_memory_of_table(checked.job, settings) for settings in checked.job.tables.values()]


def _memory_of_table(job: Job, settings: TableSettings) -> TableMemory:
    checked = check(handle_arguments(job, settings))
    assert job.mesh is not None
    assert settings.optimizer is not None
    assert checked.dtype is not None
    assert checked.group_size is not None
    shard_width = checked.integers["emb_width"] // checked.group_size
    state = sum(array.nbytes for array in settings.optimizer.init(1).values())
    arenas = _arenas(job, checked)
    return TableMemory(
        name=settings.name,
        weights=settings.rows * shard_width * checked.dtype.itemsize,
        state=settings.rows * state,
        arena=max(arenas),
        devices=int(job.mesh.devices.size) // job.processes,
    )


def _arenas(job: Job, checked: Checked) -> list[int]:
    """Of each process."""
    assert job.mesh is not None
    assert checked.table is not None
    group_size, devices = replica_groups(job.mesh, checked.table.names)
    owner = {device.id: device.process_index for device in job.mesh.devices.flat}
    totals = [0] * job.processes
    known: dict[tuple[tuple[int, ...], int], int] = {}  # groups are alike
    for first in range(0, len(devices), group_size):
        owners = tuple(owner[device] for device in devices[first : first + group_size])
        numbers = {process: number for number, process in enumerate(dict.fromkeys(owners))}
        alike = tuple(numbers[process] for process in owners)
        for process, number in numbers.items():
            key = (alike, number)
            if key not in known:
                ranks = [[rank for rank, o in enumerate(alike) if o == peer] for peer in range(len(numbers))]
                known[key] = _group_bytes(checked, ranks, number, job.staleness)
            totals[process] += known[key]
    return totals


def _group_bytes(checked: Checked, ranks: Sequence[Sequence[int]], process: int, staleness: int) -> int:
    """What the `process` that holds `ranks[process]` of one group allocates for it."""
    assert checked.group_size is not None
    assert checked.dtype is not None
    sizes, group_size, item = checked.integers, checked.group_size, checked.dtype.itemsize
    tokens, width, logical = sizes["tokens_per_batch"], sizes["emb_width"], sizes["logical_width"]
    unique = min(sizes["num_unique"], tokens)
    tokens_per_rank, shard = tokens // group_size, width // group_size

    def columns(rank: int) -> tuple[int, int]:
        return min(rank * shard, logical), min((rank + 1) * shard, logical)

    subtrees = [traffic.subtrees(*columns(rank)) for rank in range(group_size)]
    local = ranks[process]
    rows = len(local) * tokens_per_rank * width * item
    sums = 4 * unique * sum(end - begin for begin, end in map(columns, local))
    grads = tokens * len(local) * shard * item
    statistics = 4 * unique * (sum(subtrees) + 1)
    sorting = 8 * (2 * tokens + _SORT_COUNTERS)
    ids = _BATCHES_HELD[staleness] * 4 * (4 * tokens + 1)
    return (
        rows
        + sums
        + grads
        + statistics
        + sorting
        + ids
        + _peers_bytes(ranks, process, subtrees, tokens_per_rank, shard * item, unique)
    )


def _peers_bytes(
    ranks: Sequence[Sequence[int]],
    process: int,
    subtrees: Sequence[int],
    tokens_per_rank: int,
    shard_bytes: int,
    unique: int,
) -> int:
    """What goes out to the other processes of the group and comes in from them."""
    if len(ranks) == 1:
        return 0
    notice = traffic.NOTICE_BYTES
    own_tokens, own_columns = len(ranks[process]) * tokens_per_rank, len(ranks[process]) * shard_bytes
    own_rows = unique * (process + 1) // len(ranks) - unique * process // len(ranks) + 1
    if len(ranks) == 2:
        own_rows = unique + 1
    total = unique * 4 * sum(subtrees[rank] for rank in ranks[process])
    for peer, of_peer in enumerate(ranks):
        if peer == process:
            continue
        tokens, columns = len(of_peer) * tokens_per_rank, len(of_peer) * shard_bytes
        total += 4 * notice + 4 * own_tokens + 4 * tokens  # ids out and in; both have notices, as have gradient rows
        total += 2 * (tokens * own_columns + own_tokens * columns)  # rows and gradient rows
        total += own_rows * 4 * sum(subtrees[rank] for rank in of_peer)
    return total
