"""What can be seen of CUDA on a machine that has none: the text that programs for it become, and the words with which
a mesh of GPUs is refused by a build without CUDA."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import torch_ext
from jax_bridge import ContextError, export_checks, global_ops, make_context_handle, ops, order, runtime

from . import _per_shard as per_shard
from . import _training as training
from ._programs import Batch, Rule, assert_same_bits, assert_same_run, handle_on, mesh_of, numbers_of, program
from ._stablehlo import Call, Program

# Aliased (operand, result) pairs; update_begin has nine operands before its buffers.
ALIASES = {
    "lookup_begin": ((1, 1),),
    "lookup_lease": ((0, 0),),
    "lookup_lease_beside_update": ((0, 0), (1, 1)),
    "update_begin": ((9, 1), (10, 2)),
    "update_begin_lazy": ((9, 1), (10, 2), (11, 3)),
    "update_lease": ((0, 0), (1, 1)),
    "update_lease_lazy": ((0, 0), (1, 1), (2, 2)),
    "settle": ((0, 0),),
    "depend": ((0, 0),),
    "mark": ((0, 0),),
}
WITHOUT_SIDE_EFFECT = {"depend"}


@pytest.fixture(params=[("cuda",), ("cpu", "cuda")], ids="+".join)
def platforms(request):
    return request.param


def exported(platforms: tuple[str, ...], jitted: Any, *arguments: Any) -> Program:
    result = export.export(jitted, platforms=platforms, disabled_checks=export_checks())(*arguments)
    assert result.platforms == platforms
    return Program(result.mlir_module())


def short(call: Call) -> str:
    return call.target.removeprefix("async_emb_")


def assert_calls_are_as_on_cpu(text: Program) -> None:
    for call in text.calls:
        name = short(call)
        assert call.target in runtime.native().ffi_targets("CUDA"), "a handler is there under this very name"
        assert call.aliases == ALIASES.get(name, ()), name
        assert call.side_effect == (name not in WITHOUT_SIDE_EFFECT), name
        has_context = name not in ("depend", "mark")
        assert ("context_id" in call.attrs) == has_context, name


def makers_of(text: Program, *shapes: str) -> set[str]:
    """Operations that give a value of one of these shapes, and are none of our calls in place."""
    kinds = {operation for operation, kind in text.made if any(f"tensor<{shape}x" in kind for shape in shapes)}
    return {kind for kind in kinds if kind.removeprefix("async_emb_") not in ALIASES}


# ---- per-shard operations


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("segments", [False, True], ids=["own unique ids", "segments of the caller"])
def test_the_operations_of_an_exact_step_lower_for_cuda(platforms, ranks, lazy, segments):
    handle = handle_on(mesh_of(ranks), tokens=16, width=8, name="lowered")
    rule = Rule(lazy=lazy, max_grad_norm=1.0, rounding="stochastic", seed=5)
    steps = program(handle, lazy, True, "stochastic")
    batch = Batch(np.zeros(16, np.int32), np.zeros((16, 8), np.float32))
    if segments:
        batch = batch._replace(segment_ids=np.zeros(16, np.int32), unique_tokens=np.arange(16, dtype=np.int32))
    arrays = (np.zeros((61, 8), np.float32), np.zeros(61, np.float32), np.zeros(61, np.int32))
    text = exported(platforms, steps.exact_step, arrays, tuple(batch), numbers_of(rule, 3), np.zeros(ranks, np.float32))
    suffix = "_lazy" if lazy else ""
    assert [short(call) for call in text.calls] == [
        "lookup_begin",
        "lookup_lease",
        "lookup_done_checked",
        "depend",
        "stage_update_segments" if segments else "stage_update",
        f"update_begin{suffix}",
        f"update_lease{suffix}",
        "update_done",
    ]
    assert_calls_are_as_on_cpu(text)
    (begin,) = text.of(f"update_begin{suffix}")
    assert begin.attrs == ("clips", "context_id", "stochastic_rounding")
    assert makers_of(text, f"61x{8 // ranks}") == set(), "no copy of a table, or of its state"
    for earlier, later in itertools.pairwise(text.calls):
        if "lease" not in later.target and "lease" not in earlier.target:
            assert text.waits_for(later, earlier), (later.target, earlier.target)


@pytest.mark.parametrize("ranks", [1, 4])
def test_settle_lowers_for_cuda_behind_what_it_is_given(platforms, ranks):
    handle = handle_on(mesh_of(ranks), tokens=16, width=8, name="lowered")
    tokens, table = P(handle.data_axis), P(None, handle.table_axis)

    def arm(table: Any, ids: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(ids, table, gate, handle)
        return ops.settle(table, pin, handle), pin

    jitted = jax.jit(jax.shard_map(arm, mesh=handle.mesh, in_specs=(table, tokens, tokens), out_specs=(table, tokens)))
    text = exported(
        platforms, jitted, np.zeros((61, 8), np.float32), np.zeros(16, np.int32), np.zeros(ranks, np.float32)
    )
    assert [short(call) for call in text.calls] == ["lookup_begin", "lookup_lease", "settle"]
    assert_calls_are_as_on_cpu(text)
    assert text.comes_from(0, text.of("settle")[0]), "the table that leaves is the one at rest"
    assert not text.comes_from(1, text.of("settle")[0]), "a pin does not wait for that"


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_evaluation_lookup_lowers_for_cuda(platforms, ranks):
    handle = handle_on(mesh_of(ranks), tokens=16, width=8, name="lowered", purpose="lookup")
    jitted = jax.jit(lambda ids, table: global_ops.lookup_now(ids, table, handle))
    text = exported(platforms, jitted, np.zeros(16, np.int32), np.zeros((61, 8), np.float32))
    assert [short(call) for call in text.calls] == ["lookup_now"]
    assert_calls_are_as_on_cpu(text)
    assert makers_of(text, f"61x{8 // ranks}", "61x8") == set()


def test_depend_and_mark_lower_for_cuda_and_so_does_the_gradient(platforms):
    def loss(x: Any, pin: Any) -> Any:
        return (order.mark(order.depend(x, pin), "here") ** 2).sum()

    text = exported(platforms, jax.jit(jax.grad(loss)), jnp.ones((5, 3)), jnp.zeros(1))
    assert [short(call) for call in text.calls] == ["depend", "mark"]
    assert_calls_are_as_on_cpu(text)
    assert makers_of(text, "5x3") <= {"stablehlo.multiply", "stablehlo.constant", "stablehlo.broadcast_in_dim"}


# ---- training steps


@functools.cache
def step_text(platforms: tuple[str, ...], ranks: int, staleness: int) -> tuple[Program, Any]:
    batch = training.make_batches(1)[0]
    with training.make_step(mesh_of(ranks), staleness) as step:
        state = training.start(step)
        steps, ids = step.program_for(batch), training.ids_of(batch)
        if staleness == 0:
            return exported(platforms, jax.jit(steps.exact, donate_argnums=0), state, batch, ids), step
        return exported(platforms, jax.jit(steps.stale, donate_argnums=0), state, batch, ids, ids), step


def shard_shapes(step: Any, ranks: int) -> list[str]:
    return [f"{table.rows}x{table.padded_width // ranks}" for table in step.tables.values()]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_stale_step_lowers_for_cuda_and_settles_at_its_end(platforms, ranks):
    text, step = step_text(platforms, ranks, staleness=1)
    assert_calls_are_as_on_cpu(text)
    tables = len(step.tables)
    assert text.of("lookup_begin") == [], "it would wait for the table, which the update has"
    kinds = (
        "lookup_begin_beside_update",
        "lookup_done_checked",
        "update_begin",
        "update_done",
        "stage_update",
        "settle",
    )
    for name in kinds:
        assert len(text.of(name)) == tables, name
    for settle in text.of("settle"):
        # Every stage waits for the backward, so a wait of the stream for the side stream stands behind all of it.
        for name in ("stage_update", "lookup_begin_beside_update", "update_done"):
            assert all(text.waits_for(settle, call) for call in text.of(name)), name
        for name in kinds[:-1]:
            assert not any(text.waits_for(call, settle) for call in text.of(name)), "nothing of the step waits for it"
    for stage in text.of("stage_update"):
        assert all(text.waits_for(stage, begin) for begin in text.of("lookup_begin_beside_update"))
        assert all(text.waits_for(stage, done) for done in text.of("update_done"))
    assert makers_of(text, *shard_shapes(step, ranks)) == set()


@pytest.mark.parametrize("ranks", [1, 4])
def test_tables_leave_the_stale_step_through_settle_alone(ranks):
    text, _ = step_text(("cuda",), ranks, staleness=1)
    leaving = {value for call in text.of("settle") for value in call.results}
    assert leaving <= set(text.results)
    leases = ("lookup_lease_beside_update", "update_lease")
    lent = {value for name in leases for call in text.of(name) for value in call.results[:1]}
    assert not lent & set(text.results)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_exact_step_lowers_for_cuda_as_one_chain(platforms, ranks):
    text, step = step_text(platforms, ranks, staleness=0)
    assert_calls_are_as_on_cpu(text)
    chain = ["lookup_begin", "lookup_done_checked", "stage_update", "update_begin", "update_done"]
    for earlier, later in itertools.pairwise(chain):
        assert all(text.waits_for(b, a) for a in text.of(earlier) for b in text.of(later)), (earlier, later)
    assert text.of("settle") == [], "nothing is under way at the end"
    assert makers_of(text, *shard_shapes(step, ranks)) == set()


def test_one_text_serves_both_platforms():
    both, _ = step_text(("cpu", "cuda"), 4, staleness=1)
    for platform in ("cpu", "cuda"):
        alone, _ = step_text((platform,), 4, staleness=1)
        assert [call._replace(results=()) for call in alone.calls] == [c._replace(results=()) for c in both.calls]


# ---- exporting, as a user does it


def test_an_exported_step_runs_with_the_bits_of_the_oracle():
    handle = per_shard.make_handle(4, "exported")
    start, batches = per_shard.make_start(), per_shard.make_batches(3)
    first = per_shard.with_batch(handle, start, batches[0])
    step = per_shard.exact_step(handle)
    program = export.export(step, platforms=["cpu", "cuda"], disabled_checks=export_checks())(*first)
    # Donation is the caller's: a table that is updated in place has to be given away again.
    run = jax.jit(program.call, donate_argnums=0)
    placed = jax.tree.map(lambda x: jax.device_put(x, per_shard.tokens_on(handle)), batches)
    assert_same_run(per_shard.run_exact(run, handle, start, placed), per_shard.oracle(start, batches))
    runtime.close_context(handle)


def test_without_the_helper_jax_refuses_and_names_our_call():
    handle = per_shard.make_handle(1, "exported")
    arguments = per_shard.with_batch(handle, per_shard.make_start(), per_shard.make_batches(1)[0])
    with pytest.raises(ValueError, match="async_emb_lookup_begin"):
        export.export(per_shard.exact_step(handle), platforms=["cuda"])(*arguments)


def test_the_helper_lists_every_call():
    assert len(export_checks()) == len(set(export_checks())) == len(runtime.native().ffi_targets("CUDA"))


def test_a_step_compiled_ahead_of_time_gives_the_same_bits():
    handle = per_shard.make_handle(4, "ahead of time")
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    step = per_shard.exact_step(handle)
    compiled = step.lower(*per_shard.with_batch(handle, start, batch)).compile()
    placed = jax.device_put(per_shard.with_batch(handle, start, batch), compiled.input_shardings[0])
    arrays, rows, _ = compiled(*placed)
    assert_same_bits(rows, start.table[batch.ids], "rows")
    assert_same_bits(arrays.table, per_shard.oracle(start, [batch]).table, "table")
    runtime.close_context(handle)


# ---- a mesh of GPUs on a build without CUDA


class FakeGpu:
    """As much of a jax device as a mesh and a context look at."""

    platform = "gpu"
    device_kind = "no real GPU"
    process_index = 0

    def __init__(self, number: int) -> None:
        self.id = self.local_hardware_id = number

    def __repr__(self) -> str:
        return f"CudaDevice(id={self.id})"


def mesh_of_gpus(*numbers: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array([FakeGpu(number) for number in numbers]), ("table",))


def gpu_handle(mesh: jax.sharding.Mesh) -> Any:
    return make_context_handle(
        mesh,
        "table",
        data_axis="table",
        tokens_per_batch=8,
        emb_width=4,
        num_unique=8,
        num_devices_per_node=mesh.devices.size,
        dtype=np.float32,
        name="on gpus",
    )


@pytest.mark.skipif(bool(torch_ext.build_info().get("cuda")), reason="this build has CUDA")
def test_a_mesh_of_gpus_is_refused_with_the_reason_and_the_remedy():
    handle = gpu_handle(mesh_of_gpus(0, 1))
    with pytest.raises(ContextError) as caught:
        runtime.open_context(handle)
    message = str(caught.value)
    assert message.startswith(
        "async_emb context 'on gpus': the mesh is of GPUs, but torch_ext was not built with CUDA, because "
    )
    assert "\n" not in message
    assert any("ASYNC_EMB_CUDA=1 python -m pip install" in note for note in caught.value.__notes__)
    assert not runtime.is_open(handle)


@pytest.mark.skipif(bool(torch_ext.build_info().get("cuda")), reason="this build has CUDA")
def test_an_operation_is_refused_with_the_same_reason_while_it_is_traced():
    handle = gpu_handle(mesh_of_gpus(0))
    table = jax.ShapeDtypeStruct((9, 4), np.float32)
    ids, gate = jax.ShapeDtypeStruct((8,), np.int32), jax.ShapeDtypeStruct((1,), np.float32)
    with pytest.raises(ContextError, match="not built with CUDA"):
        jax.eval_shape(lambda ids, table, gate: ops.lookup_start(ids, table, gate, handle), ids, table, gate)


def test_gpus_and_cpus_of_the_same_numbers_are_different_contexts():
    cpus = make_context_handle(
        mesh_of(1),
        "table",
        data_axis="table",
        tokens_per_batch=8,
        emb_width=4,
        num_unique=8,
        num_devices_per_node=1,
        dtype=np.float32,
        name="on gpus",
    )
    assert cpus.flatten_replicas == gpu_handle(mesh_of_gpus(0)).flatten_replicas
    assert cpus.context_id != gpu_handle(mesh_of_gpus(0)).context_id


def test_a_gpu_of_another_process_is_refused_by_name():
    foreign = FakeGpu(3)
    foreign.process_index = 1
    handle = gpu_handle(jax.sharding.Mesh(np.array([foreign]), ("table",)))
    with pytest.raises(ContextError, match=r"no device of the mesh belongs to this process, 0: .* process 1"):
        runtime.open_context(handle)
