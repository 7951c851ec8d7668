"""Token ids that a step cannot use: found on the host before the step or on the devices in it, never trained."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bridge import ContextError, IdError, with_next

from . import _training as training
from ._training import Rehearsal


@pytest.fixture(params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def step(request):
    with training.shared_step(request.param, 1) as step:
        yield step


@pytest.fixture
def batches():
    return training.make_batches(6)


@pytest.mark.parametrize("which", ["batch", "upcoming"])
def test_host_ids_are_checked_before_the_step(step, batches, which):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, batches[0], batches[1])
    rehearsal.step(batches[0])
    jax.block_until_ready(state)  # its calls are counted by now
    before = step.stats()
    bad = training.with_id(batches[1], "items", 41, 19)
    with pytest.raises(
        IdError, match=r"'items': token id 19 at position 41 is outside of the table's rows \[0, 19\)"
    ) as e:
        step(state, *((bad, batches[2]) if which == "batch" else (batches[1], bad)))
    assert "id_policy='drop'" in "".join(e.value.__notes__)
    assert {k: v for k, v in step.stats()["items"].items() if "wait" not in k} == {
        k: v for k, v in before["items"].items() if "wait" not in k
    }
    training.assert_goes_on(step, state, rehearsal, batches[1:])


def test_ids_on_the_devices_are_reported_after_the_step_and_dropped(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
    run = [batches[0], training.with_id(training.with_id(batches[1], "users", 20, -3), "users", 5, 31), *batches[2:]]
    state, _ = step(state, training.on_device(run[0]), training.on_device(run[1]))
    jax.block_until_ready(state)
    with pytest.raises(IdError, match=r"'users': token id 31 at position 5 of lookup step 2 .* rows \[0, 31\)") as e:
        step(state, training.on_device(run[1]), training.on_device(run[2]))
    assert "It was dropped" in "".join(e.value.__notes__)
    # Raising clears it, and the very same call goes through.
    for k in range(1, 6):
        state, metrics = step(state, training.on_device(run[k]), training.on_device(run[k + 1]) if k < 5 else None)
        assert metrics["finite"]
    for batch in run:
        rehearsal.step(batch)
    rehearsal.assert_state(step, state)
    assert step.stats()["users"]["bad_ids"] == 2


def test_steps_dispatched_meanwhile_drop_ids_too_and_a_loop_that_never_waits_is_told():
    gate = threading.Event()

    def wait(x: Any) -> Any:
        assert gate.wait(60)
        return x

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        loss = training.loss_fn(params, rows, batch)
        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(loss))
        return loss + 0 * held

    batches = training.make_batches(6)
    bad = [batches[0], training.with_id(batches[1], "items", 3, 77), training.with_id(batches[2], "items", 8, 88)]
    batches = [training.on_device(batch) for batch in [*bad, *batches[3:] * 100]]
    with training.make_step(2, 1, loss_fn=loss_fn) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
        pairs = with_next(batches)
        for _ in range(4):  # far ahead of the first step, which waits
            state, metrics = step(state, *next(pairs))
        assert not metrics["loss"].is_ready()
        gate.set()
        error, done = None, 4
        for batch, upcoming in pairs:
            try:
                state, _ = step(state, batch, upcoming)
            except IdError as raised:
                error = raised
                break
            done += 1
            time.sleep(0.01)
        assert "token id 77 at position 3 of lookup step 2" in str(error)
        for batch in batches[:done]:
            rehearsal.step(jax.device_get(batch))
        rehearsal.assert_state(step, state)
        state, metrics = step(state, batches[done], batches[done + 1])
        assert metrics["finite"]
        step.flush(state)


def test_with_sync_errors_the_same_call_raises_and_hands_over_the_state(batches):
    run = [batches[0], training.with_id(batches[1], "items", 3, 77), *batches[2:]]
    with training.make_step(2, 1, sync_errors=True) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
        with pytest.raises(IdError, match=r"token id 77 at position 3 of lookup step 2") as e:
            step(state, training.on_device(run[0]), training.on_device(run[1]))
        assert "go on from the state that this exception carries" in "".join(e.value.__notes__)
        state, _ = training.run(step, e.value.state, [training.on_device(batch) for batch in run[1:]])
        for batch in run:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)


def test_more_unique_ids_than_num_unique_are_reported_and_the_smallest_are_trained(batches):
    with training.make_step(2, 1, tables={"num_unique": 9}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, num_unique=9)
        for batch in batches[:2]:
            rehearsal.step(batch)
        unique = len(np.unique(batches[0]["ids"]["items"]))
        state, _ = step(state, batches[0], batches[1])
        state, _ = step(state, batches[1])
        jax.block_until_ready(state)
        message = rf"'items': the batch of update step 2 has {unique} unique ids, more than num_unique=9"
        with pytest.raises(IdError, match=message) as e:
            step(state, batches[2])
        assert "72 (tokens_per_batch) is always enough" in "".join(e.value.__notes__)
        rehearsal.assert_state(step, state)
        with pytest.raises(IdError, match="'users': the batch of update step 2"):
            step(state, batches[2])  # the other table has its own to say
        with pytest.raises(IdError, match="'items': the batch of update step 3") as e:
            step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, e.value.state)
        with pytest.raises(IdError, match="'users': the batch of update step 3"):
            step.flush(e.value.state)
        step.flush(e.value.state)


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_other_policies_raise_nothing(policy):
    batches = training.make_batches(4)
    batches[1] = training.with_id(training.with_id(batches[1], "items", 3, 77), "users", 0, -5)
    batches[2] = training.with_id(batches[2], "users", 7, 2)  # 2 is padding
    batches[2]["ids"] |= {"items": batches[2]["ids"]["items"].astype(np.int64)}
    batches[2]["ids"]["items"][0, 0] = 2**32 + 1  # must not become 1
    with training.make_step(2, 1, tables={"id_policy": policy, "padding_id": 2}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy=policy, padding_id=2)
        training.assert_goes_on(step, state, rehearsal, batches)
        assert step.stats()["items"]["bad_ids"] == 2
        assert step.stats()["users"]["bad_ids"] == 1
        padding = sum(np.count_nonzero(batch["ids"]["users"] == 2) for batch in batches)
        assert step.stats()["users"]["padding_ids"] == padding


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.tolist(),
        lambda x: x.astype(np.int64),
        lambda x: x.astype(np.uint8),
        lambda x: x.astype(np.uint64),
        lambda x: jnp.asarray(x, jnp.int8),
        lambda x: jnp.asarray(x, jnp.uint32),
    ],
    ids=["list", "int64", "uint8", "uint64", "jax int8", "jax uint32"],
)
def test_ids_may_be_any_integers(batches, monkeypatch, convert):
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1)
        monkeypatch.setattr(step, "_ids_of", lambda batch: {name: convert(x) for name, x in batch["ids"].items()})
        training.assert_goes_on(step, state, rehearsal, batches[:3])


@pytest.mark.filterwarnings("error")
def test_with_x64_ids_may_be_wide(batches):
    wide = [b | {"ids": jax.tree.map(lambda x: x.astype(np.int64), b["ids"])} for b in batches]
    wide[2] = training.with_id(wide[2], "users", 3, 2**32 + 1)
    with jax.enable_x64(True), training.make_step(2, 1, tables={"id_policy": "drop"}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
        training.assert_goes_on(step, state, rehearsal, wide)
        rows = step.tables["users"].lookup(training.start(step).tables["users"], np.array([2**32 + 1, 4]))
        assert not np.asarray(rows[0]).any()


def test_ids_that_are_not_integers_are_refused(step, batches):
    state = training.start(step)
    floats = batches[0] | {"ids": {name: x.astype(np.float32) for name, x in batches[0]["ids"].items()}}
    for batch in (floats, training.on_device(floats)):
        with pytest.raises(IdError, match="'items': token ids are float32, but must be integers"):
            step(state, batch)


@pytest.mark.parametrize("shape", [(0,), (24, 0)], ids=str)
@pytest.mark.parametrize(
    ("how", "staleness"), [("given", 0), ("given", 1), ("announced", 1), ("on the devices", 0), ("on the devices", 1)]
)
def test_an_empty_batch_is_refused_and_the_message_says_what_to_do(batches, how, shape, staleness):
    """torch and plain JAX would take it, and a mean over it would be NaN: the step would be skipped in silence."""
    empty = batches[0] | {"ids": batches[0]["ids"] | {"users": np.zeros(shape, np.int32)}}
    empty = training.on_device(empty) if how == "on the devices" else empty
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), staleness)
        with pytest.raises(ContextError) as e:
            step(state, *((batches[0], empty) if how == "announced" else (empty, None)))
        assert str(e.value) == (
            f"async_emb 'users': the batch is empty: its token ids have shape {list(shape)}, but a step needs at least "
            "one token on each of the 2 ranks"
        )
        assert "Leave an empty batch out of the loop" in e.value.__notes__[0]
        training.assert_goes_on(step, state, rehearsal, batches[:3])


def many_bad_ids(batch: Any, values: list[int]) -> Any:
    for position, value in enumerate(values):
        batch = training.with_id(batch, "items", 7 * position, value)
    return batch


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([19], "token id 19 at position 0 is outside of the table's rows [0, 19)"),
        ([19, -4], "2 of 72 token ids are outside of the table's rows [0, 19): 19 at position 0, -4 at position 7"),
        (
            [20, 21, 22, 23, 24],
            "5 of 72 token ids are outside of the table's rows [0, 19): 20 at position 0, 21 at position 7, 22 at "
            "position 14, 23 at position 21, 24 at position 28",
        ),
        (
            [20, 21, 22, 23, 24, 25, 26],
            "7 of 72 token ids are outside of the table's rows [0, 19): 20 at position 0, 21 at position 7, 22 at "
            "position 14, 23 at position 21, 24 at position 28, and 2 more",
        ),
    ],
    ids=lambda x: str(len(x)) if isinstance(x, list) else "",
)
def test_the_message_says_how_many_ids_are_bad_and_where_the_first_are(step, batches, values, message):
    with pytest.raises(IdError) as e:
        step(training.start(step), many_bad_ids(batches[0], values))
    assert str(e.value) == f"async_emb 'items': {message}"
    assert e.value.__notes__ == ["Fix the ids, or choose id_policy='drop' or 'clamp', or name it as padding_id."]


def test_minus_one_is_recognized_behind_the_ids_that_are_listed(step, batches):
    with pytest.raises(IdError, match="and 1 more") as e:
        step(training.start(step), many_bad_ids(batches[0], [19, 20, 21, 22, 23, -1]))
    assert "padding_id=-1" in e.value.__notes__[0]


@pytest.mark.parametrize(("padding_id", "advised"), [(None, True), (0, False)])
def test_minus_one_as_padding_is_recognized(batches, padding_id, advised):
    with training.make_step(2, 1, tables={"padding_id": padding_id}) as step, pytest.raises(IdError) as e:
        step(training.start(step), training.with_id(batches[0], "items", 3, -1))
    assert str(e.value) == "async_emb 'items': token id -1 at position 3 is outside of the table's rows [0, 19)"
    assert ("make the table with padding_id=-1: it reads zeros" in e.value.__notes__[0]) == advised


def test_a_message_of_a_context_says_whose_steps_it_counts(step, batches):
    bad = training.on_device(training.with_id(batches[0], "items", 3, 20))
    state, _ = step(training.start(step), bad)
    with pytest.raises(IdError, match="token id 20 at position 3 of lookup step 1 is") as e:
        step.flush(state)
    assert e.value.__notes__[-1] == (
        "Steps in this message are the context's own: it counts its lookups, and its updates, from 1 since it was "
        "opened. state.step counts calls from 0."
    )
    step.flush(state)


def test_batches_that_do_not_fit_the_ranks_or_the_tables_are_refused(batches):
    batch = batches[0]
    with training.shared_step(4, 1) as step:
        state = training.start(step)
        for shape in ((6,), ()):
            ids = batch["ids"] | {"users": np.zeros(shape, np.int32)}
            with pytest.raises(
                ContextError, match=rf"'users': token ids have shape \[{shape[0] if shape else ''}\].* 4 ranks"
            ):
                step(state, batch | {"ids": ids})
        with pytest.raises(ContextError, match=r"ids_of gave \['users'\], but the tables are \['items', 'users'\]"):
            step(state, batch | {"ids": {"users": batch["ids"]["users"]}})
        with pytest.raises(ContextError, match="ids_of gave list"):
            step(state, batch | {"ids": [1]})
