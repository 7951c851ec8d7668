"""The loop around a training step: batches in pairs, flushes, epochs, new beginnings, batches of other sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_bridge import PipelineError, RowwiseAdagrad, train_step, with_next
from jax_bridge.runtime import native
from jax_bridge.steps.steps_in_flight import STEPS_IN_FLIGHT

from . import _training as training
from ._programs import mesh_of
from ._training import Rehearsal

# ---- the loop ----


def test_with_next_pairs_each_batch_with_the_one_after_it():
    assert list(with_next([])) == []
    assert list(with_next(["a"])) == [("a", None)]
    assert list(with_next(iter("abc"))) == [("a", "b"), ("b", "c"), ("c", None)]


def test_with_next_reads_one_batch_ahead_and_no_more():
    read = []

    def loader():
        for i in range(4):
            read.append(i)
            yield i

    pairs = with_next(loader())
    assert next(pairs) == (0, 1)
    assert read == [0, 1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_host_runs_a_few_steps_ahead_of_its_devices_and_no_more(staleness):
    """XLA:CPU launches programs on the threads that run them, and with too many under way none can begin."""

    def slow_loss(params, rows, batch):
        # Some milliseconds, which a host that does not wait is through with at once.
        x = jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ x), jnp.eye(100) * params["shift"])
        return training.loss_fn(params, rows, batch) + 0 * x.sum()

    losses = []
    with training.make_step(2, staleness, loss_fn=slow_loss) as step:
        state = training.start(step)
        for batch, upcoming in with_next(training.make_batches(12)):
            state, metrics = step(state, batch, upcoming)
            losses.append(metrics["loss"])
            assert all(loss.is_ready() for loss in losses[:-STEPS_IN_FLIGHT])
        step.flush(state)


@pytest.mark.parametrize("staleness", [0, 1])
def test_nothing_recompiles_after_the_first_epoch(staleness):
    schedule = optax.exponential_decay(0.1, 5, 0.7)
    tables = {"optimizer": RowwiseAdagrad(learning_rate=schedule, half_life=20, weight_decay=0.01, max_grad_norm=9.0)}
    batches = training.make_batches(3)
    with training.make_step(2, staleness, tables=tables, optimizer=optax.adam(schedule)) as step:
        state = training.start(step)
        state, _ = training.run(step, state, batches)  # the last has no upcoming batch
        state, _ = training.run(step, state, batches)  # so this one looks up anew
        state = step.flush(state)
        with training.count_compilations() as compiled:
            for _ in range(3):
                state, _ = training.run(step, state, batches)
            state = step.flush(state)
            state, _ = training.run(step, state, batches)
            state = step.flush(training.start(step))
            state, _ = training.run(step, state, batches)
        assert compiled == []


def test_the_counter_of_compilations_counts():
    with training.count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert len(compiled) == 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_announcing_batches_changes_no_bit(ranks):
    """Without an announcement the lookup waits for the batch, and reads the same table."""
    batches = training.make_batches(6)
    finals = []
    with training.shared_step(ranks, 1) as step:
        for announce in (True, False):
            state, _ = training.train(step, training.start(step), with_next(batches), announce=announce)
            finals.append(training.arrays_of(step, step.flush(state)))
    training.assert_same_arrays(*finals)


@pytest.mark.parametrize("staleness", [0, 1])
def test_after_a_flush_training_goes_on_from_a_table_that_misses_nothing(staleness):
    batches = training.make_batches(7)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        for part in (batches[:3], batches[3:4], batches[4:]):
            state, history = training.run(step, state, part)
            assert history[0]["pending"]["users"] == (staleness == 0), "nothing is staged after a flush"
            state = step.flush(state)
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
            rehearsal.assert_state(step, state)


def test_flush_may_come_before_any_step_between_any_two_and_twice():
    batches = training.make_batches(2)
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        before = training.arrays_of(step, state)
        state = step.flush(step.flush(state))
        training.assert_same_arrays(training.arrays_of(step, state), before)
        state, _ = step(state, batches[0], batches[1])  # announced, but never trained
        state = step.flush(state)
        once = training.arrays_of(step, state)
        state = step.flush(state)
        training.assert_same_arrays(training.arrays_of(step, state), once)
        assert step.stats()["users"]["updates"] == 1


def test_init_begins_anew_whatever_was_under_way():
    batches = training.make_batches(5)
    with training.shared_step(2, 1) as step:
        wanted = training.arrays_of(step, step.flush(training.run(step, training.start(step), batches)[0]))
        abandoned, _ = step(training.start(step), batches[3], batches[4])
        step(training.start(step), batches[0], batches[1])
        with pytest.raises(PipelineError, match="this is not the state that the last call returned"):
            step(abandoned, batches[1])
        state = training.start(step)
        training.assert_same_arrays(training.arrays_of(step, step.flush(training.run(step, state, batches)[0])), wanted)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_closed_step_can_be_used_again(staleness):
    batches = training.make_batches(4)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        for part in (batches[:2], batches[2:]):
            state = step.flush(training.run(step, state, part)[0])
            step.close()
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(step, state)


# ---- batches of other sizes ----

SMALL = {"items": (8, 3), "users": (8,)}


def test_batches_of_two_sizes_share_tables_with_a_flush_between_them():
    training.close_everything()
    rng = np.random.default_rng(8)
    parts = [[training.make_batch(rng, shapes) for _ in range(2)] for shapes in (SMALL, training.IDS_SHAPE) * 2]
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1)
        for part in parts:
            state = step.flush(training.run(step, state, part)[0])
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(step, state)
        assert len(native().open_contexts()) == 4
        assert step.stats()["users"]["updates"] == 8, "counters of both sizes are summed"


@pytest.mark.parametrize("how", ["announced", "given"])
def test_another_batch_size_without_a_flush_is_refused_before_anything_runs(how):
    large = training.make_batches(3)
    small = training.make_batch(np.random.default_rng(8), SMALL)
    with training.shared_step(2, 1) as step:
        state, _ = step(training.start(step), large[0], large[1])
        with pytest.raises(
            PipelineError, match=r"batches of {'items': 72, 'users': 24} tokens cannot be followed by"
        ) as e:
            step(state, *((large[1], small) if how == "announced" else (small, None)))
        assert "flush before the size changes" in str(e.value)
        state, _ = step(state, large[1], None)
        state, _ = step(step.flush(state), small, None)
        step.flush(state)


def test_a_retrace_does_not_disturb_the_pipeline():
    batches = training.make_batches(5)
    other = [batch | {"slope": np.float16(batch["slope"])} for batch in batches]  # another dtype: another trace
    mixed = [*batches[:2], other[2], *batches[3:]]
    with training.shared_step(2, 1) as step:
        finals = []
        for run in (
            mixed,
            [
                b | {"slope": np.float32(o["slope"])} if b is not m else b
                for b, o, m in zip(batches, other, mixed, strict=True)
            ],
        ):
            state, _ = training.run(step, training.start(step), run)
            finals.append(training.arrays_of(step, step.flush(state)))
        training.assert_same_arrays(*finals)
        assert step.program.handles["users"].tokens_per_batch == 24


def test_two_training_steps_share_a_table():
    """A second loss on the same tables, in turns: each takes over where the other has flushed."""
    mesh = mesh_of(2)
    tables = training.make_tables(mesh)
    steps = [
        train_step(tables, loss, optax.sgd(training.DENSE_RATE), ids_of=training.ids_of, staleness=1)
        for loss in (training.loss_fn, lambda *args: training.loss_fn(*args) * 1.0)
    ]
    batches = training.make_batches(6)
    with steps[0], steps[1]:
        state = training.start(steps[0])
        rehearsal = Rehearsal(training.arrays_of(steps[0], state), 1)
        for turn, part in enumerate((batches[:2], batches[2:4], batches[4:])):
            state = steps[turn % 2].flush(training.run(steps[turn % 2], state, part)[0])
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(steps[0], state)
