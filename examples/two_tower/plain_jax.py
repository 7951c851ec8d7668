"""The same model in plain JAX: the peer that the asynchronous tables are compared with.

The tables are ordinary parameters in float32, `jax.grad` gives them dense gradients, and row-wise Adagrad is a masked
update of the whole table. It follows the rule of the asynchronous tables, so the loss and the AUC should agree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from examples.two_tower.data import Batch, Dataset
from examples.two_tower.model import Params, Rows, ids_of, init_params, logits, loss_fn, table_initializer
from examples.two_tower.settings import PADDING_ID, Settings

Tables = dict[str, jax.Array]


class PlainState(NamedTuple):
    """tables: float32 [rows, width] each; accumulators: float32 [rows] each."""

    params: Params
    dense: optax.OptState
    tables: Tables
    accumulators: Tables


class PlainTrainer:
    """Trains with dense gradients on the same mesh: tables split by column, batches by example."""

    def __init__(self, settings: Settings, dataset: Dataset, mesh: jax.sharding.Mesh) -> None:
        self._by_example = NamedSharding(mesh, PartitionSpec("table"))
        by_column = NamedSharding(mesh, PartitionSpec(None, "table"))
        replicated = NamedSharding(mesh, PartitionSpec())
        # Said for what goes in and what comes out alike: otherwise the second step would compile again.
        placed = PlainState(params=replicated, dense=replicated, tables=by_column, accumulators=replicated)
        optimizer = optax.adam(settings.dense_learning_rate)
        init = functools.partial(_init, settings, optimizer, {"users": dataset.user_rows, "items": dataset.item_rows})
        self._state = jax.jit(init, out_shardings=placed)(jax.random.key(settings.seed))
        step = functools.partial(_step, settings, optimizer)
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(placed, replicated))
        self._scores = jax.jit(lambda state, ids: logits(state.params, _look_up(state.tables, ids)))

    def pairs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
        for batch in batches:
            yield batch, None  # nothing is fetched ahead

    def step(self, batch: Batch, upcoming: Batch | None) -> jax.Array:
        """Trains on one batch; the loss is a float32 scalar that need not be ready yet."""
        del upcoming
        # One program at a time: with more in flight than the machine has cores, XLA's collectives on CPU can wait for
        # a device whose turn never comes ("may be stuck", after 40 s the process aborts).
        jax.block_until_ready(self._state)
        self._state, loss = self._step(self._state, jax.device_put(batch, self._by_example))
        return loss

    def flush(self) -> None:
        jax.block_until_ready(self._state)

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Scores of pairs, float32 [n], for int32 ids [n]."""
        jax.block_until_ready(self._state)
        scores = self._scores(self._state, {"users": users, "items": items})
        return np.asarray(jax.block_until_ready(scores))

    def exposed_seconds(self) -> float | None:
        return None  # XLA does not say how long a gather was waited for

    def close(self) -> None:
        pass


def rowwise_adagrad(
    table: jax.Array, accumulator: jax.Array, gradient: jax.Array, *, learning_rate: float, eps: float, decay: float
) -> tuple[jax.Array, jax.Array]:
    """One row-wise Adagrad step on a whole table; a row whose gradient is zero keeps weights and accumulator.

    Args:
        table, gradient: float32 [rows, width].
        accumulator: float32 [rows], a decaying sum of mean squared gradients.
        decay: factor on the accumulator of each touched row, 0.5 ** (1 / half_life).

    Returns:
        The new table and accumulator: `a = a * decay + mean(g * g)`, `w = w - learning_rate / (sqrt(a) + eps) * g`.
    """
    square = jnp.sum(gradient * gradient, axis=1) / gradient.shape[1]
    touched = square > 0.0
    accumulated = accumulator * decay + square
    scale = jnp.where(touched, learning_rate / (jnp.sqrt(accumulated) + eps), 0.0)
    return table - scale[:, None] * gradient, jnp.where(touched, accumulated, accumulator)


def _init(
    settings: Settings, optimizer: optax.GradientTransformation, sizes: dict[str, int], key: jax.Array
) -> PlainState:
    params_key, table_key = jax.random.split(key)
    params = init_params(params_key, settings)
    init_table = table_initializer(settings)
    # The keys are dealt out as `train_step(...).init` deals them, so that all schedules start from the same tables.
    tables = {
        name: init_table(one, (rows, settings.width), jnp.float32)
        for (name, rows), one in zip(sorted(sizes.items()), jax.random.split(table_key, len(sizes)), strict=True)
    }
    return PlainState(params, optimizer.init(params), tables, {name: jnp.zeros(rows) for name, rows in sizes.items()})


def _look_up(tables: Tables, ids: dict[str, jax.Array]) -> Rows:
    real = {name: ids[name] != PADDING_ID for name in tables}
    return {
        name: jnp.where(real[name][:, None], table[jnp.where(real[name], ids[name], 0)], 0.0)
        for name, table in tables.items()
    }


def _step(
    settings: Settings, optimizer: optax.GradientTransformation, state: PlainState, batch: dict[str, jax.Array]
) -> tuple[PlainState, jax.Array]:
    def loss_of(params: Params, tables: Tables) -> jax.Array:
        return loss_fn(params, _look_up(tables, ids_of(batch)), batch)

    loss, (dense_gradient, table_gradient) = jax.value_and_grad(loss_of, argnums=(0, 1))(state.params, state.tables)
    updates, dense = optimizer.update(dense_gradient, state.dense, state.params)
    rule = functools.partial(
        rowwise_adagrad,
        learning_rate=settings.table_learning_rate,
        eps=settings.table_eps,
        decay=0.5 ** (1.0 / settings.table_half_life),
    )
    stepped = {name: rule(state.tables[name], state.accumulators[name], table_gradient[name]) for name in state.tables}
    tables = {name: table for name, (table, _) in stepped.items()}
    accumulators = {name: accumulator for name, (_, accumulator) in stepped.items()}
    return PlainState(optax.apply_updates(state.params, updates), dense, tables, accumulators), loss
