"""A snapshot that a step cannot go on from is refused by the names of what does not fit, and costs nothing."""

from __future__ import annotations

import copy
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from jax_bridge import ContextError, ContextTypeError, RowwiseAdagrad, with_next

from . import _training as training

BATCHES = training.make_batches(5)
AT = 2  # steps before the snapshot
ITEMS = "snapshot['tables']['items']"
STAGED = "snapshot['staged']['items']"


@pytest.fixture(scope="module")
def taken():
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        for k in range(AT):
            state, _ = step(state, BATCHES[k], BATCHES[k + 1])
        return step.snapshot(state)


def changed(snapshot: Any, *path: str, to: Any) -> Any:
    """A copy in which what is at ``path`` is replaced; removed where ``to`` is a KeyError."""
    snapshot = copy.deepcopy(snapshot)
    at = snapshot
    for key in path[:-1]:
        at = at[key]
    if to is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = to(at[path[-1]]) if callable(to) else to
    return snapshot


def to_dtype(dtype: Any) -> Any:
    return lambda x: x.astype(dtype)


REFUSED = [
    (("step",), KeyError, "snapshot has no 'step', but needs it: an integer scalar"),
    (("armed",), KeyError, "snapshot has no 'armed', but needs it: ids of the batch that was announced, or None"),
    (("staged",), KeyError, "snapshot has no 'staged', but needs it: gradients that wait for the next update"),
    (("tables",), KeyError, "snapshot has no 'tables', but needs it: weights and optimizer of each table"),
    (("step",), np.float32(2), "snapshot['step'] is float32[] 2.0, but must be an integer scalar in [0, 2^31)"),
    (("step",), np.int32(-2), "snapshot['step'] is int32[] -2, but must be"),
    (("step",), np.zeros(2, np.int32), "snapshot['step'] is int32[2], but must be"),
    (("tables", "items"), KeyError, "the snapshot has tables ['users'], but the step has ['items', 'users']"),
    (("tables", "items"), 3, f"{ITEMS} has no 'weights', but needs it: float32[19, 6]"),
    (("tables", "items", "weights"), KeyError, f"{ITEMS} has no 'weights', but needs it: float32[19, 6]"),
    (("tables", "items", "optimizer"), KeyError, f"{ITEMS} has no 'optimizer', but needs it"),
    (
        ("tables", "items", "weights"),
        to_dtype(np.float64),
        f"{ITEMS}['weights'] is float64[19, 6], but the table 'items' needs float32[19, 6]",
    ),
    (("tables", "items", "weights"), to_dtype(ml_dtypes.bfloat16), f"{ITEMS}['weights'] is bfloat16[19, 6], but"),
    (("tables", "items", "weights"), to_dtype(np.int32), f"{ITEMS}['weights'] is int32[19, 6], but"),
    (("tables", "items", "weights"), lambda x: x[:18], f"{ITEMS}['weights'] is float32[18, 6], but"),
    (
        ("tables", "items", "optimizer", "accumulator"),
        to_dtype(np.float16),
        f"{ITEMS}['optimizer']['accumulator'] is float16[19], but the optimizer needs float32[19]",
    ),
    (("tables", "items", "optimizer", "accumulator"), KeyError, f"{ITEMS}['optimizer'] is {{}}, but RowwiseAdagrad("),
    (
        ("tables", "items", "optimizer", "last_step"),
        np.zeros(19, np.int32),
        f"{ITEMS}['optimizer'] is {{'accumulator': 'float32[19]', 'last_step': 'int32[19]'}}, but RowwiseAdagrad(",
    ),
    (("staged", "items"), KeyError, "gradients are staged for ['users'], but the step has ['items', 'users']"),
    (("staged", "items", "ids"), KeyError, f"{STAGED} has no 'ids', but needs it: int32[tokens]"),
    (
        ("staged", "items", "grads"),
        lambda x: x[:, :5],
        f"{STAGED}['grads'] is float32[72, 5], but the table 'items' needs float32[72, 6]",
    ),
    (("staged", "items", "grads"), to_dtype(np.float64), f"{STAGED}['grads'] is float64[72, 6], but the table 'items'"),
    (("staged", "items", "ids"), to_dtype(np.int64), f"{STAGED}['ids'] is int64[72], but the step needs int32[72]"),
    (("staged", "items", "pending"), np.int32(1), f"{STAGED}['pending'] is int32[], but the step needs bool[]"),
    (
        ("staged", "items", "ids"),
        lambda ids: np.where(np.arange(72) < 40, ids, 19).astype(np.int32),
        f"{STAGED}['ids'] has 32 ids outside of the table's rows [0, 19): 19 at position 40 is the first",
    ),
    (("armed", "items"), KeyError, "the announced batch (snapshot['armed']) has ids for ['users'], but the step has"),
    (
        ("armed", "items"),
        to_dtype(np.float32),
        "snapshot['armed']['items'] is float32[24, 3], but the step needs integers",
    ),
    (
        ("armed", "items"),
        lambda x: x[:8],
        "snapshot['armed']['items'] is int32[8, 3], but the step needs integers, 72 of",
    ),
    (("opt_state",), (), "snapshot['opt_state'] is PyTreeDef(()), but the step's optimizer needs PyTreeDef("),
]


