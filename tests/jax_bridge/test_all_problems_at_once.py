"""Whoever has made several mistakes is told of all of them by one error, and what to change."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_bridge import AsyncEmbedding, ContextError, ContextTypeError, RowwiseAdagrad, train_step

from . import _training as training
from ._programs import mesh_of


def make_table(mesh=None, **changes):
    arguments = {"table_axis": "table", "rows": 20, "width": 6, "name": "words", "optimizer": RowwiseAdagrad(0.1)}
    return AsyncEmbedding(mesh_of(2) if mesh is None else mesh, **(arguments | changes))


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


# ---- a table ----

WRONG = {
    "rows": 2.0,
    "width": 0,
    "optimizer": optax.sgd,
    "init": 3,
    "padding_id": 2**40,
    "num_unique": 0,
    "dtype": "int8",
    "id_policy": "err",
    "table_axis": "tabel",
}
MESSAGES = [
    "async_emb 'words': rows=2.0 must be an integer in [1, 2^31)",
    "async_emb 'words': width=0 must be an integer in [1, 2^20]",
    "async_emb 'words': optimizer=<function sgd",
    "async_emb 'words': init=3 is a int, but must be a function",
    "async_emb 'words': padding_id=1099511627776 does not fit int32, as token ids must",
    "async_emb num_unique=0 must be positive",
    "async_emb dtype='int8' is not supported; use one of float32, bfloat16, float16",
    "async_emb id_policy='err' is not one of 'error', 'drop', 'clamp'",
    "async_emb axis 'tabel' is not a mesh axis of ",
]


def test_a_table_reports_every_wrong_argument():
    with pytest.raises(ContextTypeError) as e:
        make_table(**WRONG)
    assert str(e.value) == MESSAGES[0]
    assert len(e.value.problems) == len(MESSAGES)
    for problem, message in zip(e.value.problems, MESSAGES, strict=True):
        assert problem.startswith(message)
    notes = notes_of(e.value)
    for number, message in enumerate(MESSAGES[1:], start=2):
        assert f"Problem {number} of {len(MESSAGES)}: {message}" in notes
    assert "init(key, (rows, width))" in notes
    assert e.value.corrections == (), "nobody can guess a width"


@pytest.mark.parametrize("name", WRONG)
def test_each_argument_of_a_table_is_refused_alone_too(name):
    with pytest.raises(ContextError) as e:
        make_table(**{name: WRONG[name]})
    assert len(e.value.problems) == 1
    assert str(e.value).startswith(MESSAGES[list(WRONG).index(name)])


def test_a_correction_of_a_table_corrects_all_of_it():
    wrong = WRONG | {"width": 2.0**21}
    del wrong["optimizer"]
    with pytest.raises(ContextError) as e:
        make_table(**wrong)
    (correction,) = e.value.corrections
    assert correction["width"] == 2**20
    assert correction["num_unique"] is None, "no bound suits every batch"
    make_table(**(wrong | correction))
    assert "Checked to pass: AsyncEmbedding(..., " in notes_of(e.value)


@pytest.mark.parametrize("dtype", ["no such thing", None, np.float64, object])
def test_a_dtype_that_numpy_or_the_kernels_do_not_know_is_refused(dtype):
    with pytest.raises(ContextError, match=r"dtype=.* is not supported; use one of float32, bfloat16, float16"):
        make_table(dtype=dtype)


def test_an_abstract_mesh_is_refused_by_name():
    mesh = jax.sharding.AbstractMesh((2,), ("table",))
    with pytest.raises(
        ContextError, match=r"async_emb mesh AbstractMesh\(.*\) is an AbstractMesh, which has no devices"
    ) as e:
        make_table(mesh, rows=0)
    assert "Give a concrete mesh: the jax.sharding.Mesh, made of devices" in notes_of(e.value)
    assert len(e.value.problems) == 2
    with pytest.raises(ContextError, match="tables must be a mapping of names to tables, not AbstractMesh"):
        train_step(mesh, training.loss_fn, optax.sgd(1.0), ids_of=training.ids_of)


@pytest.mark.parametrize("mesh", [3, "table", jax.devices()], ids=["int", "string", "devices"])
def test_what_is_no_mesh_is_refused_by_name(mesh):
    with pytest.raises(ContextError, match=rf"async_emb mesh must be a jax.sharding.Mesh, not {type(mesh).__name__}"):
        make_table(mesh)


# ---- an optimizer ----


def test_an_optimizer_reports_every_wrong_setting():
    wrong = {
        "learning_rate": -1.0,
        "eps": "1e-8",
        "weight_decay": -1,
        "initial_accumulator": float("nan"),
        "half_life": 0,
        "max_grad_norm": 0,
        "lazy": 1,
        "rounding": "up",
        "seed": 0.5,
    }
    with pytest.raises(ContextError) as e:
        RowwiseAdagrad(**wrong)
    assert [problem.split(" must be ")[0] for problem in e.value.problems] == [
        f"async_emb RowwiseAdagrad {name}={value!r}" for name, value in wrong.items()
    ]
    notes = notes_of(e.value)
    assert "Problem 9 of 9: async_emb RowwiseAdagrad seed=0.5 must be an integer in [0, 2^32)" in notes
    assert "None for no decay" in notes


# ---- a training step ----


def test_a_training_step_reports_every_wrong_argument():
    tables = training.make_tables(mesh_of(1))
    tables = {"users": tables["users"], "items": training.make_tables(mesh_of(2))["users"]}
    with pytest.raises(ContextError) as e:
        train_step(tables, None, RowwiseAdagrad(0.1), ids_of=3, staleness=2, microbatches=0, donate=False)
    expected = [
        "loss_fn and ids_of must be functions, but loss_fn=None, ids_of=3",
        "optimizer=RowwiseAdagrad(",
        "staleness=2 must be 0 or 1",
        "microbatches=0 must be an integer of at least 1",
        "the tables ['items', 'users'] are on different meshes; use one",
        "table names ['users', 'users'] repeat; contexts are told apart by name",
    ]
    assert len(e.value.problems) == len(expected)
    for problem, message in zip(e.value.problems, expected, strict=True):
        assert problem.startswith(f"async_emb train_step: {message}")
    assert "loss_fn(params, rows, batch) -> loss" in notes_of(e.value)


@pytest.mark.parametrize("tables", [None, [], {1: None}, {"users": AsyncEmbedding}], ids=repr)
def test_tables_that_are_none_do_not_hide_other_problems(tables):
    with pytest.raises(ContextError, match="async_emb train_step: tables") as e:
        train_step(tables, training.loss_fn, optax.sgd(1.0), ids_of=training.ids_of, staleness=3)
    assert e.value.problems[1:] == ("async_emb train_step: staleness=3 must be 0 or 1",)


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
def test_each_argument_of_a_training_step_is_refused_alone_too(arguments, message):
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
