"""``dlpack.view``: torch borrows a JAX array's memory for a block, and nobody is shown memory that is gone."""

from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_ext
from jax_bridge import ContextError, PipelineError, TransformationError, dlpack, loans, runtime
from jax_bridge.errors import ContextTypeError

from . import _per_shard as per_shard
from . import _training as training
from ._programs import assert_same_bits, mesh_of, opened
from ._sharing import address_of, addresses_of, bits_of, bytes_of, notes, x64

# ---- what is shared


@pytest.mark.parametrize("name", dlpack.DTYPES)
def test_every_dtype_keeps_its_type_its_bits_and_its_address(name):
    with x64(name):
        array = jnp.copy(bits_of(name).view(jnp.dtype(name)))
        with dlpack.view(array) as tensor:
            assert tensor.dtype == getattr(torch, name)
            assert tensor.data_ptr() == address_of(array)
            assert bytes_of(tensor) == bytes_of(array) == bits_of(name).tobytes()


@pytest.mark.parametrize("name", ["int4", "uint4", "int2"])
def test_a_dtype_that_torch_cannot_share_is_refused_with_the_list_of_those_it_can(name):
    array = jnp.zeros(64, name)
    with pytest.raises(ContextError, match=rf"{name}\[64\]; dtypes that both have: bool, int8, .*float8_e4m3fn"):
        dlpack.view(array).__enter__()
    with pytest.raises(ContextError, match="key"):
        dlpack.view(jax.random.key(0)).__enter__()


@pytest.mark.parametrize("spec", [P("table"), P(None, "table"), P()])
def test_a_sharded_array_is_lent_shard_by_shard(spec):
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(host, NamedSharding(mesh_of(4), spec))
    with dlpack.view_shards(array) as shards:
        assert [shard.tensor.data_ptr() for shard in shards] == addresses_of(array)
        assert [shard.device for shard in shards] == list(mesh_of(4).devices.flat)
        for shard in shards:
            assert torch.equal(shard.tensor, torch.from_numpy(host[shard.index]))
        assert sorted({shard.replica for shard in shards}) == ([0, 1, 2, 3] if spec == P() else [0])
        kept = [shard.tensor for shard in shards]
    for tensor in kept:
        with pytest.raises(RuntimeError, match="has ended"):
            tensor.sum()
    with pytest.raises(ContextError, match="lies on 4 devices") as error:
        dlpack.view(array).__enter__()
    assert "view_shards" in notes(error)
    with dlpack.view(array.addressable_shards[2].data) as one:
        assert one.data_ptr() == addresses_of(array)[2]


def test_a_view_waits_for_the_array():
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ x, x))
    array = busy(jnp.eye(200))
    with dlpack.view(array) as tensor:
        assert torch.equal(tensor, torch.eye(200))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_empty_arrays_and_scalars_pass(shape):
    with dlpack.view(jnp.zeros(shape)) as tensor:
        assert tuple(tensor.shape) == shape


# ---- what a tensor does that was kept

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": torch.sum,
    "print": str,
    "clone": torch.clone,
    "item": lambda t: t[0, 0].item(),
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "asarray": np.asarray,
    "address": torch.Tensor.data_ptr,
    "capsule": lambda t: t.__dlpack__(),
    "product": lambda t: t @ t,
    "compare": lambda t: torch.equal(t, t),
    "cast": torch.Tensor.double,
    "index": lambda t: t[torch.tensor([0, 1])],
    "embedding": lambda t: torch.nn.functional.embedding(torch.tensor([1]), t),
    "our operator": lambda t: torch_ext.gather_rows(t, torch.tensor([1])),
    "copy from": lambda t: torch.zeros(8, 8).copy_(t),
    "write": lambda t: t.fill_(1),
    "write an element": lambda t: t.__setitem__((0, 0), 1.0),
    "add in place": lambda t: t.add_(1),
    "copy to": lambda t: t.copy_(torch.zeros(8, 8)),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "share with processes": torch.Tensor.share_memory_,
    "storage": lambda t: t.untyped_storage().tolist(),
    "address of the storage": lambda t: t.untyped_storage().data_ptr(),
}


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_was_kept_says_that_its_view_has_ended(use):
    array = jnp.arange(64.0).reshape(8, 8)
    with dlpack.view(array) as tensor:
        kept = {
            "itself": tensor,
            "a slice": tensor[:, :],
            "detached": tensor.detach(),
            "bits": tensor.view(torch.float32),
        }
    del array
    for what, x in kept.items():
        with pytest.raises(RuntimeError, match=r"the view of the array float32\[8, 8\] has ended"):
            pytest.fail(f"{what} gave {USES[use](x)}")


