"""A snapshot is all that a resume needs: from it a run goes on bit for bit, on any number of ranks."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_bridge import IdError, PipelineError, RowwiseAdagrad, TrainStep, with_next

from . import _training as training
from ._programs import assert_same_bits

BATCHES = training.make_batches(8)
AT = 3  # steps before the snapshot


def pairs(batches: list[Any], last: Any = None) -> list[Any]:
    """(batch, upcoming) of a part of a run, whose last batch is followed by ``last``."""
    return [*zip(batches, [*batches[1:], last], strict=True)]


def finish(step: TrainStep, state: Any) -> Any:
    """Trains on what is left after the snapshot, and gives everything."""
    state, history = training.train(step, state, pairs(BATCHES[AT:]))
    return training.arrays_of(step, step.flush(state)), [m["norm"] for m in history], int(state.step)


@pytest.fixture(scope="module")
def taken():
    """(snapshot in the middle of the asynchronous schedule, what the run that took it ended with)."""
    with training.shared_step(2, 1) as step:
        state, _ = training.train(step, training.start(step), pairs(BATCHES[:AT], BATCHES[AT]))
        snapshot = step.snapshot(state)
        return snapshot, finish(step, state)


def test_taking_a_snapshot_disturbs_nothing(taken):
    with training.shared_step(2, 1) as step:
        state, _ = training.train(step, training.start(step), pairs(BATCHES[:AT], BATCHES[AT]))
        training.assert_same_arrays(finish(step, state), taken[1])


def test_a_snapshot_holds_what_is_under_way(taken):
    snapshot, _ = taken
    assert int(snapshot["step"]) == AT
    for name in training.NAMES:
        staged = snapshot["staged"][name]
        assert_same_bits(staged["ids"], BATCHES[AT - 1]["ids"][name].reshape(-1))
        assert staged["grads"].shape == (training.TOKENS[name], training.WIDTH[name])
        assert staged["pending"]
        assert_same_bits(snapshot["armed"][name], BATCHES[AT]["ids"][name])
        assert snapshot["tables"][name]["weights"].shape == (training.ROWS[name], training.WIDTH[name])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_goes_on_bit_for_bit_on_any_number_of_ranks(taken, ranks):
    snapshot, wanted = taken
    with training.shared_step(ranks, 1) as step:
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)


def test_a_run_goes_on_in_another_step_that_has_seen_nothing(taken):
    snapshot, wanted = taken
    with training.make_step(2, 1) as step:
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)


def test_restore_drops_what_was_under_way_and_may_be_repeated(taken):
    snapshot, wanted = taken
    with training.shared_step(2, 1) as step:
        step(training.start(step), BATCHES[6], BATCHES[7])
        step(step.restore(snapshot), BATCHES[AT], BATCHES[AT + 1])
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)


def test_a_restored_state_may_be_flushed_at_once(taken):
    with training.shared_step(2, 1) as step:
        state, _ = training.train(step, training.start(step), pairs(BATCHES[:AT], BATCHES[AT]))
        wanted = training.arrays_of(step, step.flush(state))
        training.assert_same_arrays(training.arrays_of(step, step.flush(step.restore(taken[0]))), wanted)


def test_a_snapshot_of_a_restored_state_is_the_same_snapshot(taken):
    with training.shared_step(4, 1) as step:
        training.assert_same_arrays(step.snapshot(step.restore(taken[0])), taken[0])


def test_the_batch_that_was_announced_is_still_expected(taken):
    snapshot, wanted = taken
    with training.shared_step(2, 1) as step:
        state = step.restore(snapshot)
        with pytest.raises(PipelineError, match=r"the call with state\.step=3 was given another batch"):
            step(state, BATCHES[AT + 1])
        training.assert_same_arrays(finish(step, state), wanted)


@pytest.mark.parametrize("ranks", [1, 4])
def test_where_no_batch_was_announced_any_may_follow(ranks):
    with training.shared_step(2, 1) as step:
        state, _ = training.run(step, training.start(step), BATCHES[:AT])
        snapshot = step.snapshot(state)
        assert snapshot["armed"] is None
        wanted = finish(step, state)
    with training.shared_step(ranks, 1) as step:
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)
    with training.shared_step(ranks, 1) as step:
        state = step.flush(step.restore(snapshot))
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("when", ["at first", "after a flush"])
def test_at_rest_nothing_is_under_way(staleness, when):
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        if when == "after a flush":
            state = step.flush(training.run(step, state, BATCHES[:AT])[0])
        snapshot = step.snapshot(state)
        assert snapshot["staged"] == {}
        assert snapshot["armed"] is None
        wanted = finish(step, state)
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)
    # And the other schedule can take it.
    with training.shared_step(2, 1 - staleness) as step:
        finish(step, step.restore(snapshot))


def test_staleness_zero_resumes_bit_for_bit_on_any_number_of_ranks():
    with training.shared_step(2, 0) as step:
        state, _ = training.run(step, training.start(step), BATCHES[:AT])
        snapshot = step.snapshot(state)
        wanted = finish(step, state)
    for ranks in (1, 4):
        with training.shared_step(ranks, 0) as step:
            training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)


def test_the_states_of_every_optimizer_and_half_precision_survive_a_file():
    """As plain arrays through ``np.savez``, which forgets the name of bfloat16."""
    optimizer = RowwiseAdagrad(learning_rate=0.1, half_life=7, lazy=True, rounding="stochastic", seed=3)
    tables = {"optimizer": optimizer, "dtype": "bfloat16"}
    finals = []
    with training.make_step(2, 1, tables=tables, optimizer=optax.adam(0.125)) as step:
        state, _ = training.train(step, training.start(step), pairs(BATCHES[:AT], BATCHES[AT]))
        snapshot = step.snapshot(state)
        leaves, structure = jax.tree.flatten(snapshot)
        assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
        file = io.BytesIO()
        np.savez(file, *leaves)
        finals.append(finish(step, state))
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            read = jax.tree.unflatten(structure, [loaded[f"arr_{i}"] for i in range(len(leaves))])
        finals.append(finish(step, step.restore(read)))
    training.assert_same_arrays(*finals)


def test_ids_that_were_reported_before_the_snapshot_are_not_reported_again():
    bad = {name: x.copy() for name, x in BATCHES[AT]["ids"].items()}
    bad["users"][4] = 99
    following = BATCHES[AT] | {"ids": jax.tree.map(jnp.asarray, bad)}
    with training.shared_step(2, 1) as step:
        state, _ = training.train(step, training.start(step), pairs(BATCHES[:AT]))
        state, _ = step(state, BATCHES[0], following)
        with pytest.raises(IdError, match="token id 99 at position 4"):
            step.snapshot(state)
        snapshot = step.snapshot(state)
        assert snapshot["armed"]["users"][4] == 99
        finals = []
        for begin in (lambda: state, lambda: step.restore(snapshot)):
            after, metrics = step(begin(), following, None)
            assert metrics["finite"]
            finals.append(training.arrays_of(step, step.flush(after)))
        training.assert_same_arrays(*finals)


def test_a_skipped_step_that_is_staged_stays_skipped():
    broken = BATCHES[AT] | {"slope": np.float32(np.nan)}
    with training.shared_step(2, 1) as step:
        state, _ = training.run(step, training.start(step), [*BATCHES[:AT], broken])
        snapshot = step.snapshot(state)
        assert not snapshot["staged"]["users"]["pending"]
        wanted = finish(step, state)
        training.assert_same_arrays(finish(step, step.restore(snapshot)), wanted)


# ---- what follows a restore ----


def test_a_batch_of_another_size_needs_a_flush_after_restore_too(taken):
    small = training.make_batch(np.random.default_rng(0), {"items": (8, 3), "users": (8,)})
    with training.shared_step(2, 1) as step:
        state = step.restore(taken[0])
        with pytest.raises(
            PipelineError, match=r"cannot be followed by one of {'items': 24, 'users': 8} without a flush"
        ):
            step(state, small)
        state, metrics = step(step.flush(state), small)
        assert metrics["finite"]


def test_the_loop_of_the_readme_resumes(taken):
    """with_next over what is left, from the batch that was announced."""
    snapshot, wanted = taken
    with training.shared_step(2, 1) as step:
        state = step.restore(snapshot)
        for batch, upcoming in with_next(BATCHES[int(snapshot["step"]) :]):
            state, _ = step(state, batch, upcoming)
        training.assert_same_arrays(training.arrays_of(step, step.flush(state)), wanted[0])
