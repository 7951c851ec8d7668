"""Gradients that are staged when training ends would be lost in silence: whoever forgets the flush is warned."""

from __future__ import annotations

import jax
import pytest

from jax_bridge import ContextWarning, with_next

from . import _training as training

BATCHES = training.make_batches(4)
LOST = (
    "async_emb train_step: the block was left while gradients of the call with state.step=3 were staged for the tables "
    "['items', 'users']: that update is lost. End the block with state = step.flush(state), or take a snapshot, which "
    "keeps them"
)


@pytest.fixture
def step():
    with training.shared_step(2, 1) as step:
        yield step


def test_leaving_the_block_without_a_flush_warns():
    with pytest.warns(ContextWarning) as warned, training.make_step(2, 1) as step:
        training.run(step, training.start(step), BATCHES)
    (warning,) = warned
    assert str(warning.message) == LOST
    assert warning.filename == __file__


@pytest.mark.filterwarnings("error::jax_bridge.ContextWarning")
def test_leaving_the_block_after_a_flush_or_by_an_exception_warns_of_nothing():
    with training.shared_step(2, 1) as step:
        step.flush(training.run(step, training.start(step), BATCHES)[0])

    def interrupted() -> None:
        with training.shared_step(2, 1) as step:
            training.run(step, training.start(step), BATCHES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_what_is_staged_is_named_with_its_tables_and_step(step):
    state = training.start(step)
    assert step._unflushed() is None
    state, _ = training.train(step, state, with_next(BATCHES))
    assert step._unflushed() == LOST
    step.flush(state)


def test_after_a_flush_nothing_is_lost(step):
    state, _ = training.run(step, training.start(step), BATCHES)
    step.flush(state)
    assert step._unflushed() is None


def test_a_snapshot_keeps_what_is_staged(step):
    state, _ = training.run(step, training.start(step), BATCHES[:3])
    snapshot = step.snapshot(state)
    assert step._unflushed() is None
    state, _ = step(state, BATCHES[3])
    assert step._unflushed() == LOST, "what came after the snapshot is not in it"
    step.restore(snapshot)
    assert step._unflushed() is None, "the caller has the snapshot still"


def test_init_and_close_begin_anew(step):
    training.run(step, training.start(step), BATCHES)
    training.start(step)
    assert step._unflushed() is None
    training.run(step, training.start(step), BATCHES)
    step.close()
    assert step._unflushed() is None


def test_with_staleness_zero_nothing_is_ever_staged():
    with training.shared_step(2, 0) as step:
        training.run(step, training.start(step), BATCHES)
        assert step._unflushed() is None


def test_a_step_that_has_failed_is_told_by_closing_and_not_by_a_warning(step):
    training.run(step, training.start(step), BATCHES)
    jax.block_until_ready(step._unsaved)
    step._unsaved.delete()
    assert step._unflushed() is None