def test_what_autograd_has_saved_says_so_too():
    array = jnp.arange(4.0)
    factor = torch.ones(4, requires_grad=True)
    with dlpack.view(array) as tensor:
        product = (factor * tensor).sum()
    with pytest.raises(RuntimeError, match="has ended"):
        product.backward()


def test_a_clone_is_kept():
    array = jnp.arange(4.0)
    with dlpack.view(array) as tensor:
        clone = tensor.clone()
    del array, tensor
    assert clone.tolist() == [0, 1, 2, 3]


def test_a_storage_that_the_block_has_put_in_place_stays():
    array = jnp.arange(4.0)
    other = torch.ones(4)
    with dlpack.view(array) as tensor:
        aside = tensor.view(4)
        tensor.set_(other)
    assert other.sum() == tensor.sum() == 4
    with pytest.raises(RuntimeError, match="has ended"):
        aside.sum()


def test_a_block_that_raises_and_a_view_that_is_dropped_end_the_view():
    array = jnp.arange(4.0)
    with pytest.raises(ZeroDivisionError), dlpack.view(array) as tensor:
        1 / 0  # noqa: B018
    dropped = dlpack.view(array).__enter__()
    gc.collect()
    for x in (tensor, dropped):
        with pytest.raises(RuntimeError, match="has ended"):
            x.sum()
    assert loans.claims_on(address_of(array), 16) == []


def test_the_source_may_go_and_the_view_keeps_its_values():
    for go in (lambda array: array.delete(), lambda array: None):
        array = jnp.arange(4096.0)
        with dlpack.view(array) as tensor:
            go(array)
            del array
            gc.collect()
            junk = [jnp.full(4096, 7.0) for _ in range(100)]
            jax.block_until_ready(junk)
            assert torch.equal(tensor, torch.arange(4096.0))


# ---- writes


def test_each_side_sees_what_the_other_writes():
    array = jnp.arange(4.0)
    assert str(array) == "[0. 1. 2. 3.]"
    with dlpack.view(array) as tensor:
        tensor[1] = 9
        assert str(array) == "[0. 9. 2. 3.]"
    assert_same_bits(array, np.array([0, 9, 2, 3], np.float32), "after the block")
    assert_same_bits(jax.jit(lambda x: 2 * x)(array), np.array([0, 18, 4, 6], np.float32), "in a program")


@pytest.mark.parametrize("ranks", [1, 4])
def test_our_readers_show_writes_though_the_array_was_printed_before(ranks):
    """JAX keeps the host copy that it has made of a sharded array to print it."""
    with training.make_step(ranks, 0) as step:
        state = training.start(step)
        table, weights = step.tables["items"], state.tables["items"].weights
        assert np.asarray(weights).shape[0] == training.ROWS["items"]
        str(weights)
        with dlpack.view_shards(weights) as shards:
            for shard in shards:
                shard.tensor[3] = 5
        assert np.all(table.to_arrays(state.tables["items"])[0][3] == 5)
        assert np.all(np.asarray(table.lookup(state.tables["items"], [3])) == 5)
        assert np.all(step.snapshot(state)["tables"]["items"]["weights"][3] == 5)


# ---- steps while a view is alive


def take_parts(state: Any) -> dict[str, Any]:
    return {
        "weights": state.tables["items"].weights.addressable_data(0),
        "optimizer": state.tables["users"].optimizer["accumulator"].addressable_data(0),
        "params": state.params["shift"].addressable_data(0),
    }


