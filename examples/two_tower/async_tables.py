"""The model on asynchronous sharded tables. Everything this example needs to know about them is in this file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np
import optax

from examples.two_tower.data import Batch, Dataset
from examples.two_tower.model import ids_of, init_params, logits, loss_fn, table_initializer
from examples.two_tower.settings import PADDING_ID, Settings
from jax_bridge import AsyncEmbedding, RowwiseAdagrad, train_step, with_next


class AsyncTrainer:
    """Trains with staleness 1 (the update of a step overlaps the next one) or 0 (one chain, the exact schedule)."""

    def __init__(self, settings: Settings, dataset: Dataset, mesh: jax.sharding.Mesh) -> None:
        def embedding(name: str, rows: int) -> AsyncEmbedding:
            return AsyncEmbedding(
                mesh,
                table_axis="table",
                rows=rows,
                width=settings.width,
                name=name,
                dtype=settings.dtype,
                padding_id=PADDING_ID,
                init=table_initializer(settings),
                optimizer=RowwiseAdagrad(
                    learning_rate=settings.table_learning_rate,
                    half_life=settings.table_half_life,
                    eps=settings.table_eps,
                ),
            )

        self.tables = {
            "users": embedding("users", dataset.user_rows),
            "items": embedding("items", dataset.item_rows),
        }
        self._cleanup = contextlib.ExitStack()
        self._step = self._cleanup.enter_context(
            train_step(
                self.tables,
                loss_fn,
                optax.adam(settings.dense_learning_rate),
                ids_of=ids_of,
                staleness=1 if settings.schedule == "staleness1" else 0,
            )
        )
        key, table_key = jax.random.split(jax.random.key(settings.seed))
        self.state = self._step.init(init_params(key, settings), table_key)
        self._logits = jax.jit(logits)

    def pairs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
        """Each batch with the one after it, whose rows are looked up while this one is in its backward pass."""
        return with_next(batches)

    def step(self, batch: Batch, upcoming: Batch | None) -> jax.Array:
        """Trains on one batch; the loss is a float32 scalar that need not be ready yet."""
        self.state, metrics = self._step(self.state, batch, upcoming)
        return metrics["loss"]

    def flush(self) -> None:
        """Applies the gradients of the last step and waits for them."""
        self.state = self._step.flush(self.state)
        jax.block_until_ready(self.state.tables)

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Scores of pairs, float32 [n], for int32 ids [n]; works in the middle of training."""
        ids = {"users": users, "items": items}
        rows = {name: table.lookup(self.state.tables[name], ids[name]) for name, table in self.tables.items()}
        # On one device: every process has all rows and parameters, and computes all scores.
        return np.asarray(self._logits(jax.device_get(self.state.params), rows))

    def exposed_seconds(self) -> float | None:
        """Seconds that the steps so far waited for lookups and updates: mean over devices, sum over tables."""
        return sum(table.get("exposed_wait_seconds", 0.0) for table in self._step.stats().values())

    def close(self) -> None:
        self._cleanup.close()
