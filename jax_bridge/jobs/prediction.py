"""How long a job's lookups and updates take, and how much of that a step waits for: a model, not a measurement.

Links follow Hockney's model (`jax_bridge.processes.traffic`, docs/scale.md). What a process does in its own memory
takes its bytes over the memory's bandwidth. With staleness 1 an update runs from the begin of the dense part on, and
a lookup when the forward and the update are over; what ends before the backward does is hidden (docs/step.md).
"""

from __future__ import annotations

import dataclasses

from ..mesh import replica_groups
from ..processes import traffic
from ..validation.checks import check
from .checking import CheckedJob, handle_arguments
from .job_file import Job, TableSettings


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a job runs on, and what it does besides.

    Attributes:
        bandwidth: of the link of a process, in bytes a second.
        latency: of a message, in seconds.
        memory_bandwidth: of a process, in bytes a second.
        dense_seconds: forward and backward of a step.
        forward_share: how much of that is the forward.
        unique_share: distinct ids among the tokens of a batch.
    """

    bandwidth: float
    latency: float
    memory_bandwidth: float
    dense_seconds: float
    forward_share: float
    unique_share: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one step, on one process: bytes sent to others, and seconds."""

    lookup_bytes: int
    update_bytes: int
    lookup_seconds: float
    update_seconds: float

    @property
    def bytes_sent(self) -> int:
        return self.lookup_bytes + self.update_bytes

    @property
    def seconds(self) -> float:
        return self.lookup_seconds + self.update_seconds

    def hidden_seconds(self, machine: Machine, staleness: int) -> tuple[float, float]:
        """How much of the update and of the lookup runs beside the dense part."""
        if staleness == 0:
            return 0.0, 0.0
        dense = machine.dense_seconds
        begin = max(self.update_seconds, dense * machine.forward_share)
        return min(self.update_seconds, dense), min(self.lookup_seconds, max(0.0, dense - begin))

    def exposed_seconds(self, machine: Machine, staleness: int) -> float:
        """What a step waits for."""
        return self.seconds - sum(self.hidden_seconds(machine, staleness))

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


NOTHING = Cost(0, 0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one table, in both layouts. ``processes`` share one copy of it."""

    name: str
    processes: int
    columns: Cost
    rows: Cost


def predict(checked: CheckedJob, machine: Machine) -> list[Prediction]:
    """For each table of a job without problems."""
    return [_predict(checked.job, settings, machine) for settings in checked.job.tables.values()]


def _predict(job: Job, settings: TableSettings, machine: Machine) -> Prediction:
    found = check(handle_arguments(job, settings))
    assert job.mesh is not None
    assert found.table is not None
    assert found.group_size is not None
    assert found.dtype is not None
    sizes, ranks, item = found.integers, found.group_size, found.dtype.itemsize
    _, devices = replica_groups(job.mesh, found.table.names)
    owner = {device.id: device.process_index for device in job.mesh.devices.flat}
    processes = len({owner[device] for device in devices[:ranks]})
    groups = max(1, int(job.mesh.devices.size) // ranks // max(1, job.processes // processes))  # of one process
    tokens, width = sizes["tokens_per_batch"], sizes["emb_width"]
    unique = max(1, min(sizes["num_unique"], round(tokens * machine.unique_share)))
    own_tokens = tokens // processes

    by_columns = traffic.column_sharded(
        processes=processes,
        ranks_per_process=ranks // processes,
        tokens_per_rank=tokens // ranks,
        width=width,
        logical_width=sizes["logical_width"],
        itemsize=item,
        unique=unique,
    )
    by_rows = traffic.row_sharded(
        ranks=processes,
        tokens_per_rank=own_tokens,
        width=width,
        itemsize=item,
        unique_per_rank=max(1, round(own_tokens * machine.unique_share)),
    )
    # In memory the layouts do the same work: rows are read and written once, gradient rows twice (they are staged, and
    # summed), sums and the rows that they change once each way.
    columns = width // processes
    lookup = 2 * tokens * columns * item
    update = 3 * tokens * columns * item + 2 * unique * columns * (4 + item)
    return Prediction(
        name=settings.name,
        processes=processes,
        columns=_cost(by_columns, groups, lookup, update, machine),
        rows=_cost(by_rows, groups, lookup, update, machine),
    )


def _cost(sent: traffic.Traffic, groups: int, lookup: int, update: int, machine: Machine) -> Cost:
    def seconds(rounds: int, bytes_sent: int, in_memory: int) -> float:
        latency = rounds * machine.latency if sent.peers else 0.0
        return latency + groups * (bytes_sent / machine.bandwidth + in_memory / machine.memory_bandwidth)

    return Cost(
        groups * sent.lookup_bytes,
        groups * sent.update_bytes,
        seconds(sent.lookup_rounds, sent.lookup_bytes, lookup),
        seconds(sent.update_rounds, sent.update_bytes, update),
    )


def choice(predictions: list[Prediction]) -> tuple[str, str]:
    """("columns" or "rows", why) for the whole job."""
    columns = sum((p.columns for p in predictions), NOTHING)
    rows = sum((p.rows for p in predictions), NOTHING)
    if columns.bytes_sent == 0:
        return "columns", (
            "a table lies within one process, where ranks read each other's memory and nothing is sent; columns spread "
            "hot rows evenly, and give the same bits on any number of ranks"
        )
    if columns.seconds <= rows.seconds:
        return "columns", (
            f"they send {_megabytes(columns)} a step against {_megabytes(rows)} by rows, and give the same bits on any "
            "number of ranks"
        )
    return "rows", (
        f"they send {_megabytes(rows)} a step against {_megabytes(columns)} by columns: {_milliseconds(rows)} against "
        f"{_milliseconds(columns)}"
    )


def _megabytes(cost: Cost) -> str:
    return f"{cost.bytes_sent / 1e6:.3g} MB"


def _milliseconds(cost: Cost) -> str:
    return f"{cost.seconds * 1e3:.3g} ms"
