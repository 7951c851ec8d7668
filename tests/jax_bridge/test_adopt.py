"""``dlpack.adopt``: a torch tensor becomes a JAX array of the same memory, or the error says what to change."""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import torch_ext
from jax_bridge import AsyncEmbedding, ContextError, RowwiseAdagrad, TransformationError, dlpack, loans
from jax_bridge.errors import ContextTypeError

from . import _per_shard as per_shard
from ._programs import assert_same_bits, assert_same_run, mesh_of, opened
from ._sharing import WIDE, address_of, addresses_of, bytes_of, notes, tensor_of, x64

# ---- what is shared


@pytest.mark.parametrize("name", dlpack.DTYPES)
def test_every_dtype_keeps_its_type_its_bits_and_its_address(name):
    with x64(name):
        tensor = tensor_of(name)
        array = dlpack.adopt(tensor)
        assert array.dtype == jnp.dtype(name)
        assert address_of(array) == tensor.data_ptr()
        assert bytes_of(array) == bytes_of(tensor)
        assert dlpack.shares_memory(array, tensor)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int32"])
def test_a_batch_is_spread_over_devices_without_a_copy(name):
    tensor = tensor_of(name).repeat(16).reshape(32, 32)
    sharding = NamedSharding(mesh_of(4), P("table"))
    array = dlpack.adopt(tensor, sharding=sharding)
    assert array.sharding == sharding
    assert bytes_of(array) == bytes_of(tensor)
    rows = [tensor[i : i + 8].data_ptr() for i in range(0, 32, 8)]
    assert addresses_of(array) == rows
    replicated = dlpack.adopt(tensor, sharding=NamedSharding(mesh_of(4), P()))
    assert addresses_of(replicated) == [tensor.data_ptr()] * 4


def test_one_device_may_be_chosen():
    tensor = torch.arange(64.0)
    for sharding in (jax.sharding.SingleDeviceSharding(jax.devices()[3]), NamedSharding(mesh_of(1), P("table"))):
        array = dlpack.adopt(tensor, sharding=sharding)
        assert array.sharding == sharding
        assert address_of(array) == tensor.data_ptr()


def test_writes_of_torch_are_seen_and_the_memory_outlives_the_tensor():
    tensor = torch.zeros(64)
    array = dlpack.adopt(tensor)
    assert str(array).startswith("[0. 0.")
    tensor.fill_(3)
    assert str(array).startswith("[3. 3.")
    del tensor
    gc.collect()
    junk = [torch.full((64,), 7.0) for _ in range(200)]
    assert_same_bits(array, np.full(64, 3, np.float32), "array")
    del junk


@pytest.mark.parametrize(
    "resize",
    [
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: tensor.resize_(10_000),
    ],
    ids=["storage", "tensor"],
)
def test_torch_does_not_resize_memory_that_jax_shares(resize):
    tensor = torch.full((64,), 3.0)
    first, second = dlpack.adopt(tensor), dlpack.adopt(tensor[16:32])
    for array in (first, second):  # while one of them is left
        with pytest.raises(RuntimeError, match="not resizable"):
            resize(tensor.detach())
        junk = [torch.full((64,), 7.0) for _ in range(200)]
        assert bytes_of(array) == bytes_of(np.full(array.shape, 3, np.float32))
        array.delete()
        gc.collect()
    resize(tensor)  # as ever again
    del junk


@pytest.mark.parametrize(
    "leave",
    [
        lambda tensor: tensor.share_memory_(),
        lambda tensor: tensor.set_(torch.zeros(3)),
        lambda tensor: setattr(tensor, "data", torch.zeros(3)),
    ],
    ids=["share_memory_", "set_", "data"],
)
def test_a_tensor_that_leaves_its_memory_leaves_it_to_jax(leave):
    tensor = torch.full((64,), 3.0)
    array = dlpack.adopt(tensor)
    leave(tensor)
    junk = [torch.full((64,), 7.0) for _ in range(200)]
    assert_same_bits(array, np.full(64, 3, np.float32), "array")
    assert not dlpack.shares_memory(array, tensor)
    array.delete()
    gc.collect()
    del tensor, junk


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_empty_tensors_and_scalars_pass(shape):
    tensor = torch.zeros(shape)
    assert dlpack.adopt(tensor).shape == shape
    assert dlpack.adopt(tensor, copy=True).shape == shape


