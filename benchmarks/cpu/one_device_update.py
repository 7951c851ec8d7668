"""One update of row-wise Adagrad on one device, from ids and gradient rows: ours, FBGEMM's, plain JAX.

Each has ``look_up``, the forward that comes before and is not timed, ``update``, and ``result``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P

import jax_bridge

LEARNING_RATE, EPS = 0.05, 1e-8


class OurUpdate:
    """stage_update, update start and done inside one jitted function, behind a lookup in another."""

    def __init__(
        self,
        name: str,
        rows: int,
        width: int,
        dtype: str,
        batches: Sequence[np.ndarray],
        grads: np.ndarray,
        padding_id: int | None = None,
    ) -> None:
        tokens = len(batches[0])
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("table",))
        handle = jax_bridge.make_context_handle(
            mesh,
            "table",
            data_axis="table",
            tokens_per_batch=tokens,
            emb_width=width,
            num_unique=tokens,
            num_devices_per_node=1,
            name=f"benchmark {name} {rows} {tokens}",
            dtype=jnp.dtype(dtype),
            padding_id=padding_id,
        )

        def look_up(ids: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
            table, pin = jax_bridge.lookup_start(ids, table, jnp.zeros(1), handle)
            return table, jax_bridge.lookup_done(pin, handle, token_ids=ids)

        def update(table: jax.Array, state: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            pin = jax_bridge.stage_update(grads, None, None, True, jnp.zeros(1), handle)
            table, state, pin = jax_bridge.rowwise_adagrad_update_start(
                table, state, pin, handle, learning_rate=LEARNING_RATE, eps=EPS, decay_factor=1.0
            )
            norm, _, _, _ = jax_bridge.rowwise_adagrad_update_done(pin, handle)
            return table, state, norm

        table, tokens_of = P(None, "table"), P("table", None)
        self._look_up = jax.jit(
            jax.shard_map(
                look_up, mesh=mesh, in_specs=(P("table"), table), out_specs=(table, tokens_of), check_vma=False
            ),
            donate_argnums=1,
        )
        self._update = jax.jit(
            jax.shard_map(
                update, mesh=mesh, in_specs=(table, P(), tokens_of), out_specs=(table, P(), P()), check_vma=False
            ),
            donate_argnums=(0, 1),
        )
        self._table, self._state = jnp.zeros((rows, width), dtype), jnp.zeros(rows)
        self._grads = jnp.asarray(grads).astype(dtype)
        self._ids = itertools.cycle([jnp.asarray(batch) for batch in batches])

    def look_up(self) -> None:
        self._table, found = self._look_up(next(self._ids), self._table)
        jax.block_until_ready(found)

    def update(self) -> None:
        self._table, self._state, norm = self._update(self._table, self._state, self._grads)
        jax.block_until_ready((self._table, norm))

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self._table), np.asarray(self._state)


class FbgemmUpdate:
    """FBGEMM's fused backward on CPU. Raises ImportError where it is not installed."""

    def __init__(self, rows: int, width: int, batches: Sequence[np.ndarray], grads: np.ndarray) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self._embedding = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            weights_precision=SparseType.FP32,
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.NONE,
            device=torch.device("cpu"),
        )
        for weights in self._embedding.split_embedding_weights():
            weights.zero_()
        self._offsets = torch.arange(len(batches[0]) + 1)
        self._grads = torch.from_numpy(grads)
        self._ids = itertools.cycle([torch.from_numpy(batch).long() for batch in batches])

    def look_up(self) -> None:
        self._rows = self._embedding(next(self._ids), self._offsets)

    def update(self) -> None:
        self._rows.backward(self._grads)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        (weights,) = self._embedding.split_embedding_weights()
        ((state, *_),) = self._embedding.split_optimizer_states()
        return weights.detach().numpy(), state.detach().numpy()


class TorchUpdate:
    """``torch.nn.Embedding`` with sparse gradients, and ``torch.optim.Adagrad``.

    Another rule, of one accumulator for each weight; the mean of a row's accumulators is the row-wise one.
    """

    def __init__(self, rows: int, width: int, batches: Sequence[np.ndarray], grads: np.ndarray) -> None:
        self._embedding = torch.nn.Embedding(rows, width, sparse=True)
        torch.nn.init.zeros_(self._embedding.weight)
        self._optimizer = torch.optim.Adagrad(self._embedding.parameters(), lr=LEARNING_RATE, eps=EPS)
        self._grads = torch.from_numpy(grads)
        self._ids = itertools.cycle([torch.from_numpy(batch).long() for batch in batches])

    def look_up(self) -> None:
        self._rows = self._embedding(next(self._ids))

    def update(self) -> None:
        self._optimizer.zero_grad()
        self._rows.backward(self._grads)
        self._optimizer.step()

    def result(self) -> tuple[None, np.ndarray]:
        return None, self._optimizer.state[self._embedding.weight]["sum"].mean(1).numpy()


class JaxUpdate:
    """The same rule in jax.numpy, jitted, with the table donated."""

    def __init__(self, rows: int, width: int, batches: Sequence[np.ndarray], grads: np.ndarray) -> None:
        def update(table: jax.Array, state: jax.Array, ids: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
            unique, segments = jnp.unique(ids, size=len(ids), fill_value=rows, return_inverse=True)
            sums = jax.ops.segment_sum(grads, segments, num_segments=len(ids))
            state = state.at[unique].add(jnp.mean(sums * sums, axis=1), mode="drop")
            step = LEARNING_RATE / (jnp.sqrt(state.at[unique].get(mode="fill", fill_value=1)) + EPS)
            return table.at[unique].add(-step[:, None] * sums, mode="drop"), state

        self._update = jax.jit(update, donate_argnums=(0, 1))
        self._take = jax.jit(lambda table, ids: jnp.take(table, ids, axis=0))
        self._table, self._state = jnp.zeros((rows, width)), jnp.zeros(rows)
        self._grads = jnp.asarray(grads)
        self._batches = itertools.cycle([jnp.asarray(batch) for batch in batches])

    def look_up(self) -> None:
        self._ids = next(self._batches)
        jax.block_until_ready(self._take(self._table, self._ids))

    def update(self) -> None:
        self._table, self._state = self._update(self._table, self._state, self._ids, self._grads)
        jax.block_until_ready((self._table, self._state))

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self._table), np.asarray(self._state)


class OperatorsUpdate:
    """Our unique_ids, segment_sum and rowwise_adagrad_ on tensors; the forward is gather_rows."""

    def __init__(self, rows: int, width: int, batches: Sequence[np.ndarray], grads: np.ndarray) -> None:
        self._table, self._state = torch.zeros(rows, width), torch.zeros(rows)
        self._grads = torch.from_numpy(grads)
        self._batches = itertools.cycle([torch.from_numpy(batch) for batch in batches])

    def look_up(self) -> None:
        self._ids = next(self._batches)
        torch.ops.async_emb.gather_rows(self._table, self._ids)

    def update(self) -> None:
        operators = torch.ops.async_emb
        unique, offsets, positions = operators.unique_ids(self._ids)
        sums, statistics = operators.segment_sum(self._grads, offsets, positions)
        operators.rowwise_adagrad_(
            self._table, self._state, unique, sums, statistics, learning_rate=LEARNING_RATE, eps=EPS
        )

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        return self._table.numpy(), self._state.numpy()
