"""A dense part that goes over a batch in pieces: one lookup, one update, the same numbers up to rounding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jax_bridge import ContextError

from . import _training as training
from . import _two_tables as two


@pytest.mark.parametrize("staleness", [0, 1])
def test_microbatches_change_nothing_but_rounding(staleness):
    wanted = two.train_real_model(2, staleness)[:3]
    for pieces in (2, 4):
        two.assert_close(two.train_real_model(2, staleness, microbatches=pieces)[:3], wanted)


@pytest.mark.parametrize("staleness", [0, 1])
def test_microbatches_share_one_lookup_and_one_update(staleness):
    """Also with ids of two dimensions, and an auxiliary output."""

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        assert rows["items"].shape[1:] == (3, 6)
        score = rows["users"].sum(-1) + rows["items"].sum((1, 2)) * params
        return ((score - batch["label"]) ** 2).mean(), score

    def run(pieces: int) -> Any:
        rng = np.random.default_rng(0)
        batches = [
            {"ids": training.make_batch(rng)["ids"], "label": rng.normal(size=24).astype(np.float32)} for _ in range(3)
        ]
        step = training.make_step(2, staleness, loss_fn=loss_fn, has_aux=True, microbatches=pieces)
        with step:
            state, history = training.run(step, step.init(np.float32(1), jax.random.key(1)), batches)
            state = step.flush(state)
            stats = step.stats()["items"]
            assert (stats["updates"], stats["tokens"]) == (3, 72 * (3 + staleness))  # flush drops the last lookup
            assert stats["lookups"] == 3 + staleness
            assert stats["stage_calls"] == 3 * 2, "one for each rank"
            return training.arrays_of(step, state), history

    arrays, history = run(1)
    in_pieces, pieces_history = run(3)
    two.assert_close(in_pieces, arrays)
    assert history[0]["aux"].shape == (24,)
    # Each rank's tokens are cut into pieces: piece p has the p-th part of every rank's.
    scores = pieces_history[-1]["aux"].reshape(3, 2, 4).swapaxes(0, 1).reshape(24)
    np.testing.assert_allclose(scores, history[-1]["aux"], rtol=2e-5, atol=1e-6)


def test_microbatches_need_batches_that_can_be_cut():
    step = training.make_step(2, 1, microbatches=5)
    with step:
        state = training.start(step)
        with pytest.raises(
            ContextError, match=r"microbatches=5 over 2 ranks need .* multiple of 10, but batch\['ids'\]"
        ):
            step(state, training.make_batches(1)[0])
    with training.make_step(2, 1, microbatches=2) as step:
        state = training.start(step)
        with pytest.raises(ContextError, match=r"batch\['slope'\] has shape \[\]"):
            step(state, training.make_batches(1)[0])
