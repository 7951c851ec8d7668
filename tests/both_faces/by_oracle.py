"""A case by NumPy alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_bridge import reference

from .cases import DTYPES, ROWS, Case, Outcome


def run(case: Case) -> Outcome:
    rule = case.full_rule()
    lazy = rule.get("lazy", False)
    simulation = reference.Simulation(
        case.weights().astype(DTYPES[case.dtype]),
        np.full(ROWS, rule.get("initial_accumulator", 0.0), np.float32),
        staleness=case.staleness,
        options=lambda gradient_step, applied_step: options_of(rule, gradient_step),
        last_step=np.zeros(ROWS, np.int32) if lazy else None,
        id_policy=case.id_policy,
        padding_id=case.padding_id,
        num_unique=case.num_unique,
    )
    rows, bad, padding = [], 0, 0
    for batch in case.batches():
        finite = batch.apply and bool(np.isfinite(batch.grads.astype(np.float32)).all())
        result = simulation.step(batch.ids, lambda rows, ids, step, b=batch, f=finite: (b.grads, f))
        rows.append(result.rows)
        bad += result.ids.bad
        padding += int((batch.ids == case.padding_id).sum()) if case.padding_id is not None else 0
    simulation.flush()
    updates = simulation.updates
    return Outcome(
        simulation.table,
        simulation.row_state,
        simulation.last_step,
        np.stack(rows),
        [(update.norm, update.valid) for update in updates],
        [],
        {
            "updates": sum(update.valid for update in updates),
            "skipped_updates": sum(not update.valid for update in updates),
            "bad_ids": bad,
            "padding_ids": padding,
            "saturated": sum(update.saturated for update in updates),
        },
    )


def options_of(rule: dict[str, Any], step: int) -> dict[str, Any]:
    """The operands of one update, written down once more."""
    rate = rule["learning_rate"](step) if callable(rule["learning_rate"]) else rule["learning_rate"]
    decay = np.float32(np.float32(rate) * np.float32(rule.get("weight_decay", 0.0)))
    half_life = rule.get("half_life")
    options = {"learning_rate": rate, "eps": rule["eps"], "max_grad_norm": rule.get("max_grad_norm")}
    if rule.get("lazy"):
        options |= {"accum_decay_rate": math.log(2) / half_life if half_life else 0.0, "weight_decay_rate": decay}
        options |= {"step": step + 1}
    else:
        options |= {"decay_factor": 0.5 ** (1 / half_life) if half_life else 1.0}
        options |= {"weight_decay_factor": np.float32(1) - decay}
    if "rounding" in rule:
        options |= {"rounding": rule["rounding"], "seed": rule["seed"], "rounding_step": step}
    return options