@pytest.mark.parametrize(("path", "to", "message"), REFUSED)
def test_what_does_not_fit_is_named_with_what_was_found_and_what_is_needed(taken, path, to, message):
    with training.shared_step(2, 1) as step, pytest.raises(ContextError) as e:
        step.restore(changed(taken, *path, to=to))
    assert str(e.value).startswith(f"async_emb restore: {message}")


def test_every_problem_is_listed_and_nothing_is_dropped(taken):
    broken = changed(taken, "tables", "items", "weights", to=to_dtype(np.float64))
    broken = changed(broken, "tables", "users", "optimizer", to=KeyError)
    broken = changed(broken, "staged", "users", "ids", to=to_dtype(np.int64))
    del broken["step"]
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), 1)
        state, _ = step(state, BATCHES[0], BATCHES[1])
        with pytest.raises(ContextError) as e:
            step.restore(broken)
        assert [problem.split(", but")[0] for problem in e.value.problems] == [
            "async_emb restore: snapshot has no 'step'",
            f"async_emb restore: {ITEMS}['weights'] is float64[19, 6]",
            "async_emb restore: snapshot['tables']['users'] has no 'optimizer'",
            "async_emb restore: snapshot['staged']['users']['ids'] is int64[24]",
        ]
        assert "restore converts nothing" in "".join(e.value.__notes__)
        state, _ = training.train(step, state, with_next(BATCHES[1:]))
        for batch in BATCHES:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)
        step.flush(state)


@pytest.mark.parametrize("snapshot", [None, 3, [1]], ids=repr)
def test_what_is_no_snapshot_is_refused(snapshot):
    message = (
        f"the snapshot is a {type(snapshot).__name__}, but must be a mapping with the keys params, opt_state, step"
    )
    with training.shared_step(2, 1) as step, pytest.raises(ContextTypeError, match=message):
        step.restore(snapshot)


def test_staged_gradients_need_staleness_one(taken):
    with training.shared_step(2, 0) as step, pytest.raises(ContextError, match="restore it with staleness=1 and flush"):
        step.restore(taken)


def test_staged_gradients_need_a_number_of_devices_that_shares_them_evenly(taken):
    with training.make_step(5, 1) as step, pytest.raises(ContextError) as e:
        step.restore(taken)
    assert e.value.problems == (
        f"async_emb restore: {STAGED} is of 72 tokens, which 5 ranks cannot share evenly",
        "async_emb restore: snapshot['staged']['users'] is of 24 tokens, which 5 ranks cannot share evenly",
    )
    assert "flush before the snapshot: then any number does" in e.value.__notes__[0]


def test_a_snapshot_needs_the_optimizer_that_it_was_taken_with(taken):
    with (
        training.make_step(
            2, 1, optimizer=optax.adam(0.1), tables={"optimizer": RowwiseAdagrad(0.1, lazy=True)}
        ) as step,
        pytest.raises(ContextError) as e,
    ):
        step.restore(taken)
    assert [problem.split(" is ")[0] for problem in e.value.problems] == [
        "async_emb restore: snapshot['opt_state']",
        f"async_emb restore: {ITEMS}['optimizer']",
        "async_emb restore: snapshot['tables']['users']['optimizer']",
    ]


def test_bits_without_the_name_of_their_dtype_are_taken_by_a_table_of_that_size_alone(taken):
    nameless = changed(taken, "tables", "items", "weights", to=lambda x: x.astype(ml_dtypes.bfloat16).view("V2"))
    with (
        training.shared_step(2, 1) as step,
        pytest.raises(ContextError, match=r"\['weights'\] is void16\[19, 6\], but"),
    ):
        step.restore(nameless)


def test_arrays_of_jax_are_arrays(taken):
    with training.shared_step(2, 1) as step:
        state = step.restore(jax.tree.map(jax.numpy.asarray, taken))
        training.assert_same_arrays(jax.device_get(step.snapshot(state)), taken)
