"""Runs jobs of job files for a few steps, and says what they have allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_bridge import AsyncEmbedding, train_step, with_next
from jax_bridge.jobs.checking import CheckedJob, check_job
from jax_bridge.jobs.document import Document
from jax_bridge.jobs.job_file import Job, TableSettings

STEPS = 4


def read(path: Path) -> CheckedJob:
    return check_job(Document(path.read_text(), path.name))


def alike(jobs: Mapping[str, Job]) -> list[dict[str, Job]]:
    """The jobs in groups that one compiled step can run: those of one mesh, with the same axes and schedule."""
    groups: dict[Any, dict[str, Job]] = {}
    for name, job in jobs.items():
        assert job.mesh is not None
        key = (tuple(job.mesh.shape.items()), str(job.table_axis), str(job.data_axis), job.staleness)
        groups.setdefault(key, {})[name] = job
    return list(groups.values())


def run(jobs: Mapping[str, Job]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes of each job's tables: weights and state of one device, arena of this process. The jobs are `alike`."""
    first = next(iter(jobs.values()))
    assert first.mesh is not None
    mesh = jax.sharding.Mesh(_devices(first).reshape(tuple(first.mesh.shape.values())), first.mesh.axis_names)
    settings = {f"{name}/{table}": (job, job.tables[table]) for name, job in jobs.items() for table in job.tables}
    tables = {name: _table(job, mesh, name, table) for name, (job, table) in settings.items()}
    batches = [
        {name: rng.integers(0, t.rows, t.tokens_per_batch).astype(np.int32) for name, (_, t) in settings.items()}
        for rng in map(np.random.default_rng, range(STEPS))
    ]
    step = train_step(tables, _loss, optax.sgd(0.1), ids_of=lambda batch: batch, staleness=first.staleness)
    with step:
        state = step.init({"scale": np.float32(1)}, jax.random.key(0))
        for batch, upcoming in with_next(batches):
            state, metrics = step(state, batch, upcoming)
        state = step.flush(state)
        assert np.isfinite(float(metrics["loss"]))
        stats = step.stats()
        measured: dict[str, dict[str, dict[str, int]]] = {name: {} for name in jobs}
        for name, of_table in stats.items():
            assert of_table["updates"] > 0
            job, _, table = name.rpartition("/")
            measured[job][table] = {**_bytes(state.tables[name]), "arena": int(of_table["arena_bytes"])}
    return measured


def run_in_processes(number: int, size: int, port: int, paths: Sequence[str]) -> dict[str, Any]:
    """As `run`, of all jobs, in one of several processes."""
    from jax_bridge import initialize

    initialize(f"127.0.0.1:{port}", size, number)
    measured = {}
    for group in alike({path: read(Path(path)).job for path in paths}):
        measured |= run(group)
    return measured


def _devices(job: Job) -> Any:
    """The first devices of each process, as many as the job has in one."""
    assert job.mesh is not None
    each = job.mesh.devices.size // jax.process_count()
    by_process = [[d for d in jax.devices() if d.process_index == p][:each] for p in range(jax.process_count())]
    return np.array([device for devices in by_process for device in devices])


def _table(job: Job, mesh: Any, name: str, settings: TableSettings) -> AsyncEmbedding:
    return AsyncEmbedding(
        mesh,
        table_axis=job.table_axis,
        data_axis=job.data_axis,
        rows=settings.rows,
        width=settings.logical_width or settings.width,
        name=name,
        optimizer=settings.optimizer,
        dtype=settings.dtype,
        id_policy=settings.id_policy,
        padding_id=settings.padding_id,
        num_unique=settings.num_unique,
        init=lambda key, shape: np.full(shape, 0.5, np.float32),
    )


def _loss(params: Any, rows: Any, batch: Any) -> Any:
    return params["scale"] * sum(jnp.mean(rows[name].astype(jnp.float32) ** 2) for name in rows)


def _bytes(state: Any) -> dict[str, int]:
    (weights,) = {shard.data.nbytes for shard in state.weights.addressable_shards}
    return {"weights": weights, "state": sum(x.addressable_shards[0].data.nbytes for x in state.optimizer.values())}
