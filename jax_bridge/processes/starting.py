"""Starting a job of several processes.

JAX connects them (``jax.distributed``); this finds out how, refuses what cannot work before it hangs or ends the
process, and chooses the options under which survivors live on when another process dies.

What remains of JAX's own rules, measured with 0.10.2 on CPU:

- The death of a process other than 0 leaves the others alone. Another one may take its place (``rejoin=True``).
- Process 0 runs the coordination service. When it dies, JAX ends every other process (SIGABRT) at once, and when it is
  stopped or cut off, after ``heartbeat_timeout_seconds``. No option of JAX's prevents that. So process 0 leaves last.
- A process that was stopped for longer than ``heartbeat_timeout_seconds`` counts as dead, and is ended by JAX when it
  goes on.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Mapping, Sequence

import jax

from ..errors import ContextError
from . import coordination
from .leaving import come_back, shutdown
from .meeting import meet
from .timeouts import bound_collectives
from .topology import describe_process, describe_processes, group_processes, processes_of, ranks_of

__all__ = [
    "Job",
    "describe_process",
    "describe_processes",
    "group_processes",
    "initialize",
    "meet",
    "processes_of",
    "ranks_of",
    "shutdown",
]

_HINT = (
    "Give coordinator_address, num_processes and process_id, or start the processes with torchrun (RANK, WORLD_SIZE, "
    "MASTER_ADDR, MASTER_PORT) or srun"
)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process knows of its job."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    source: str = "arguments"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    timeout_seconds: float = 300.0,
    heartbeat_timeout_seconds: int = 100,
    rejoin: bool = False,
) -> Job:
    """Joins this process to a job. Call it first, before anything that asks JAX for its devices.

    What is not given is taken from torchrun's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``; of several
    processes on a machine each sees the GPU ``LOCAL_RANK``), or from what JAX knows about SLURM, Open MPI, Kubernetes
    and Cloud TPU. Under torchrun the coordinator's port is ``JAX_COORDINATOR_PORT``, or the one after ``MASTER_PORT``,
    which torch's own store may hold. Calling it again with the same numbers does nothing.

    Args:
        coordinator_address: "host:port" of process 0, as every process reaches it; the port must be free.
        num_processes: how many processes the job has.
        process_id: the number of this process.
        local_device_ids: the GPUs of this machine that this process uses; all if None.
        timeout_seconds: how long to wait for the other processes.
        heartbeat_timeout_seconds: after how long a silent process counts as dead.
        rejoin: this process takes the place of one that died, in a job whose other processes run.

    Raises:
        ContextError: called too late (JAX has its devices already) or with other numbers than before; the numbers are
            missing, or contradict each other or those of another process; or not all processes came in time.
    """
    given = {"num_processes": num_processes, "process_id": process_id, "coordinator_address": coordinator_address}
    job = _find_job(given, local_device_ids, timeout_seconds)
    if coordination.is_running():
        _require_same(job)
        return job
    if coordination.backend_has_started():
        raise ContextError(
            f"jax_bridge.initialize() came too late to make this process {job.process_id} of {job.num_processes}: JAX "
            "has its devices already. Call it before any computation, jax.devices() or jax.device_put"
        )

    if not rejoin:
        _call_the_roll(job, timeout_seconds)
    coordination.let_survivors_live()
    coordination.let_sigterm_end_this_process()
    coordination.use_gloo_between_cpus()
    bound_collectives()
    jax.distributed.initialize(
        job.coordinator_address,
        job.num_processes,
        job.process_id,
        local_device_ids=job.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(timeout_seconds)),
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )
    if rejoin:
        come_back(job.process_id)
    atexit.register(shutdown)  # so it comes before JAX's own
    return job


def _call_the_roll(job: Job, timeout_seconds: float) -> None:
    # Where somebody is missing, JAX ends the process (SIGABRT) instead of raising.
    from torch_ext.process_groups import ProcessGroupError
    from torch_ext.roll_call import roll_call

    try:
        problem = roll_call(job.coordinator_address, job.process_id, job.num_processes, timeout_seconds=timeout_seconds)
    except ProcessGroupError as error:
        problem = str(error)
    if problem is not None:
        raise ContextError(f"process {job.process_id} of {job.num_processes} cannot join its job: {problem}")


def _find_job(
    given: Mapping[str, int | str | None], local_device_ids: int | Sequence[int] | None, timeout_seconds: float
) -> Job:
    devices = (local_device_ids,) if isinstance(local_device_ids, int) else local_device_ids
    found: dict[str, int | str | None] = {}
    source = "arguments"
    if None in given.values():
        if (torchrun := _torchrun_job()) is not None:
            found, from_torchrun, source = *torchrun, "torchrun"
            devices = from_torchrun if devices is None else devices
            for name, value in given.items():
                if name != "coordinator_address" and value is not None and value != found[name]:
                    variable = {"num_processes": "WORLD_SIZE", "process_id": "RANK"}[name]
                    raise ContextError(
                        f"{name}={value} contradicts torchrun's {variable}={found[name]}: leave it out, or give all of "
                        "coordinator_address, num_processes and process_id"
                    )
        else:
            address, size, rank, detected = coordination.detect(
                given["coordinator_address"],
                num_processes=given["num_processes"],
                process_id=given["process_id"],
                timeout_seconds=int(timeout_seconds),
            )
            found = {"coordinator_address": address, "num_processes": size, "process_id": rank}
            devices, source = (detected if devices is None else devices), "the environment"
    values = {name: found.get(name) if value is None else value for name, value in given.items()}
    if missing := [name for name, value in values.items() if value is None]:
        raise ContextError(f"jax_bridge.initialize() does not know {' and '.join(missing)} of this job. {_HINT}")
    size, rank, address = values["num_processes"], values["process_id"], values["coordinator_address"]
    for name, value in (("num_processes", size), ("process_id", rank)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ContextError(f"{name}={value!r} (from {source}) is not a whole number")
    assert isinstance(size, int)
    assert isinstance(rank, int)
    if not 0 <= rank < size:
        raise ContextError(
            f"process_id={rank} and num_processes={size} (from {source}) contradict each other: processes are numbered "
            f"from 0 to num_processes - 1. {_HINT}"
        )
    return Job(str(address), size, rank, None if devices is None else tuple(devices), source)


def _torchrun_job() -> tuple[dict[str, int | str | None], tuple[int, ...] | None] | None:
    """What torchrun's variables say; None where they are not set."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR") + (() if "JAX_COORDINATOR_PORT" in os.environ else ("MASTER_PORT",))
    if missing := [name for name in needed if name not in os.environ]:
        raise ContextError(
            f"of torchrun's variables {', '.join(missing)} is not set, others are: set {', '.join(needed)}, or none"
        )
    numbers = {name: _number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if "JAX_COORDINATOR_PORT" in os.environ:
        port = _number("JAX_COORDINATOR_PORT")
    else:
        taken = _number("MASTER_PORT") or 0
        port = taken + 1 if taken < 2**16 - 1 else taken - 1
    local = numbers["LOCAL_RANK"]
    alone = numbers["LOCAL_WORLD_SIZE"] in (None, 1)
    return {
        "coordinator_address": f"{os.environ['MASTER_ADDR']}:{port}",
        "num_processes": numbers["WORLD_SIZE"],
        "process_id": numbers["RANK"],
    }, (None if alone or local is None else (local,))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise ContextError(f"{variable}={text!r} is not a whole number")
    return int(text)


def _require_same(job: Job) -> None:
    address, size, rank = coordination.numbers()
    joined = {"coordinator_address": address, "num_processes": size, "process_id": rank}
    if different := [name for name, value in joined.items() if getattr(job, name) != value]:
        raise ContextError(
            "this process has joined a job already: "
            + ", ".join(f"{name} is {joined[name]!r}, now {getattr(job, name)!r}" for name in different)
            + ". A process belongs to one job as long as it lives; start a new process for another one"
        )
