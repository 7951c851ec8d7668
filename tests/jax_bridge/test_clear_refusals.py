"""Mistakes that new users make, and what they are told: in the words of the function they have called."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_bridge import AsyncEmbedding, ContextError, PipelineError, RowwiseAdagrad

from . import _training as training
from ._programs import mesh_of


def make_table(**changes):
    arguments = {"table_axis": "table", "rows": 20, "width": 6, "name": "words", "optimizer": RowwiseAdagrad(0.1)}
    return AsyncEmbedding(mesh_of(2), **(arguments | changes))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"table_axis": "tabel"}, {"table_axis": ("table",), "data_axis": ("table",)}),
        ({"id_policy": "err"}, {"id_policy": "error"}),
        ({"dtype": "int8"}, {"dtype": "float32"}),
    ],
)
def test_corrections_of_a_table_are_its_own_arguments_and_pass(wrong, right):
    with pytest.raises(ContextError) as e:
        make_table(**wrong)
    assert right in e.value.corrections
    for correction in e.value.corrections:
        make_table(**(wrong | correction))
    notes = "\n".join(e.value.__notes__)
    assert "Checked to pass: AsyncEmbedding(..., " in notes
    assert "make_context_handle(..., " not in notes


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_state_that_a_step_has_taken_is_refused_by_name(staleness):
    batches = training.make_batches(3)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        following = (lambda k: batches[k]) if staleness else (lambda k: None)
        new, _ = step(state, batches[0], following(1))
        with pytest.raises(PipelineError, match="state that the last call returned"):
            step(state, batches[1], following(2))
        with pytest.raises(PipelineError, match="'users': this table was given to a step since"):
            step.tables["users"].lookup(state.tables["users"], [1, 2])
        new, _ = step(new, batches[1], following(2))
        step.flush(new)


def test_a_step_of_staleness_1_is_refused_inside_of_jit():
    batches = training.make_batches(2)
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        with pytest.raises(PipelineError, match=r"inside of jax\.jit.*call it directly.*step\.program"):
            jax.jit(lambda state, batch: step(state, batch, batch))(state, batches[0])
        state, metrics = step(state, batches[0], batches[1])
        assert metrics["finite"]
        step.flush(state)


class FakeGpu:
    platform = "gpu"
    process_index = 0
    id = 0
    local_hardware_id = 0


def test_a_mesh_of_gpus_is_refused_before_a_table_is_made():
    mesh = Mesh(np.array([FakeGpu()]), ("table",))
    table = AsyncEmbedding(mesh, table_axis="table", rows=20, width=6, name="words", optimizer=RowwiseAdagrad(0.1))
    with pytest.raises(ContextError, match="the mesh is of GPUs, but torch_ext was not built with CUDA, because"):
        table.init(jax.random.key(0))


@pytest.mark.parametrize("staleness", [0, 1])
def test_one_table_under_two_names_is_refused_by_name(staleness):
    batches = training.make_batches(2)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        twice = state._replace(params=state.params, tables=dict.fromkeys(state.tables, state.tables["users"]))
        with pytest.raises(
            PipelineError, match=r"state\.tables\['items'\].* and state\.tables\['users'\].* are one array"
        ):
            step(twice, batches[0], batches[1] if staleness else None)
        state, _ = step(state, batches[0], batches[1] if staleness else None)
        step.flush(state)


def test_a_wrong_table_fails_one_lookup_and_no_later_one():
    table = make_table()
    state = table.init(jax.random.key(0))
    short = jax.device_put(np.asarray(state.weights)[:10], state.weights.sharding)
    with pytest.raises(ContextError, match=r"'words': the table's weights is float32\[10, 6\], .* float32\[20, 6\]"):
        table.lookup(state._replace(weights=short), [1, 2])
    assert table.lookup(state, [1, 2]).shape == (2, 6)
    table.close()


def test_an_initializer_of_another_shape_is_refused():
    table = make_table(init=lambda key, shape: np.zeros((shape[0] - 1, shape[1]), np.float32))
    with pytest.raises(
        ContextError, match=r"what init returns is float32\[19, 6\], but the table needs float32\[20, 6\]"
    ):
        table.init(jax.random.key(0))


def test_a_step_whose_context_was_taken_over_says_so():
    batches = training.make_batches(3)
    first, second = training.make_step(2, 1), training.make_step(2, 1)
    with first, second:
        state, _ = first(training.start(first), batches[0], batches[1])
        second(training.start(second), batches[0], batches[1])
        with pytest.raises(PipelineError, match="another TrainStep has begun on a table of this name"):
            first(state, batches[1], batches[2])


def test_ids_of_another_byte_order_are_ids():
    table = make_table()
    state = table.init(jax.random.key(0))
    swapped = np.array([3, 1], np.dtype(np.int32).newbyteorder())
    np.testing.assert_array_equal(table.lookup(state, swapped), table.lookup(state, [3, 1]))
    table.close()