def test_torchs_part_of_the_memory_is_forgotten_when_jax_lets_go_of_it():
    tensor = torch.zeros(64)
    claims = lambda: loans.claims_on(tensor.data_ptr(), 256)  # noqa: E731
    array = dlpack.adopt(tensor)
    moved = jax.device_put(array, NamedSharding(mesh_of(1), P()))  # another array on the same memory
    del array
    gc.collect()
    assert [claim.kind for claim in claims()] == ["adopted"]
    del moved
    gc.collect()
    assert claims() == []


# ---- copies


def strided_gradients() -> dict[str, torch.Tensor]:
    whole = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "transposed": whole.t(),
        "first two columns": whole[:, :2],
        "every second element": torch.arange(12.0)[::2],
        "one row expanded": whole[:1].expand(4, 3),
    }


@pytest.mark.parametrize("case", strided_gradients())
def test_strides_are_refused_and_a_copy_has_the_right_elements(case):
    tensor = strided_gradients()[case]
    with pytest.raises(ContextError, match=r"has the strides \(.*\): it is not contiguous") as error:
        dlpack.adopt(tensor)
    assert "tensor.contiguous()" in notes(error)
    array = dlpack.adopt(tensor, copy=True)
    assert array.shape == tuple(tensor.shape)
    for index in np.ndindex(array.shape):
        assert float(array[index]) == float(tensor[index])
    assert not dlpack.shares_memory(array, tensor)


@pytest.mark.parametrize("case", ["transposed", "columns", "every second", "expanded"])
def test_ids_and_gradients_with_strides_give_what_contiguous_ones_give(case):
    """In a lookup and an update of JAX's, and in torch's own operators."""
    tokens, width = per_shard.TOKENS, per_shard.WIDTH
    rng = np.random.default_rng(1)
    wide = torch.from_numpy(rng.normal(size=(2 * tokens, 2 * width)).astype(np.float32))
    ids = torch.from_numpy(rng.integers(0, per_shard.ROWS, 2 * tokens).astype(np.int32))[::2]
    grads = {
        "transposed": wide[:width, :tokens].t(),
        "columns": wide[:tokens, :width],
        "every second": wide[::2, :width],
        "expanded": wide[:1, :width].expand(tokens, width),
    }[case]
    assert not grads.is_contiguous()
    assert not ids.is_contiguous()
    batch = per_shard.Batch(ids.contiguous().numpy(), grads.contiguous().numpy())
    start = per_shard.make_start()
    with opened(per_shard.make_handle(2)) as handle:
        copied = per_shard.Batch(
            *(dlpack.adopt(x, copy=True, sharding=per_shard.tokens_on(handle)) for x in (ids, grads))
        )
        run = per_shard.run_exact(per_shard.exact_step(handle), handle, start, [copied])
        assert_same_run(run, per_shard.oracle(start, [batch]))
    table = torch.from_numpy(start.table)
    with pytest.raises(ValueError, match=r"strides .* make it contiguous with ids.contiguous\(\)"):
        torch_ext.gather_rows(table, ids)
    _, offsets, positions = torch_ext.unique_ids(ids.contiguous())
    with pytest.raises(ValueError, match=r"strides .* make it contiguous with grads.contiguous\(\)"):
        torch_ext.segment_sum(grads, offsets, positions)


def test_an_unaligned_tensor_is_refused_and_only_a_copy_that_was_asked_for_is_made():
    base = torch.arange(1 + 61 * 8, dtype=torch.float32)
    table = base[1:].reshape(61, 8)
    assert table.data_ptr() % 64 == 4
    with pytest.raises(ContextError, match=r"begins 4 bytes after a multiple of 64: .* 64-byte alignment") as error:
        dlpack.adopt(table)
    assert "adopt(tensor, copy=True)" in notes(error)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = dlpack.adopt(table, copy=True)
        assert not dlpack.shares_memory(copied, table)
        before = table.clone()
        batch = per_shard.make_batches(1)[0]
        with opened(per_shard.make_handle(1)) as handle:
            start = per_shard.Arrays(copied, dlpack.adopt(torch.zeros(61), copy=True))
            step = per_shard.exact_step(handle)
            address = address_of(copied)
            arrays, _, _ = step(start, batch, per_shard.place(handle, per_shard.make_start())[1])
            expected = per_shard.oracle(per_shard.Arrays(before.numpy(), np.zeros(61, np.float32)), [batch])
            assert_same_bits(arrays.table, expected.table, "JAX's side")
            assert address_of(arrays.table) == address, "the copy is XLA's own, and was updated in place"
    assert torch.equal(table, before), "torch's side has a memory of its own"
    aligned = base[16:]
    assert dlpack.shares_memory(dlpack.adopt(aligned), aligned)