@pytest.mark.parametrize("part", ["weights", "optimizer", "params"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_no_step_starts_while_a_view_of_its_state_is_alive_and_nothing_is_lost(staleness, part):
    batches = training.make_batches(3)
    with training.shared_step(2, staleness) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), staleness)
        for batch, upcoming in zip(batches, [*batches[1:], None], strict=True):
            before = [addresses_of(x.weights) for x in state.tables.values()]
            with dlpack.view(take_parts(state)[part]) as tensor:
                with pytest.raises(PipelineError, match="was to be donated while torch has a view of it") as error:
                    step(state, batch, upcoming)
                assert "Leave the `with view(...)` block" in notes(error)
                tensor.sum()
            state, _ = step(state, batch, upcoming)
            assert [addresses_of(x.weights) for x in state.tables.values()] == before, "updated in place"
            rehearsal.step(batch)
        with dlpack.view(take_parts(state)[part]), pytest.raises(PipelineError, match="was to be donated"):
            step.flush(state)
        state = step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, state)


def test_what_donates_nothing_runs_while_a_view_is_alive():
    batch, upcoming = training.make_batches(2)
    with training.make_step(2, 1) as step:
        state = training.start(step)
        state, _ = step(state, batch, upcoming)
        weights = state.tables["items"].weights
        with dlpack.view(weights.addressable_data(0)) as tensor:
            taken = step.snapshot(state)
            step.tables["items"].lookup(state.tables["items"], [1, 2])
            step.stats()
            restored = step.restore(taken)
            step(restored, upcoming)
            assert bytes_of(tensor) == bytes_of(weights.addressable_data(0))
            step.flush(step.init({"shift": np.float32(0)}, jax.random.key(0)))
    with training.make_step(2, 0, donate=False) as step:
        state = training.start(step)
        with dlpack.view(state.tables["items"].weights.addressable_data(0)) as tensor:
            before = tensor.clone()
            after, _ = step(state, batch)
            assert torch.equal(tensor, before)
            assert addresses_of(after.tables["items"].weights)[0] != tensor.data_ptr()


def test_a_view_shows_the_update_after_the_step_at_the_same_address():
    batch = training.make_batches(1)[0]
    with training.make_step(1, 0) as step:
        state = training.start(step)
        with dlpack.view(state.tables["items"].weights) as tensor:
            before, address = tensor.clone(), tensor.data_ptr()
        state, _ = step(state, batch)
        with dlpack.view(state.tables["items"].weights) as tensor:
            assert tensor.data_ptr() == address
            assert not torch.equal(tensor, before)
            assert torch.equal(tensor, torch.from_numpy(step.tables["items"].to_arrays(state.tables["items"])[0]))


def test_a_table_that_torch_owns_is_refused_by_a_step_until_it_is_copied():
    batch = training.make_batches(1)[0]
    with training.make_step(1, 0) as step:
        state = training.start(step)
        owned = torch.from_numpy(step.tables["items"].to_arrays(state.tables["items"])[0]).clone()
        table = state.tables["items"]._replace(
            weights=dlpack.adopt(owned, sharding=state.tables["items"].weights.sharding)
        )
        adopted = state._replace(tables=state.tables | {"items": table})
        rows = step.tables["items"].lookup(table, [0, 1])  # reading is free
        assert_same_bits(rows, owned[:2].numpy(), "rows")
        before = owned.clone()
        with pytest.raises(PipelineError, match="torch owns its memory") as error:
            step(adopted, batch)
        assert "from_arrays" in notes(error)
        copied = step.tables["items"].from_arrays(np.asarray(table.weights), dict(table.optimizer))
        after, _ = step(adopted._replace(tables=state.tables | {"items": copied}), batch)
        assert not np.array_equal(step.tables["items"].to_arrays(after.tables["items"])[0], before.numpy())
        assert torch.equal(owned, before)


