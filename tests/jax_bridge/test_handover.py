"""A trained table becomes an ordinary ``torch.nn.Embedding`` or a flat mapping of arrays, and comes back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_bridge import AsyncEmbedding, ContextError, PipelineError, RowwiseAdagrad, dlpack, handover

from . import _training as training
from ._programs import assert_same_bits, mesh_of
from ._sharing import addresses_of, bytes_of, notes

LAZY = RowwiseAdagrad(learning_rate=0.1, half_life=20, lazy=True)
DTYPES = ["float32", "bfloat16", "float16"]


def make_table(ranks: int = 1, *, rows: int = 19, width: int = 6, **options: Any) -> AsyncEmbedding:
    options = {"optimizer": LAZY, "init": training.quick_init, "name": "words"} | options
    return AsyncEmbedding(mesh_of(ranks), table_axis="table", rows=rows, width=width, **options)


def made(ranks: int = 1, **options: Any) -> tuple[AsyncEmbedding, Any]:
    table = make_table(ranks, **options)
    return table, table.init(jax.random.key(0))


# ---- the logical form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "onto"), [(1, 4), (4, 1), (3, 2)])
def test_the_logical_form_knows_no_layout(ranks, onto, dtype):
    table, state = made(ranks, dtype=jnp.dtype(dtype))
    arrays = handover.logical_table(table, state, step=7)
    assert {key: (x.dtype.name, x.shape) for key, x in arrays.items()} == {
        "weight": (dtype, (19, 6)),
        "accumulator": ("float32", (19,)),
        "last_step": ("int32", (19,)),
        "step": ("int64", ()),
    }
    arrays["accumulator"][:] = np.arange(19)
    other = make_table(onto, dtype=jnp.dtype(dtype))
    again = handover.logical_table(other, handover.table_state(other, arrays), step=arrays["step"])
    assert again.keys() == arrays.keys()
    for key in arrays:
        assert_same_bits(again[key], arrays[key], key)


def test_the_state_owns_its_memory():
    table, state = made()
    arrays = handover.logical_table(table, state)
    loaded = handover.table_state(table, arrays)
    arrays["weight"][:] = 0
    arrays["accumulator"][:] = 5
    assert_same_bits(table.to_arrays(loaded)[0], table.to_arrays(state)[0], "weights")
    assert not np.any(np.asarray(loaded.optimizer["accumulator"]))


def test_weights_alone_start_with_a_fresh_optimizer():
    table, state = made()
    weight = handover.logical_table(table, state)["weight"]
    loaded = handover.table_state(table, {"weight": weight})
    assert {key: np.asarray(x).tolist() for key, x in loaded.optimizer.items()} == {
        key: x.tolist() for key, x in LAZY.init(19).items()
    }


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("flushed", [True, False])
def test_training_goes_on_from_the_logical_form_as_if_it_had_never_left(staleness, flushed):
    """Gradients that are staged go along."""
    batches = training.make_batches(6)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), staleness)
        state, _ = training.run(step, state, batches[:3])
        for batch in batches[:3]:
            rehearsal.step(batch)
        if flushed:
            state = step.flush(state)
            rehearsal.flush()
        snapshot = step.snapshot(state)
        logical = {name: handover.from_snapshot(snapshot, name) for name in training.NAMES}
        assert ("staged_ids" in logical["items"]) == (staleness == 1 and not flushed)
        assert all(int(arrays["step"]) == 3 for arrays in logical.values())
        dense = {"params": snapshot["params"], "opt_state": snapshot["opt_state"]}
    with training.shared_step(2, staleness) as step:
        state = step.restore(handover.to_snapshot(logical, **dense))
        training.assert_goes_on(step, state, rehearsal, batches[3:])


def test_tables_of_two_moments_make_no_snapshot():
    table, state = made()
    one, two = (handover.logical_table(table, state, step=step) for step in (3, 4))
    with pytest.raises(ContextError, match=r"each needs the same step.*steps are {'a': 3, 'b': 4}"):
        handover.to_snapshot({"a": one, "b": two}, params=None, opt_state=None)
    staged = one | {"staged_ids": np.zeros(1, np.int32)}
    with pytest.raises(ContextError, match=r"staged in \['a'\]"):
        handover.to_snapshot({"a": staged, "b": one}, params=None, opt_state=None)


MISFITS = {
    "unknown": (lambda a: a | {"bias": a["weight"]}, r"has \['bias'\], which the table does not know"),
    "no weight": (lambda a: {k: x for k, x in a.items() if k != "weight"}, "has no weight"),
    "half an optimizer": (lambda a: {k: x for k, x in a.items() if k != "last_step"}, "has no last_step"),
    "rows": (lambda a: a | {"weight": a["weight"][:-1]}, r"has weight float32\[18, 6\].* needs float32\[19, 6\]"),
    "dtype": (lambda a: a | {"weight": a["weight"].astype(np.float64)}, r"has weight float64\[19, 6\]"),
    "optimizer": (lambda a: a | {"accumulator": a["last_step"]}, r"has accumulator int32\[19\].* needs float32\[19\]"),
    "staged": (lambda a: a | {"staged_ids": np.zeros(1, np.int32)}, "has gradients staged"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(case):
    change, message = MISFITS[case]
    table, state = made()
    with pytest.raises(ContextError, match=f"async_emb 'words': the logical table {message}"):
        handover.table_state(table, change(handover.logical_table(table, state)))


def test_all_misfits_are_listed():
    table = make_table()
    with pytest.raises(ContextError) as error:
        handover.table_state(table, {"weight": np.zeros((1, 1)), "bias": np.zeros(3), "accumulator": np.zeros(19)})
    assert len(error.value.problems) == 4


# ---- an ordinary embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_an_embedding_has_the_bits_of_the_logical_table(ranks, dtype):
    table, state = made(ranks, dtype=jnp.dtype(dtype))
    embedding = handover.to_embedding(table, state)
    assert type(embedding) is torch.nn.Embedding
    assert embedding.weight.requires_grad
    assert (embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx) == (19, 6, None)
    assert bytes_of(embedding.weight.detach()) == table.to_arrays(state)[0].tobytes()
    ids = [3, 0, 18, 3]
    assert bytes_of(embedding(torch.tensor(ids)).detach()) == np.asarray(table.lookup(state, ids)).tobytes()
    back = handover.from_embedding(table, embedding)
    assert_same_bits(table.to_arrays(back)[0], table.to_arrays(state)[0], "back")
    assert back.weights.sharding.is_equivalent_to(state.weights.sharding, 2)
    with torch.no_grad():
        embedding.weight.fill_(9)
    assert_same_bits(table.to_arrays(back)[0], table.to_arrays(state)[0], "a memory of its own")


def test_on_one_device_an_embedding_is_lent_and_what_torch_trains_jax_goes_on_from():
    batch = training.make_batches(1)[0]
    with training.make_step(1, 0) as step:
        state = training.start(step)
        table = step.tables["items"]
        address = addresses_of(state.tables["items"].weights)
        expected = torch.nn.Embedding.from_pretrained(
            torch.from_numpy(table.to_arrays(state.tables["items"])[0]), freeze=False
        )
        with handover.embedding_view(table, state.tables["items"]) as embedding:
            assert type(embedding) is torch.nn.Embedding
            assert [embedding.weight.data_ptr()] == address
            for each in (embedding, expected):
                each(torch.tensor([1, 2, 1])).square().sum().backward()
                torch.optim.SGD(each.parameters(), lr=0.5).step()
            with pytest.raises(PipelineError, match="torch has a view"):
                step(state, batch)
        with pytest.raises(RuntimeError, match="has ended"):
            embedding(torch.tensor([1]))
        trained = table.to_arrays(state.tables["items"])[0]
        assert_same_bits(trained, expected.weight.detach().numpy(), "what torch has trained")
        rehearsal = training.Rehearsal(training.arrays_of(step, state), 0)
        state, _ = step(state, batch)
        rehearsal.step(batch)
        rehearsal.assert_state(step, state)
        assert addresses_of(state.tables["items"].weights) == address


def test_on_one_device_the_memory_may_be_given_for_good():
    table, state = made()
    before, (address,) = table.to_arrays(state)[0], addresses_of(state.weights)
    embedding = handover.to_embedding(table, state, donate=True)
    assert embedding.weight.data_ptr() == address
    assert state.weights.is_deleted()
    assert_same_bits(embedding.weight.detach().numpy(), before, "weights")
    junk = [jnp.full((19, 6), 7.0) for _ in range(100)]
    jax.block_until_ready(junk)
    assert_same_bits(embedding.weight.detach().numpy(), before, "nobody else writes there")
    with pytest.raises(PipelineError, match="deleted, or given to a step"):
        handover.to_embedding(table, state, donate=True)
    with pytest.raises(PipelineError):
        table.lookup(state, [1])


@pytest.mark.parametrize(
    "other",
    [{"width": 7}, {"rows": 18}, {"dtype": jnp.bfloat16}, {"optimizer": RowwiseAdagrad(0.1, lazy=False)}],
    ids=["width", "rows", "dtype", "optimizer"],
)
def test_the_state_of_another_table_is_refused_by_name(other):
    table = make_table(2)
    state = make_table(2, **other).init(jax.random.key(0))
    for call in (
        lambda: handover.to_embedding(table, state),
        lambda: handover.to_embedding(table, state, donate=True),
        lambda: handover.embedding_view(table, state).__enter__(),
        lambda: handover.logical_table(table, state),
    ):
        with pytest.raises(ContextError, match=r"'words': the state is of another table: it has .* this table's has"):
            call()
    assert not state.weights.is_deleted()


def test_messages_name_the_call():
    table, state = made(2)
    for call, name in (
        (lambda: handover.to_embedding(table, state, donate=True), "to_embedding"),
        (lambda: handover.embedding_view(table, state).__enter__(), "embedding_view"),
        (lambda: dlpack.give(state.weights), "give"),
        (lambda: dlpack.view(state.weights).__enter__(), "view"),
    ):
        with pytest.raises(ContextError, match=f"async_emb {name}: the array float32.* lies on 2 devices"):
            call()
    table, state = made()
    handover.to_embedding(table, state, donate=True)
    for call, name in (
        (lambda: handover.to_embedding(table, state), "view_shards"),
        (lambda: dlpack.give(state.weights), "give"),
    ):
        with pytest.raises(PipelineError, match=f"async_emb {name}: the array float32.* was deleted, or given"):
            call()


def test_memory_that_cannot_be_given_stays():
    table, state = made(2)
    with pytest.raises(ContextError, match="lies on 2 devices"):
        handover.to_embedding(table, state, donate=True)
    with pytest.raises(ContextError, match="lies on 2 devices"):
        handover.embedding_view(table, state).__enter__()
    table, state = made(1)
    with dlpack.view(state.weights), pytest.raises(PipelineError, match="torch has a view"):
        handover.to_embedding(table, state, donate=True)
    assert not state.weights.is_deleted()


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("padding_id", [2, -1])
def test_the_padding_row_reads_as_the_table_reads_it(padding_id, donate):
    table, state = made(padding_id=padding_id)
    rows = np.asarray(table.lookup(state, [1, 2]))
    if padding_id == 2:
        with pytest.raises(ContextError, match="row 2 is the padding_id") as error:
            handover.embedding_view(table, state).__enter__()
        assert "to_embedding makes zeros" in notes(error)
    embedding = handover.to_embedding(table, state, donate=donate)
    assert embedding.padding_idx == (2 if padding_id == 2 else None)
    assert_same_bits(embedding(torch.tensor([1, 2])).detach().numpy(), rows, "rows")


def test_another_embedding_is_refused_by_name():
    table = make_table()
    for embedding, message in (
        (torch.nn.Embedding(19, 5), r"the embedding has weight float32\[19, 5\], but the table needs float32\[19, 6\]"),
        (torch.nn.Embedding(19, 6).double(), r"the embedding has weight float64\[19, 6\]"),
    ):
        with pytest.raises(ContextError, match=message):
            handover.from_embedding(table, embedding)
