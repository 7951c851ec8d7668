"""What goes wrong in a step is said by the next host call, costs no buffer, and training goes on."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_bridge import AsyncEmbedding, ContextError, IdError, PipelineError, RowwiseAdagrad, train_step, with_next

from . import _training as training
from ._programs import assert_same_bits
from ._training import NAMES, Rehearsal


@pytest.fixture(params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def step(request):
    with training.shared_step(request.param, 1) as step:
        yield step


@pytest.fixture
def batches():
    return training.make_batches(6)


def on_device(batch: Any) -> Any:
    """The batch with its ids where only the devices can look at them."""
    return batch | {"ids": jax.tree.map(jnp.asarray, batch["ids"])}


def with_id(batch: Any, name: str, position: int, value: int) -> Any:
    ids = {key: x.copy() for key, x in batch["ids"].items()}
    ids[name].reshape(-1)[position] = value
    return batch | {"ids": ids}


def assert_goes_on(step: Any, state: Any, rehearsal: Rehearsal, batches: list[Any]) -> None:
    """From ``state``, training on gives what the rehearsal, trained on, says."""
    state, _ = training.run(step, state, batches)
    state = step.flush(state)
    for batch in batches:
        rehearsal.step(batch)
    rehearsal.flush()
    rehearsal.assert_state(step, state)


# ---- another batch than the one announced ----


def test_another_batch_than_announced_is_refused_before_anything_runs(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, batches[0], batches[1])
    rehearsal.step(batches[0])
    jax.block_until_ready(state)  # its calls are counted by now
    calls = step.stats()["users"]["lookup_done_calls"]
    position = 40
    wrong = with_id(batches[1], "items", position, (int(batches[1]["ids"]["items"].reshape(-1)[position]) + 1) % 19)
    with pytest.raises(PipelineError, match=r"'items': step 1 was given another .* at position 40") as e:
        step(state, wrong, batches[2])
    assert "pass the batch that was announced, or flush, and go on with any batch" in str(e.value)
    assert step.stats()["users"]["lookup_done_calls"] == calls
    assert_goes_on(step, state, rehearsal, batches[1:])


def test_after_a_flush_any_batch_may_follow(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, batches[0], batches[1])
    rehearsal.step(batches[0])
    rehearsal.flush()
    assert_goes_on(step, step.flush(state), rehearsal, batches[2:])


def test_another_batch_on_the_devices_applies_nothing_and_is_reported_next(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, on_device(batches[0]), on_device(batches[1]))
    rehearsal.step(batches[0])
    before = training.arrays_of(step, state)
    state, metrics = step(state, on_device(batches[2]), on_device(batches[3]))
    assert np.isnan(metrics["loss"])
    assert not metrics["finite"]
    assert jax.device_get(metrics["valid"]) == {"items": 0, "users": 0}
    training.assert_same_arrays(training.arrays_of(step, state), before)
    with pytest.raises(
        PipelineError, match=r"'items' lookup_done on rank \d .* another batch: step 2 .* at position \d+"
    ):
        step(state, on_device(batches[3]))
    # What batch 0 has staged was kept, and any batch may follow.
    assert_goes_on(step, state, rehearsal, batches[4:])


def test_a_batch_that_differs_in_one_id_on_the_devices_names_its_position(step, batches):
    """Only the rank that holds it can know. The table's other ranks stop at the same place of the program."""
    state, _ = step(training.start(step), on_device(batches[0]), on_device(batches[1]))
    before = training.arrays_of(step, state)
    wrong = with_id(batches[1], "items", 70, (int(batches[1]["ids"]["items"].reshape(-1)[70]) + 1) % 19)
    state, metrics = step(state, on_device(wrong), on_device(batches[2]))
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
    state, _ = step(state, on_device(batches[0]), on_device(batches[1]))
    rehearsal.step(batches[0])
    state, _ = step(state, on_device(batches[2]))
    with pytest.raises(PipelineError, match="another batch"):
        step.snapshot(state)
    snapshot = step.snapshot(state)
    flushed = copy.deepcopy(rehearsal)
    state = step.flush(state)
    flushed.flush()
    flushed.assert_state(step, state)
    assert_goes_on(step, step.restore(snapshot), rehearsal, batches[3:])


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
    assert_goes_on(step, third, rehearsal, batches[2:])


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
        assert_goes_on(step, state, rehearsal, batches[1:])


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
        assert_goes_on(step, first, rehearsal, batches[:3])