def test_steps_of_ones_own_ask_too():
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    with opened(per_shard.make_handle(2)) as handle:
        step = per_shard.exact_step(handle)
        arrays, gate = per_shard.place(handle, start)
        with (
            dlpack.view_shards(arrays.table),
            pytest.raises(PipelineError, match=r"the array at \.table was to be"),
        ):
            dlpack.require_donatable(arrays)
        with dlpack.view_shards(arrays.table), pytest.raises(PipelineError, match=r"the array at \[1\]\.table was"):
            dlpack.require_donatable(batch, arrays)
        dlpack.require_donatable(arrays, None, 3, [np.zeros(3), jax.random.key(0)])
        arrays, _, _ = step(arrays, batch, gate)
        assert_same_bits(arrays.table, per_shard.oracle(start, [batch]).table, "table")


def test_a_stale_step_of_ones_own_that_does_not_ask_is_refused_by_the_context():
    """It would update a copy that XLA has made, and not the table that was looked up."""
    start, batches = per_shard.make_start(), per_shard.make_batches(3)
    with opened(per_shard.make_handle(2)) as handle:
        arm, step, _ = per_shard.stale_steps(handle)
        arrays, gate = per_shard.place(handle, start)
        arrays, pin = arm(arrays, batches[0].ids, gate)
        arrays, pin, *_ = jax.block_until_ready(step(arrays, batches[0], batches[1].ids, pin))
        with (
            dlpack.view_shards(arrays.table),
            pytest.raises(jax.errors.JaxRuntimeError, match="different table buffers"),
        ):
            jax.block_until_ready(step(arrays, batches[1], batches[2].ids, pin))
        runtime.close_context(handle)
        runtime.open_context(handle)
        per_shard.assert_trains_like_the_oracle(handle)


def test_a_table_that_was_donated_says_that_it_is_gone():
    batch = training.make_batches(1)[0]
    with training.make_step(1, 0) as step:
        state = training.start(step)
        old = state.tables["items"].weights
        step(state, batch)
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(old)
        with pytest.raises(PipelineError, match="was deleted, or given to a step"):
            dlpack.view(old).__enter__()


def test_views_of_several_threads_do_not_disturb_each_other():
    arrays = [jnp.full(1024, float(i)) for i in range(8)]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            with dlpack.view(arrays[i]) as tensor, dlpack.view(arrays[i]) as again:
                if not (torch.all(tensor == i) and tensor.data_ptr() == again.data_ptr()):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(loans.claims_on(address_of(array), array.nbytes) == [] for array in arrays)


# ---- what is refused


def test_other_things_are_refused_by_type():
    for thing in (np.zeros(3), torch.zeros(3), [1.0], None):
        with pytest.raises(ContextTypeError, match=f"expected a jax.Array, not {type(thing).__name__}"):
            dlpack.view(thing).__enter__()


def viewed(x: Any) -> Any:
    with dlpack.view(x) as tensor:
        return tensor.sum()


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.grad, jax.vmap, jax.jacfwd, lambda f: jax.export.export(jax.jit(f)), lambda f: jax.jit(f).lower],
)
def test_a_view_inside_of_a_transformation_is_refused_with_the_route(transform):
    with pytest.raises(TransformationError, match=r"async_emb view was called inside of jax\.jit") as error:
        transform(viewed)(jnp.arange(4.0))
    assert "Call it outside" in notes(error)
    assert isinstance(error.value, NotImplementedError)


def test_torchs_transformations_go_through_a_view():
    array = jnp.arange(4.0)
    loss = lambda x: (x * x).sum()  # noqa: E731
    with dlpack.view(array) as tensor:
        assert torch.func.grad(loss)(tensor).tolist() == [0, 2, 4, 6]
        assert torch.func.vmap(loss)(tensor.view(2, 2)).tolist() == [1, 13]
        assert torch.equal(torch.func.jacfwd(lambda x: 2 * x)(tensor), 2 * torch.eye(4))


def test_nothing_warns():
    array = jnp.arange(16.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with dlpack.view(array) as tensor:
                assert tensor.sum() == 120
