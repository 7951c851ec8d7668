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