def test_an_unaligned_part_is_refused_before_anything_is_shared():
    tensor = torch.zeros(4, 3)
    with pytest.raises(ContextError, match=r"float32\[1, 3\] begins 12 bytes .* part for .* of the tensor") as error:
        dlpack.adopt(tensor, sharding=NamedSharding(mesh_of(4), P("table")))
    assert len(error.value.problems) == 3
    assert "adopt(tensor, copy=True, sharding=...)" in notes(error)
    assert ".clone()" not in notes(error), "which aligns the whole, and no part"
    copied = dlpack.adopt(tensor, sharding=NamedSharding(mesh_of(4), P("table")), copy=True)
    assert bytes_of(copied) == bytes_of(tensor)


def test_columns_are_not_shared_and_a_copy_of_them_is():
    tensor, sharding = torch.arange(64.0 * 64).reshape(64, 64), NamedSharding(mesh_of(4), P(None, "table"))
    with pytest.raises(ContextError, match=r"float32\[64, 16\] has the strides \(64, 1\)") as error:
        dlpack.adopt(tensor, sharding=sharding)
    assert "split the first dimension only" in notes(error)
    assert ".contiguous()" not in notes(error), "which the whole is already"
    assert bytes_of(dlpack.adopt(tensor, copy=True, sharding=sharding)) == bytes_of(tensor)


@pytest.mark.parametrize("copy", [False, True])
def test_shardings_that_do_not_fit_are_refused_in_our_words(copy):
    mesh, tensor = mesh_of(4), torch.zeros(63)
    for sharding, message in (
        ("cpu", "sharding='cpu' is a str, but must be a jax.sharding.Sharding"),
        (P("table"), "but must be a jax.sharding.Sharding"),
        (NamedSharding(mesh, P(None, "table")), r"is for 2 dimensions, but the tensor float32\[63\] has 1"),
        (NamedSharding(mesh, P("table")), r"does not divide the tensor float32\[63\] evenly"),
        (NamedSharding(mesh.abstract_mesh, P()), "has no devices, only their outline"),
        (NamedSharding(mesh, P(), memory_kind="pinned_host"), "wants memory of the kind 'pinned_host'"),
    ):
        error = refusal(tensor, sharding=sharding, copy=copy)
        assert re.search(message, str(error.value)), str(error.value)
        assert error.value.__notes__


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("spec", [P(), P("table")])
def test_a_copy_never_shares_and_everything_else_always_does(copy, spec):
    tensor = torch.arange(256.0).reshape(16, 16)
    for sharding in (None, NamedSharding(mesh_of(4), spec)):
        array = dlpack.adopt(tensor, copy=copy, sharding=sharding)
        assert dlpack.shares_memory(array, tensor) == (not copy)
        first, last = tensor.data_ptr(), tensor.data_ptr() + 1024
        assert all((first <= address < last) == (not copy) for address in addresses_of(array))
        assert bytes_of(array) == bytes_of(tensor)


# ---- what is refused


def refusal(tensor: Any, **options: Any) -> Any:
    with pytest.raises(ContextError) as error:
        dlpack.adopt(tensor, **options)
    return error


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("copy", [False, True])
def test_64_bits_are_refused_without_x64(name, copy):
    error = refusal(tensor_of(name), copy=copy)
    narrow = dlpack.NARROWED[name]
    assert f"the tensor {name}[64]: JAX without x64 would narrow {name} to {narrow}" in str(error.value)
    assert f"tensor.to(torch.{narrow})" in notes(error)
    assert "jax_enable_x64" in notes(error)


def test_a_parameter_is_refused_until_it_is_detached():
    parameter = torch.nn.Parameter(torch.arange(64.0))
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            error = refusal(parameter)
            assert "requires grad" in str(error.value)
            assert notes(error) == "Adopt tensor.detach()."
    array = dlpack.adopt(parameter.detach())
    assert address_of(array) == parameter.data_ptr()
    assert parameter.requires_grad
    assert parameter.grad is None


