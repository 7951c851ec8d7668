"""A small training program over two tables, for tests of the schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jax_bridge import AsyncEmbedding, RowwiseAdagrad, TrainStep, train_step, with_next

from . import _training as training
from ._programs import mesh_of

NAMES = ("items", "users")
ROWS = {"items": 53, "users": 101}
WIDTH = 8
STEPS = 30  # of train_real_model
TOKENS = 64  # on four devices 64 bytes of ids, which JAX would read in place if it were let

LossFunction = Callable[[Any, Mapping[str, Any], Any], Any]


def losses_of(params: Any, rows: Mapping[str, Any], batch: Any) -> Any:
    """One loss for each example: [TOKENS]."""
    towers = [jnp.tanh(rows[name] @ params[name]) for name in NAMES]
    return ((towers[0] * towers[1]).sum(-1) - batch["label"]) ** 2


def mean_loss(params: Any, rows: Mapping[str, Any], batch: Any) -> Any:
    return losses_of(params, rows, batch).mean()


def make_step(mesh: Mesh, loss_fn: LossFunction = mean_loss, **options: Any) -> TrainStep:
    optimizer = RowwiseAdagrad(learning_rate=0.05, half_life=20)
    tables = {
        name: AsyncEmbedding(
            mesh, table_axis=mesh.axis_names, rows=ROWS[name], width=WIDTH, name=name, optimizer=optimizer
        )
        for name in NAMES
    }
    return train_step(tables, loss_fn, optax.sgd(0.05), ids_of=ids_of, **options)


def ids_of(batch: Any) -> dict[str, Any]:
    return {name: batch[name] for name in NAMES}


def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {name: 0.3 * rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in NAMES}


def make_batches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Batches whose ids overlap from one to the next, and within one."""
    rng = np.random.default_rng(seed)
    return [
        {name: rng.integers(0, ROWS[name], TOKENS).astype(np.int32) for name in NAMES}
        | {"label": rng.normal(size=TOKENS).astype(np.float32)}
        for _ in range(count)
    ]


def stacked(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """For a scan: every leaf has the batches as its first dimension."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def scanned(step: TrainStep) -> Any:
    """(state, batches, next_ids) -> (state, metrics): steps of staleness 1 in a scan, with the lookup of the first
    batch before it and the last step's update after it."""
    program = step.program_for(make_batches(1)[0])

    def run(state: Any, batches: Any, next_ids: Any) -> Any:
        ids = ids_of(batches)
        tables, pins, _ = program.arm(state.tables, jax.tree.map(lambda x: x[0], ids))
        state = state._replace(tables=tables, pins=pins)
        state, metrics = jax.lax.scan(lambda s, x: program.stale(s, *x), state, (batches, ids, next_ids))
        tables, reports = program.apply_staged(state.tables, state.step - 1, program.disarm(state.pins))
        return state._replace(tables=tables), (metrics, reports)

    return jax.jit(run, donate_argnums=0)


def unrolled(step: TrainStep) -> Any:
    """As ``scanned``, without a loop in the program: (state, batches) -> (state, metrics, reports)."""
    program = step.program_for(make_batches(1)[0])

    def run(state: Any, batches: Any) -> Any:
        tables, pins, _ = program.arm(state.tables, ids_of(batches[0]))
        state, metrics = state._replace(tables=tables, pins=pins), []
        for batch, upcoming in zip(batches, [*batches[1:], batches[-1]], strict=True):
            state, of_step = program.stale(state, batch, ids_of(batch), ids_of(upcoming))
            metrics.append(of_step)
        tables, reports = program.apply_staged(state.tables, state.step - 1, program.disarm(state.pins))
        return state._replace(tables=tables), (metrics, reports)

    return jax.jit(run, donate_argnums=0)


def next_ids_of(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """What each step of a scan arms: the ids of the batch after it; the last arms its own again."""
    return ids_of(stacked([*batches[1:], batches[-1]]))


@functools.cache
def train_real_model(
    ranks: int, staleness: int, microbatches: int = 1, explicit: bool = False
) -> tuple[Any, Any, list[float], Any]:
    """(params, tables, losses, first tables)."""
    mesh = mesh_of(ranks, explicit=explicit)
    tables = {
        name: AsyncEmbedding(
            mesh,
            table_axis="table",
            rows=ROWS[name],
            width=WIDTH,
            name=name,
            optimizer=RowwiseAdagrad(learning_rate=0.05, half_life=20),
            init=training.quick_init,
        )
        for name in NAMES
    }
    options = {"ids_of": ids_of, "staleness": staleness, "microbatches": microbatches}
    with train_step(tables, mean_loss, optax.sgd(0.05), **options) as step:
        state = step.init(make_params(), jax.random.key(0))
        first = {name: table.to_arrays(state.tables[name])[0] for name, table in step.tables.items()}
        losses = []
        for batch, upcoming in with_next(make_batches(STEPS)):
            state, metrics = step(state, batch, upcoming)
            losses.append(metrics["loss"])
        state = step.flush(state)
        tables = {name: table.to_arrays(state.tables[name])[0] for name, table in step.tables.items()}
        return jax.device_get(state.params), tables, [float(x) for x in losses], first


def assert_close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, wanted)
