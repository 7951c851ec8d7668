"""A step that is not finite, or whose model does not work, costs no buffer, and training goes on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_bridge import ContextError

from . import _training as training
from ._programs import assert_same_bits
from ._training import NAMES, Rehearsal


@pytest.fixture
def batches():
    return training.make_batches(6)


# ---- steps that are not finite ----


@pytest.mark.parametrize("where", ["target", "slope", "infinite"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_that_is_not_finite_is_skipped_everywhere_and_the_next_learns(staleness, where):
    batches = training.make_batches(4)
    if where == "slope":  # the gradients of the rows are finite, the dense one is not
        batches[1] = batches[1] | {"slope": np.float32(np.nan)}
    else:  # one token of one table
        target = {name: x.copy() for name, x in batches[1]["target"].items()}
        target["users"][5, 3] = np.nan if where == "target" else -np.inf
        batches[1] = batches[1] | {"target": target}
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        state, _ = step(state, batches[0], batches[1])
        before = training.arrays_of(step, state)
        state, metrics = step(state, batches[1], batches[2])
        assert not metrics["finite"]
        for batch in batches[:2]:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)
        assert_same_bits(training.arrays_of(step, state)["params"]["shift"], before["params"]["shift"])
        if staleness == 0:
            training.assert_same_arrays(training.arrays_of(step, state), before)
        training.assert_goes_on(step, state, rehearsal, batches[2:])
        for name in NAMES:
            stats = step.stats()[name]
            assert (stats["updates"], stats["skipped_updates"]) == (3, 1)


def test_the_dense_optimizers_state_keeps_its_bits_in_a_step_that_is_skipped():
    batches = training.make_batches(3)
    batches[1] = batches[1] | {"slope": np.float32(np.inf)}
    with training.make_step(1, 1, optimizer=optax.adam(0.1)) as step:
        state, _ = step(training.start(step), batches[0], batches[1])
        before = training.arrays_of(step, state)
        state, _ = step(state, batches[1], batches[2])
        after = training.arrays_of(step, state)
        training.assert_same_arrays(after["opt_state"], before["opt_state"])
        training.assert_same_arrays(after["params"], before["params"])
        state, _ = step(state, batches[2])
        assert int(training.arrays_of(step, state)["opt_state"][0].count) == 2
        step.flush(state)


# ---- models that do not work ----


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_error_of_the_model_costs_no_buffer(staleness):
    batches = training.make_batches(2)
    broken = True

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        if broken:
            raise KeyError("labels")
        return training.loss_fn(params, rows, batch)

    with training.make_step(1, staleness, loss_fn=loss_fn) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        for _ in range(2):
            with pytest.raises(KeyError, match="labels"):
                step(state, batches[0], batches[1])
        broken = False
        training.assert_goes_on(step, state, rehearsal, batches)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_that_fails_inside_of_xla_leaves_a_step_that_can_be_restored(staleness):
    batches = training.make_batches(4)
    fails = False

    def look(x: Any) -> Any:
        if fails:
            raise OSError("disk full")
        return x

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        loss = training.loss_fn(params, rows, batch)
        seen = jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(loss))
        return loss + 0 * seen

    # One device: on several, XLA ends the process when one of them fails and the others wait in its own all-reduce.
    with training.make_step(1, staleness, loss_fn=loss_fn) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        state, _ = step(state, batches[0], batches[1])
        rehearsal.step(batches[0])
        snapshot = step.snapshot(state)
        fails = True

        def go_on(state: Any) -> None:
            for k in range(1, 3):
                state, _ = step(state, batches[k], batches[k + 1])
            step.flush(state)

        with pytest.raises(jax.errors.JaxRuntimeError, match="disk full"):
            go_on(state)
        fails = False
        training.assert_goes_on(step, step.restore(snapshot), rehearsal, batches[1:])


@pytest.mark.parametrize(
    ("loss_fn", "options", "message"),
    [
        (lambda p, r, b: r["users"].sum(-1), {}, r"must return a scalar floating-point loss, but returned .*24"),
        (lambda p, r, b: (r["users"].sum(), 1), {}, "must return a scalar floating-point loss"),
        (lambda p, r, b: r["users"].sum(), {"has_aux": True}, r"must return \(scalar floating-point loss, aux\)"),
        (lambda p, r, b: 1, {}, "must return a scalar floating-point loss"),
    ],
    ids=["vector", "pair", "no pair", "number"],
)
def test_a_loss_that_is_no_scalar_is_refused(batches, loss_fn, options, message):
    with training.make_step(2, 1, loss_fn=loss_fn, **options) as step, pytest.raises(ContextError, match=message):
        step(training.start(step), batches[0])