def test_staleness_one_needs_donation():
    with pytest.raises(ContextError, match=r"staleness=1 needs donate=True \(donate_argnums of jax.jit\)"):
        training.make_step(2, 1, donate=False)


def test_the_callers_arrays_are_not_donated(batches):
    params = {"shift": jnp.float32(0.5)}
    with training.shared_step(2, 1) as step:
        training.run(step, step.init(params, jax.random.key(0)), batches)
    assert float(params["shift"]) == 0.5


# ---- ids ----


@pytest.mark.parametrize("which", ["batch", "upcoming"])
def test_host_ids_are_checked_before_the_step(step, batches, which):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1)
    state, _ = step(state, batches[0], batches[1])
    rehearsal.step(batches[0])
    jax.block_until_ready(state)  # its calls are counted by now
    before = step.stats()
    bad = with_id(batches[1], "items", 41, 19)
    with pytest.raises(
        IdError, match=r"'items': token id 19 at position 41 is outside of the table's rows \[0, 19\)"
    ) as e:
        step(state, *((bad, batches[2]) if which == "batch" else (batches[1], bad)))
    assert "id_policy='drop'" in "".join(e.value.__notes__)
    assert {k: v for k, v in step.stats()["items"].items() if "wait" not in k} == {
        k: v for k, v in before["items"].items() if "wait" not in k
    }
    assert_goes_on(step, state, rehearsal, batches[1:])


def test_ids_on_the_devices_are_reported_after_the_step_and_dropped(step, batches):
    state = training.start(step)
    rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
    run = [batches[0], with_id(with_id(batches[1], "users", 20, -3), "users", 5, 31), *batches[2:]]
    state, _ = step(state, on_device(run[0]), on_device(run[1]))
    jax.block_until_ready(state)
    with pytest.raises(IdError, match=r"'users': token id 31 at position 5 of lookup step 2 .* rows \[0, 31\)") as e:
        step(state, on_device(run[1]), on_device(run[2]))
    assert "It was dropped" in "".join(e.value.__notes__)
    # Raising clears it, and the very same call goes through.
    for k in range(1, 6):
        state, metrics = step(state, on_device(run[k]), on_device(run[k + 1]) if k < 5 else None)
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
    bad = [batches[0], with_id(batches[1], "items", 3, 77), with_id(batches[2], "items", 8, 88)]
    batches = [on_device(batch) for batch in [*bad, *batches[3:] * 100]]
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
    run = [batches[0], with_id(batches[1], "items", 3, 77), *batches[2:]]
    with training.make_step(2, 1, sync_errors=True) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
        with pytest.raises(IdError, match=r"token id 77 at position 3 of lookup step 2") as e:
            step(state, on_device(run[0]), on_device(run[1]))
        assert "go on from the state that this exception carries" in "".join(e.value.__notes__)
        state, _ = training.run(step, e.value.state, [on_device(batch) for batch in run[1:]])
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
    batches[1] = with_id(with_id(batches[1], "items", 3, 77), "users", 0, -5)
    batches[2] = with_id(batches[2], "users", 7, 2)  # 2 is padding
    batches[2]["ids"] |= {"items": batches[2]["ids"]["items"].astype(np.int64)}
    batches[2]["ids"]["items"][0, 0] = 2**32 + 1  # must not become 1
    with training.make_step(2, 1, tables={"id_policy": policy, "padding_id": 2}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy=policy, padding_id=2)
        assert_goes_on(step, state, rehearsal, batches)
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
        assert_goes_on(step, state, rehearsal, batches[:3])


