"""What a job allocates above its table and optimizer state, beside what ``async-emb plan`` says before it starts."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.timing import Times
from jax_bridge import AsyncEmbedding, RowwiseAdagrad, train_step, with_next
from jax_bridge.jobs.checking import check_job
from jax_bridge.jobs.document import Document
from jax_bridge.jobs.memory import memory_of

from .row import Options, Row, at_most

ROWS, WIDTH, TOKENS, RANKS = 500_000, 128, 16_384, 4
JOB = f"""
table_axis = "table"
tokens_per_batch = {TOKENS}
staleness = STALENESS
[mesh]
table = {RANKS}
[tables.measured]
rows = {ROWS}
width = {WIDTH}
dtype = "bfloat16"
optimizer = {{ type = "rowwise_adagrad", learning_rate = 0.1 }}
"""
MIB = 2**20


def rows(options: Options) -> Iterator[Row]:
    for staleness in (1,) if options.quick else (0, 1):
        checked = check_job(Document(JOB.replace("STALENESS", str(staleness)), "job.toml"))
        assert not checked.findings, checked.findings
        (planned,) = memory_of(checked)
        measured = _arena_of_a_run(staleness, steps=4 if options.quick else 20)
        yield Row(
            "memory above table and state",
            f"{TOKENS:,} ids, {ROWS:,} × {WIDTH} bf16 over {RANKS} devices, staleness {staleness}",
            "the plan's arena",
            Times(measured / MIB, measured / MIB, 1),
            Times(planned.arena / MIB, planned.arena / MIB, 1),
            "counted by the context after the last step",
            at_most(1.1),
            unit="MiB",
        )


def _arena_of_a_run(staleness: int, steps: int) -> int:
    """Bytes that the context of a training run holds at its end."""
    mesh = jax.sharding.Mesh(jax.devices()[:RANKS], ("table",))
    table = AsyncEmbedding(
        mesh,
        table_axis="table",
        rows=ROWS,
        width=WIDTH,
        name=f"measured with staleness {staleness}",
        dtype=jnp.bfloat16,
        optimizer=RowwiseAdagrad(0.1),
        init=lambda key, shape: np.zeros(shape, np.float32),
    )
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, ROWS, TOKENS).astype(np.int32) for _ in range(steps)]
    step = train_step(
        {"measured": table},
        lambda params, rows, batch: (rows["measured"].astype(jnp.float32) ** 2).mean() + params**2,
        optax.sgd(0.1),
        ids_of=lambda batch: {"measured": batch},
        staleness=staleness,
    )
    with step:
        state = step.init(np.float32(1), jax.random.key(0))
        for batch, upcoming in with_next(batches):
            state, _ = step(state, batch, upcoming)
        step.flush(state)
        return int(step.stats()["measured"]["arena_bytes"])
