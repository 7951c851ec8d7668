"""What somebody does first with an installed async-emb. Fails if anything but the installed packages is used.

``python -I smoke.py ORIGIN``, where ORIGIN says which native module is expected: "installed" or "to be built". With the
latter nothing is run that needs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_bridge
import torch_ext
from jax_bridge import AsyncEmbedding, RowwiseAdagrad, train_step, with_next
from torch_ext import _load


def main(origin: str) -> None:
    for package in (jax_bridge, torch_ext):
        assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    state = _load.state()
    assert state.origin == origin, state
    if origin == "installed":
        use_with_torch()
        use_with_jax()
    print(f"{origin}: {state.path or state.reason}")


def use_with_torch() -> None:
    table = torch.randn(50, 8, dtype=torch.bfloat16)
    ids = torch.tensor([[3, 49], [0, 3]])
    assert torch.equal(torch_ext.gather_rows(table, ids), table[ids])


def use_with_jax() -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("table",))
    rule = RowwiseAdagrad(learning_rate=0.1)
    words = AsyncEmbedding(mesh, table_axis="table", rows=100, width=16, name="words", optimizer=rule)

    def loss_fn(params, rows, batch):
        return jnp.mean((rows["words"] @ params - batch["y"]) ** 2)

    ids = np.arange(64, dtype=np.int32)
    batches = [{"ids": ids, "y": np.sin(ids).astype(np.float32)}] * 20
    losses = []
    with train_step(
        {"words": words}, loss_fn, optax.adam(1e-2), ids_of=lambda batch: {"words": batch["ids"]}, staleness=1
    ) as step:
        state = step.init(params=np.full(16, 0.25, np.float32), key=jax.random.key(0))
        for batch, upcoming in with_next(batches):
            state, metrics = step(state, batch, upcoming)
            losses.append(float(metrics["loss"]))
        state = step.flush(state)
        table = np.asarray(state.tables["words"].weights)
        rows = np.asarray(words.lookup(state.tables["words"], [3, 99, 3]))
    assert np.array_equal(rows, table[[3, 99, 3]])
    assert losses[-1] < 0.8 * losses[0], losses


if __name__ == "__main__":
    main(sys.argv[1])