@pytest.mark.filterwarnings("error")
def test_with_x64_ids_may_be_wide(batches):
    wide = [b | {"ids": jax.tree.map(lambda x: x.astype(np.int64), b["ids"])} for b in batches]
    wide[2] = with_id(wide[2], "users", 3, 2**32 + 1)
    with jax.enable_x64(True), training.make_step(2, 1, tables={"id_policy": "drop"}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, id_policy="drop")
        assert_goes_on(step, state, rehearsal, wide)
        rows = step.tables["users"].lookup(training.start(step).tables["users"], np.array([2**32 + 1, 4]))
        assert not np.asarray(rows[0]).any()


def test_ids_that_are_not_integers_are_refused(step, batches):
    state = training.start(step)
    floats = batches[0] | {"ids": {name: x.astype(np.float32) for name, x in batches[0]["ids"].items()}}
    for batch in (floats, on_device(floats)):
        with pytest.raises(IdError, match="'items': token ids are float32, but must be integers"):
            step(state, batch)


def test_batches_that_do_not_fit_the_ranks_or_the_tables_are_refused(batches):
    batch = batches[0]
    with training.shared_step(4, 1) as step:
        state = training.start(step)
        for shape in ((6,), (), (0,)):
            ids = batch["ids"] | {"users": np.zeros(shape, np.int32)}
            with pytest.raises(
                ContextError, match=rf"'users': token ids have shape \[{shape[0] if shape else ''}\].* 4 ranks"
            ):
                step(state, batch | {"ids": ids})
        with pytest.raises(ContextError, match=r"ids_of gave \['users'\], but the tables are \['items', 'users'\]"):
            step(state, batch | {"ids": {"users": batch["ids"]["users"]}})
        with pytest.raises(ContextError, match="ids_of gave list"):
            step(state, batch | {"ids": [1]})


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
        assert_goes_on(step, state, rehearsal, batches[2:])
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
        assert_goes_on(step, state, rehearsal, batches)


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
        assert_goes_on(step, step.restore(snapshot), rehearsal, batches[1:])


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"staleness": 2}, "staleness=2 must be 0 or 1"),
        ({"staleness": True}, "staleness=True must be 0 or 1"),
        ({"microbatches": 0}, "microbatches=0 must be an integer of at least 1"),
        ({"tables": {}}, "tables is empty"),
        ({"tables": {"users": 3}}, "tables must be AsyncEmbedding, but are {'users': 'int'}"),
        ({"loss_fn": None}, "must be functions"),
        ({"optimizer": RowwiseAdagrad(0.1)}, "has no update: give an optax optimizer, for the dense parameters"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    good = {
        "tables": training.make_tables(training.mesh_of(1)),
        "loss_fn": training.loss_fn,
        "optimizer": optax.sgd(1.0),
        "ids_of": training.ids_of,
    }
    with pytest.raises(ContextError, match=message):
        train_step(**(good | arguments))


def test_tables_of_one_step_need_one_mesh_the_same_axes_and_different_names():
    on = training.make_tables
    two_axes = training.mesh_of(2, 1, names=("a", "b"))

    def make(users: Any, items: Any) -> None:
        tables = {"users": users["users"], "items": items["items"]}
        train_step(tables, training.loss_fn, optax.sgd(1.0), ids_of=training.ids_of)

    with pytest.raises(ContextError, match=r"\['items', 'users'\] are on different meshes"):
        make(on(training.mesh_of(1)), on(training.mesh_of(2)))
    other_axes = AsyncEmbedding(
        two_axes, table_axis="a", rows=3, width=2, name="items", optimizer=training.default_optimizer()
    )
    with pytest.raises(ContextError, match=r"different axes \(table_axis, data_axis\)"):
        make(on(two_axes), {"items": other_axes})
    with pytest.raises(ContextError, match=r"table names \['users', 'users'\] repeat"):
        make(on(training.mesh_of(1)), {"items": on(training.mesh_of(1))["users"]})
