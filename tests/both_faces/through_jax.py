"""A case through ``jax_bridge.AsyncEmbedding`` and ``train_step``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_bridge import AsyncEmbedding, IdError, RowwiseAdagrad, TrainStep, train_step, with_next
from tests.jax_bridge._programs import mesh_of

from .cases import COUNTS, ROWS, SHOWN_BY_FACES, Case, Outcome


def make(case: Case) -> TrainStep:
    table = AsyncEmbedding(
        mesh_of(case.ranks),
        table_axis="table",
        rows=ROWS,
        width=case.width,
        name="table",
        optimizer=RowwiseAdagrad(**case.full_rule()),
        dtype=case.dtype,
        init=lambda key, shape: case.weights(),
        id_policy=case.id_policy,
        padding_id=case.padding_id,
        num_unique=case.num_unique,
    )
    return train_step(
        {"table": table},
        _loss,
        optax.sgd(0.0),
        ids_of=lambda batch: {"table": batch["ids"]},
        staleness=case.staleness,
        has_aux=True,
    )


def _loss(params: Any, rows: Any, batch: Any) -> Any:
    """Its gradient with respect to the rows is the batch's gradient rows, bit for bit."""
    product = rows["table"].astype(jnp.float32) * batch["grads"].astype(jnp.float32)
    return product.sum() + params["shift"] + batch["other"], rows["table"]


def start(step: TrainStep) -> Any:
    return step.init({"shift": np.float32(0)}, jax.random.key(0))


def batches_of(case: Case) -> list[dict[str, Any]]:
    # Ids on a device, where nobody looks at them before the step.
    return [
        {
            "ids": jnp.asarray(batch.ids),
            "grads": batch.grads,
            "other": np.float32(0 if batch.apply else np.nan),
        }
        for batch in case.batches()
    ]


def run(case: Case) -> Outcome:
    rows, reports, errors = [], [], []
    with make(case) as step:
        table = step.tables["table"]
        state = start(step)
        batches = batches_of(case)
        for number, (batch, upcoming) in enumerate(with_next(batches)):
            jax.block_until_ready(state)  # or what the step before has to say comes at one call or the next
            try:
                state, metrics = step(state, batch, upcoming)
            except IdError as error:
                errors.append((number, str(error)))
                state, metrics = step(state, batch, upcoming)
            rows.append(np.asarray(metrics["aux"]))
            reports.append((np.float32(metrics["norm"]["table"]), bool(metrics["valid"]["table"])))
        try:
            state = step.flush(state)
        except IdError as error:
            errors.append((len(batches), str(error)))
            state = error.state if hasattr(error, "state") else step.flush(state)
        stats = table.stats()
        weights, optimizer = table.to_arrays(state.tables["table"])
    return Outcome(
        weights,
        optimizer["accumulator"],
        optimizer.get("last_step"),
        np.stack(rows),
        reports[1:] if case.staleness else reports,  # the first had none to report; the last is the flush's
        errors,
        {key: int(stats[key]) for key in (*COUNTS, *SHOWN_BY_FACES)},
    )
