"""Another batch or state than a step expects is said by the next host call, costs no buffer, and training goes on."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bridge import ContextError, PipelineError

from . import _training as training
from ._programs import assert_same_bits
from ._training import Rehearsal


@pytest.fixture(params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def step(request):
    with training.shared_step(request.param, 1) as step:
        yield step


@pytest.fixture
def batches():
    return training.make_batches(6)


# ---- another batch than the one announced ----


def test_another_batch_than_announced_is_refused_before_anything_runs(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, batches[0], batches[1])
    rehearsal.step(batches[0])
    jax.block_until_ready(state)  # its calls are counted by now
    calls = step.stats()["users"]["lookup_done_calls"]
    position = 40
    wrong = training.with_id(
        batches[1], "items", position, (int(batches[1]["ids"]["items"].reshape(-1)[position]) + 1) % 19
    )
    with pytest.raises(
        PipelineError, match=r"'items': the call with state\.step=1 was given another .* position 40"
    ) as e:
        step(state, wrong, batches[2])
    assert "pass the batch that was announced, or flush, and go on with any batch" in str(e.value)
    assert step.stats()["users"]["lookup_done_calls"] == calls
    training.assert_goes_on(step, state, rehearsal, batches[1:])


def test_after_a_flush_any_batch_may_follow(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, batches[0], batches[1])
    rehearsal.step(batches[0])
    rehearsal.flush()
    training.assert_goes_on(step, step.flush(state), rehearsal, batches[2:])


def test_another_batch_on_the_devices_applies_nothing_and_is_reported_next(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, training.on_device(batches[0]), training.on_device(batches[1]))
    rehearsal.step(batches[0])
    before = training.arrays_of(step, state)
    state, metrics = step(state, training.on_device(batches[2]), training.on_device(batches[3]))
    assert np.isnan(metrics["loss"])
    assert not metrics["finite"]
    assert jax.device_get(metrics["valid"]) == {"items": 0, "users": 0}
    training.assert_same_arrays(training.arrays_of(step, state), before)
    with pytest.raises(
        PipelineError, match=r"'items' lookup_done on rank \d .* another batch: step 2 .* at position \d+"
    ):
        step(state, training.on_device(batches[3]))
    # What batch 0 has staged was kept, and any batch may follow.
    training.assert_goes_on(step, state, rehearsal, batches[4:])


def test_a_batch_that_differs_in_one_id_on_the_devices_names_its_position(step, batches):
    """Only the rank that holds it can know. The table's other ranks stop at the same place of the program."""
    state, _ = step(training.start(step), training.on_device(batches[0]), training.on_device(batches[1]))
    before = training.arrays_of(step, state)
    wrong = training.with_id(batches[1], "items", 70, (int(batches[1]["ids"]["items"].reshape(-1)[70]) + 1) % 19)
    state, metrics = step(state, training.on_device(wrong), training.on_device(batches[2]))
    assert not metrics["finite"]
    after = training.arrays_of(step, state)
    assert_same_bits(after["params"]["shift"], before["params"]["shift"])
    training.assert_same_arrays(after["tables"]["items"], before["tables"]["items"])
    with pytest.raises(PipelineError, match=r"armed with row \d+ at position 70, but token_ids have \d+ there"):
        step.stats()
    after = training.arrays_of(step, state)
    state, history = training.run(step, state, batches[3:])
    assert all(m["finite"] for m in history)
    assert not np.array_equal(
        training.arrays_of(step, state)["tables"]["items"]["weights"], after["tables"]["items"]["weights"]
    )
    step.flush(state)


def test_a_refusal_can_be_followed_by_a_flush_or_a_snapshot(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, training.on_device(batches[0]), training.on_device(batches[1]))
    rehearsal.step(batches[0])
    state, _ = step(state, training.on_device(batches[2]))
    with pytest.raises(PipelineError, match="another batch"):
        step.snapshot(state)
    snapshot = step.snapshot(state)
    flushed = copy.deepcopy(rehearsal)
    state = step.flush(state)
    flushed.flush()
    flushed.assert_state(step, state)
    training.assert_goes_on(step, step.restore(snapshot), rehearsal, batches[3:])


# ---- states ----


def test_an_old_state_is_refused_before_anything_runs(step, batches):
    first = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, first), 1)
    second, _ = step(first, batches[0], batches[1])
    third, _ = step(second, batches[1], batches[2])
    for old in (first, second):
        with pytest.raises(PipelineError, match="this is not the state that the last call returned"):
            step(old, batches[2], batches[3])
        with pytest.raises(PipelineError, match="this is not the state that the last call returned"):
            step.flush(old)
        with pytest.raises(PipelineError, match="this is not the state that the last call returned"):
            step.snapshot(old)
    for batch in batches[:2]:
        rehearsal.step(batch)
    training.assert_goes_on(step, third, rehearsal, batches[2:])


def test_after_a_flush_an_old_state_is_refused_by_name(step, batches):
    old, _ = step(training.start(step), batches[0], batches[1])
    state = step.flush(old)
    after = training.arrays_of(step, state)
    with pytest.raises(PipelineError, match=r"has taken its buffers .* from the state that the last call returned"):
        step(old, batches[2])
    training.assert_same_arrays(training.arrays_of(step, state), after)
    state, metrics = step(state, batches[1])
    assert metrics["finite"]


def test_with_staleness_zero_a_donated_state_is_refused_by_name(batches):
    with training.shared_step(2, 0) as step:
        old = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, old), 0)
        state, _ = step(old, batches[0])
        rehearsal.step(batches[0])
        with pytest.raises(PipelineError, match=r"has taken its buffers .* from the state that the last call returned"):
            step(old, batches[0])
        training.assert_goes_on(step, state, rehearsal, batches[1:])


def test_without_donation_an_old_state_stays_usable_and_gives_the_same_bits(batches):
    with training.make_step(2, 0, donate=False) as step:
        first = training.start(step)
        kept = training.arrays_of(step, first)
        rehearsal = Rehearsal(kept, 0)
        finals = []
        for _ in range(2):
            state, _ = training.run(step, first, batches[:3])
            finals.append(training.arrays_of(step, state))
        training.assert_same_arrays(*finals)
        training.assert_same_arrays(training.arrays_of(step, first), kept)
        training.assert_goes_on(step, first, rehearsal, batches[:3])


def test_staleness_one_needs_donation():
    with pytest.raises(ContextError, match=r"staleness=1 needs donate=True \(donate_argnums of jax.jit\)"):
        training.make_step(2, 1, donate=False)


def test_the_callers_arrays_are_not_donated(batches):
    params = {"shift": jnp.float32(0.5)}
    with training.shared_step(2, 1) as step:
        training.run(step, step.init(params, jax.random.key(0)), batches)
    assert float(params["shift"]) == 0.5
