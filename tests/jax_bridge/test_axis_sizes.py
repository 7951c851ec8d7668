"""Axes of size one, axes that hold copies, and a single device: the same code, and the same bits (case C4)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from jax_bridge import AsyncEmbedding, ContextError, RowwiseAdagrad, make_context_handle, train_step, with_next

ROWS, WIDTH, TOKENS = 30, 6, 16


def batches() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"ids": rng.integers(0, ROWS, TOKENS, np.int32)} for _ in range(6)]


def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
    # Every row's gradient is the row itself, times a power of two: XLA has no order of addition to choose.
    return 0.125 * (rows["table"] ** 2).sum() + 0 * params


def train(mesh: Mesh, table_axis: Any, data_axis: Any, staleness: int) -> tuple[np.ndarray, np.ndarray]:
    table = AsyncEmbedding(
        mesh,
        table_axis=table_axis,
        data_axis=data_axis,
        rows=ROWS,
        width=WIDTH,
        name="axis sizes",
        optimizer=RowwiseAdagrad(learning_rate=0.1, half_life=20),
    )
    step = train_step(
        {"table": table}, loss_fn, optax.sgd(0.0), ids_of=lambda b: {"table": b["ids"]}, staleness=staleness
    )
    with step:
        state = step.init(np.float32(0), jax.random.key(7))
        for batch, upcoming in with_next(batches()):
            state, _ = step(state, batch, upcoming)
        state = step.flush(state)
        weights, optimizer = table.to_arrays(state.tables["table"])
        rows = np.asarray(table.lookup(state.tables["table"], np.arange(ROWS)))
    assert np.array_equal(rows, weights)
    return weights, optimizer["accumulator"]


@functools.cache
def train_alone(staleness: int) -> tuple[np.ndarray, np.ndarray]:
    return train(mesh_of(1), "table", "table", staleness)


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("data", "table")[-len(sizes) :])


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("mesh", "table_axis", "data_axis"),
    [
        ((4, 1), "table", "table"),
        ((4, 1), ("data", "table"), ("data", "table")),
        ((1, 4), "table", ("data", "table")),
        ((1, 4), ["table"], "table"),
        ((1, 1), "table", ("data", "table")),
        ((2, 2), "table", "table"),
    ],
)
def test_a_mesh_gives_the_bits_of_one_device(mesh, table_axis, data_axis, staleness):
    weights, accumulator = train(mesh_of(*mesh), table_axis, data_axis, staleness)
    alone_weights, alone_accumulator = train_alone(staleness)
    assert weights.tobytes() == alone_weights.tobytes()
    assert accumulator.tobytes() == alone_accumulator.tobytes()
    assert accumulator.any()


def test_every_copy_of_a_table_has_the_same_bits():
    mesh = mesh_of(2, 2)
    table = AsyncEmbedding(
        mesh, table_axis="table", rows=ROWS, width=WIDTH, name="copies", optimizer=RowwiseAdagrad(learning_rate=0.1)
    )
    step = train_step({"table": table}, loss_fn, optax.sgd(0.0), ids_of=lambda b: {"table": b["ids"]})
    with step:
        state = step.init(np.float32(0), jax.random.key(7))
        for batch, upcoming in with_next(batches()):
            state, _ = step(state, batch, upcoming)
        state = step.flush(state)
        shards = {}
        for shard in state.tables["table"].weights.addressable_shards:
            shards.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
    assert [len(copies) for copies in shards.values()] == [2, 2]
    assert all(first == second for first, second in shards.values())


def test_a_mesh_without_devices_is_refused_by_name():
    # JAX lets one be made.
    mesh = Mesh(np.array([], dtype=object), ("table",), axis_types=(AxisType.Auto,))
    with pytest.raises(ContextError, match="mesh"):
        make_context_handle(
            mesh,
            "table",
            data_axis="table",
            tokens_per_batch=TOKENS,
            emb_width=WIDTH,
            num_unique=TOKENS,
            num_devices_per_node=1,
        )
