"""From ``import`` to the first step, each in a process of its own: ours, JAX alone and torch alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.timing import alternately

from .row import Options, Row

_JAX = """
import jax, jax.numpy as jnp

def step(table, ids):
    rows, pull_back = jax.vjp(lambda table: jnp.take(table, ids, axis=0), table)
    return table - 0.1 * pull_back(rows)[0]

jax.block_until_ready(jax.jit(step, donate_argnums=0)(jnp.ones((1000, 16)), jnp.arange(64)))
"""

_TORCH = """
import torch

table = torch.nn.Embedding(1000, 16)
optimizer = torch.optim.Adagrad(table.parameters())
table(torch.arange(64)).square().sum().backward()
optimizer.step()
"""

_OURS = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax_bridge import AsyncEmbedding, RowwiseAdagrad, train_step

words = AsyncEmbedding(
    jax.sharding.Mesh(jax.devices(), ("table",)), table_axis="table", rows=1000, width=16, name="words",
    optimizer=RowwiseAdagrad(0.1),
)
with train_step(
    {"words": words}, lambda params, rows, batch: (rows["words"] ** 2).mean() * params, optax.sgd(0.1),
    ids_of=lambda batch: {"words": batch},
) as step:
    state = step.init(jnp.ones(()), jax.random.key(0))
    state, metrics = step(state, np.arange(64, dtype=np.int32))
    jax.block_until_ready(metrics)
    step.flush(state)
"""


def rows(options: Options) -> Iterator[Row]:
    runs = {name: _process(text) for name, text in (("ours", _OURS), ("jax", _JAX), ("torch", _TORCH))}
    times = alternately(runs, 1 if options.quick else 10, warm_up=0 if options.quick else 1)
    for name, peer in (("jax", "JAX alone"), ("torch", "torch alone")):
        yield Row(
            "from import to the first step",
            "1,000 × 16 fp32, 64 ids, a process each; the native module is built",
            peer,
            times["ours"],
            times[name],
            "every process ends with status 0",
            note="ours imports JAX, torch's libraries and optax, and compiles a step of eight calls",
        )


def _process(text: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", text], check=True)
