"""The others: the same lookup and the same rule in plain torch, in plain JAX, and in FBGEMM where it is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from .gpu_ours import EPS, LEARNING_RATE, Ours, timed, timed_parts
from .timing import Times, times_of

Pair = tuple[Times | None, Times | None]


def torch_lookup(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, table)


def torch_update(table: torch.Tensor, state: torch.Tensor, ids: torch.Tensor, grads: torch.Tensor) -> None:
    """The backward of an embedding, on the distinct ids, and row-wise Adagrad by index operations."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(grads, inverse, len(unique), -1, False).float()
    accumulator = state.index_select(0, unique) + (sums * sums).mean(1)
    unique = unique.long()  # as index_copy_ wants it
    state.index_copy_(0, unique, accumulator)
    scale = LEARNING_RATE / (accumulator.sqrt() + EPS)
    weights = table.index_select(0, unique).float() - scale[:, None] * sums
    table.index_copy_(0, unique, weights.to(table.dtype))


def of_torch(ours: Ours, ids: list[torch.Tensor], grads: torch.Tensor, repetitions: int) -> Pair:
    lookups: list[Callable[[], Any]] = [lambda x=x: torch_lookup(ours.table, x) for x in ids]
    updates: list[Callable[[], Any]] = [lambda x=x: torch_update(ours.table, ours.state, x, grads) for x in ids]
    return timed(lookups, repetitions=repetitions), timed(updates, repetitions=repetitions)


def jax_take(table: Any, ids: Any) -> Any:
    import jax.numpy as jnp

    return jnp.take(table, ids, axis=0, mode="clip")


def jax_update(table: Any, state: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    """By sorting and scattering. Returns (table, state)."""
    import jax.numpy as jnp

    unique, inverse = jnp.unique(ids, return_inverse=True, size=ids.size, fill_value=len(table))
    sums = jnp.zeros(grads.shape, jnp.float32).at[inverse.reshape(-1)].add(grads.astype(jnp.float32))
    state = state.at[unique].add((sums * sums).mean(1), mode="drop")
    scale = LEARNING_RATE / (jnp.sqrt(state.at[unique].get(mode="clip")) + EPS)
    return table.at[unique].add((-scale[:, None] * sums).astype(table.dtype), mode="drop"), state


def of_jax(ours: Ours, ids: list[torch.Tensor], grads: torch.Tensor, repetitions: int) -> Pair:
    """By the host's clock, over ten calls in a row: XLA's stream takes no events from outside."""
    import jax
    import jax.numpy as jnp

    take, update = jax.jit(jax_take), jax.jit(jax_update, donate_argnums=(0, 1))
    torch.cuda.synchronize()
    borrowed = [jax.dlpack.from_dlpack(x) for x in (ours.table, ours.state, grads, *ids)]
    table, state, gradient_rows, *all_ids = borrowed
    wanted = torch_lookup(ours.table, ids[0])
    got = torch.from_dlpack(jax.block_until_ready(take(table, all_ids[0])))
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), "jax.numpy.take gives other rows"
    lookup = _by_clock([lambda x=x: take(table, x) for x in all_ids], repetitions)

    arrays = (jnp.copy(table), jnp.copy(state))  # what is borrowed cannot be donated

    def next_step(ids: Any) -> Any:
        nonlocal arrays
        arrays = update(*arrays, ids, gradient_rows)
        return arrays

    times = _by_clock([lambda x=x: next_step(x) for x in all_ids], repetitions)
    del arrays
    return lookup, times


def _by_clock(calls: list[Callable[[], Any]], repetitions: int, in_a_row: int = 10) -> Times:
    import jax

    jax.block_until_ready(calls[0]())
    means = []
    for _ in range(-(-repetitions // in_a_row)):
        began = time.perf_counter()
        out = None
        for i in range(in_a_row):
            out = calls[i % len(calls)]()
        jax.block_until_ready(out)
        means.append((time.perf_counter() - began) / in_a_row * 1e6)
    return times_of(means)


def of_fbgemm(ours: Ours, ids: list[torch.Tensor], grads: torch.Tensor, repetitions: int) -> Pair:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    precision = SparseType.BF16 if ours.dtype == "bfloat16" else SparseType.FP32
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ours.rows, ours.width, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        weights_precision=precision,
        output_dtype=precision,
        pooling_mode=PoolingMode.NONE,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    offsets = torch.arange(ours.tokens + 1, device="cuda")
    wide = [x.long() for x in ids]
    outputs: list[torch.Tensor] = []

    def forward(i: int) -> None:
        outputs[:] = [table(wide[i % len(wide)], offsets)]

    lookup, update = timed_parts([forward, lambda i: outputs[0].backward(grads)], repetitions=repetitions)
    return lookup, update


PEERS: dict[str, Callable[[Ours, list[torch.Tensor], torch.Tensor, int], Pair]] = {
    "torch": of_torch,
    "jax": of_jax,
    "fbgemm": of_fbgemm,
}


def absent(peer: str) -> str | None:
    """Why a peer is not measured, or None."""
    module = {"fbgemm": "fbgemm_gpu"}.get(peer, peer)
    return f"{module} is not installed" if importlib.util.find_spec(module) is None else None