def test_a_tensor_without_memory_is_refused_with_its_device():
    assert "is on the device meta" in str(refusal(torch.zeros(64, device="meta")).value)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.zeros(64)
    assert "has no memory" in str(refusal(fake).value)
    del mode
    inside = []

    def function(x):
        inside.append(refusal(x))
        return x.sum()

    torch.func.grad(function)(torch.zeros(64))
    torch.func.vmap(function)(torch.zeros(2, 64))
    assert all("torch.func" in notes(error) for error in inside)
    assert len(inside) == 2


def test_layouts_and_lazy_tensors_are_refused():
    assert "layout torch.sparse_coo" in str(refusal(torch.eye(4).to_sparse()).value)
    assert "resolve_conj" in notes(refusal(torch.zeros(8, dtype=torch.complex64).conj()))
    assert "resolve_neg" in notes(refusal(torch.zeros(8, dtype=torch.complex64).conj().imag))


def test_other_things_are_refused_by_type():
    for thing in (np.zeros(3), jnp.zeros(3), [1.0], None):
        error = refusal(thing)
        assert isinstance(error.value, ContextTypeError)
        assert type(thing).__name__ in str(error.value)


def test_all_problems_are_listed_at_once():
    tensor = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True).t()
    assert len(refusal(tensor).value.problems) == 3


def test_a_view_of_a_jax_array_is_not_adopted_again():
    array = jnp.arange(64.0)
    with dlpack.view(array) as tensor:
        error = refusal(tensor[:16])
        assert "is a view of a JAX array" in str(error.value)
        copied = dlpack.adopt(tensor[:16], copy=True)
    assert_same_bits(copied, np.arange(16, dtype=np.float32), "copy")
    assert "the view of the array float32[64] has ended" in notes(refusal(tensor))


@pytest.mark.parametrize("name", ["bool", "float8_e4m3fn"])
def test_what_kernels_cannot_compute_on_is_refused_by_their_own_check(name):
    with pytest.raises(ContextError, match=name):
        AsyncEmbedding(
            mesh_of(1),
            table_axis="table",
            rows=8,
            width=8,
            name="t",
            optimizer=RowwiseAdagrad(learning_rate=1),
            dtype=jnp.dtype(name),
        )
    table = tensor_of(name).reshape(8, 8)
    with pytest.raises(TypeError, match=r"gather_rows: table has dtype .*supported are float32, bfloat16, float16"):
        torch_ext.gather_rows(table, torch.tensor([1]))


# ---- transformations


def test_an_adopted_array_goes_through_every_transformation():
    tensor = torch.arange(64.0)
    array = dlpack.adopt(tensor)
    loss = lambda x: (x * x).sum()  # noqa: E731
    assert_same_bits(jax.grad(loss)(array), 2 * tensor.numpy(), "grad")
    assert_same_bits(jax.vmap(loss)(array.reshape(8, 8)), (tensor.reshape(8, 8) ** 2).sum(1).numpy(), "vmap")
    assert_same_bits(jax.jacfwd(lambda x: 2 * x)(array[:4]), 2 * np.eye(4, dtype=np.float32), "jacfwd")
    compiled = jax.jit(loss).lower(jax.ShapeDtypeStruct((64,), np.float32)).compile()
    assert float(compiled(array)) == float((tensor * tensor).sum())
    exported = jax.export.export(jax.jit(loss))(array)
    assert float(exported.call(array)) == float((tensor * tensor).sum())


def test_adopting_inside_of_a_compiled_function_is_refused_with_the_route():
    tensor = torch.arange(64.0)
    for transformed in (
        jax.jit,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.jit(jax.vmap(f)),
        lambda f: jax.jit(jax.jacfwd(f)),
    ):
        with pytest.raises(TransformationError, match=r"async_emb adopt was called inside of jax\.jit") as error:
            transformed(lambda x: (dlpack.adopt(tensor).sum() * x).sum())(jnp.ones(2))
        assert "as an argument" in notes(error)
    # Where nothing is traced that would outlive the call, it is what it is elsewhere.
    assert float(jax.grad(lambda x: x * dlpack.adopt(tensor).sum())(1.0)) == float(tensor.sum())
