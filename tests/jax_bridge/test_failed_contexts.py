"""A context that has failed says so to every call, with its first error, until it is closed and opened again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jax_bridge import FailedContextError, PipelineError, TrainStep, runtime

from . import _per_shard as per_shard
from . import _training as training
from ._programs import opened

BATCHES = training.make_batches(6)


def test_a_host_call_says_why_a_context_has_failed_as_often_as_it_is_asked():
    with opened(per_shard.make_handle(2, name="given up")) as handle:
        runtime.check(handle)
        runtime.abort_context(handle, "an operator gave up")
        runtime.abort_context(handle, "a second reason")
        for _ in range(2):
            with pytest.raises(
                FailedContextError, match=r"^async_emb context 'given up' was aborted: an operator gave"
            ):
                runtime.check(handle)
        runtime.close_context(handle)
        runtime.open_context(handle)
        runtime.check(handle)
        per_shard.assert_trains_like_the_oracle(handle)


def abort(step: TrainStep, name: str = "users") -> None:
    runtime.abort_context(step.program.handles[name], "an operator gave up")


def three_steps(step: TrainStep) -> Any:
    state, _ = training.train(step, training.start(step), [*itertools.pairwise(BATCHES[:4])])
    return state


HOST_CALLS: dict[str, Callable[[TrainStep, Any], Any]] = {
    "step": lambda step, state: step(state, BATCHES[3], BATCHES[4]),
    "flush": lambda step, state: step.flush(state),
    "snapshot": lambda step, state: step.snapshot(state),
    "stats": lambda step, state: step.stats(),
    "check": lambda step, state: step.check(wait=True),
    "close": lambda step, state: step.close(),
}


@pytest.mark.parametrize("call", HOST_CALLS)
def test_every_call_of_a_train_step_says_why_a_context_has_failed(call):
    with training.shared_step(2, 1) as step:
        state = three_steps(step)
        abort(step)
        with pytest.raises(FailedContextError, match=r"^async_emb context 'users' was aborted: an operator") as told:
            HOST_CALLS[call](step, state)
        assert "init and restore" in told.value.__notes__[0]
        assert isinstance(told.value, PipelineError)


def test_a_failure_in_the_middle_of_a_step_is_told_in_its_own_words():
    """Not in XLA's around them."""

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        def give_up(x: Any) -> Any:
            abort(step)
            return x

        loss = training.loss_fn(params, rows, batch)
        return loss + jax.pure_callback(give_up, jax.ShapeDtypeStruct((), loss.dtype), jax.lax.stop_gradient(loss))

    with training.make_step(2, 1, loss_fn=loss_fn) as step:
        step(training.start(step), BATCHES[0], BATCHES[1])
        for _ in range(2):
            with pytest.raises(FailedContextError, match=r"^async_emb context 'users' was aborted: an operator gave"):
                step.check(wait=True)


def test_a_failure_that_was_told_is_not_told_again_when_the_block_ends():
    with training.make_step(2, 1) as step:
        state = three_steps(step)
        abort(step)
        for _ in range(2):
            with pytest.raises(FailedContextError):
                step(state, BATCHES[3], BATCHES[4])


def test_a_failure_that_nobody_was_told_is_raised_when_the_block_ends():
    step = training.make_step(2, 1)
    step.__enter__()
    three_steps(step)
    abort(step)
    with pytest.raises(FailedContextError, match="an operator gave up"):
        step.__exit__(None, None, None)


@pytest.mark.parametrize("again", ["restore", "init"])
def test_init_and_restore_begin_anew_after_a_failure(again):
    def the_rest(state: Any) -> Any:
        state, _ = training.train(step, state, [*zip(BATCHES[3:], [*BATCHES[4:], None], strict=True)])
        return training.arrays_of(step, step.flush(state))

    with training.shared_step(2, 1) as step:
        snapshot = step.snapshot(three_steps(step))
        state = step.restore(snapshot) if again == "restore" else training.start(step)
        wanted = the_rest(state)
        state = three_steps(step)
        abort(step)
        with pytest.raises(FailedContextError):
            step(state, BATCHES[3], BATCHES[4])
        state = step.restore(snapshot) if again == "restore" else training.start(step)
        training.assert_same_arrays(the_rest(state), wanted)


def test_another_step_begins_on_a_table_whose_context_has_failed():
    with training.make_step(2, 1) as step:
        three_steps(step)
        abort(step)
        with training.make_step(2, 1) as other:
            state, _ = training.run(other, training.start(other), BATCHES)
            other.flush(state)
        # Closing the other one's contexts has ended the failure.
