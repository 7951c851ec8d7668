"""The model: two towers over embedding rows, and a bias for each.

The tables are not in here: this file sees the rows of a batch and does not care who looked them up. So the asynchronous
tables and the plain JAX peer train the very same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.two_tower.settings import Settings

Params = dict[str, Any]
Rows = Mapping[str, jax.Array]


def init_params(key: jax.Array, settings: Settings) -> Params:
    """Dense parameters, float32: for each tower [width, hidden], [hidden, output], and [width] for the bias."""
    user_key, item_key = jax.random.split(key)
    return {"users": _init_tower(user_key, settings), "items": _init_tower(item_key, settings), "bias": jnp.zeros(())}


def table_initializer(settings: Settings) -> jax.nn.initializers.Initializer:
    """First values of a table, small, so that a user whom training has not seen scores like the average one."""
    return jax.nn.initializers.normal(settings.table_init_scale)


def logits(params: Params, rows: Rows) -> jax.Array:
    """Score of each pair, float32 [B], from `rows["users"]` and `rows["items"]`, [B, width] of any float dtype."""
    user, user_bias = _tower(params["users"], rows["users"])
    item, item_bias = _tower(params["items"], rows["items"])
    return jnp.sum(user * item, axis=-1) + user_bias + item_bias + params["bias"]


def loss_fn(params: Params, rows: Rows, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean logistic loss over the real examples of the batch, a float32 scalar; weight 0 marks filling."""
    score = logits(params, rows)
    # log(1 + exp(score)) - label * score, stable for large scores of either sign.
    losses = jax.nn.softplus(score) - batch["labels"] * score
    return jnp.sum(losses * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)


def ids_of(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Which ids a batch looks up in which table, int32 [B] each."""
    return {"users": batch["users"], "items": batch["items"]}


def _init_tower(key: jax.Array, settings: Settings) -> Params:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (settings.width, settings.hidden)) * np.sqrt(2.0 / settings.width),
        "b1": jnp.zeros(settings.hidden),
        "w2": jax.random.normal(second, (settings.hidden, settings.output)) * np.sqrt(1.0 / settings.hidden),
        "b2": jnp.zeros(settings.output),
        "bias": jnp.full(settings.width, 1.0 / np.sqrt(settings.width)),
    }


def _tower(params: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = rows.astype(jnp.float32)
    hidden = jax.nn.relu(rows @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"], rows @ params["bias"]
