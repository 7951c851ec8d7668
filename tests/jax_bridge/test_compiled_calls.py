"""What the compiler makes of the calls: none is removed or merged, and they come in the order of the data, whatever the
order of the source lines. Every native call counts itself."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_bridge import PipelineError, ops, order, runtime, with_next

from . import _per_shard as per_shard
from . import _two_tables as two
from ._per_shard import Arrays
from ._programs import assert_same_bits, mesh_of, opened

RANKS = 4


@pytest.fixture
def handle(monkeypatch):
    monkeypatch.setenv("ASYNC_EMB_TIMEOUT_SECONDS", "8")  # a call that waits for nothing ends, and says so
    with opened(per_shard.make_handle(RANKS)) as handle:
        yield handle


def one_program(handle: Any, body: Callable[..., Any], out_specs: Any) -> Any:
    """(arrays, batch, gate) -> what `body` gives, jitted on the mesh. Arrays are donated."""
    arrays, batch, gate, _ = per_shard.specs_of(handle)
    sharded = jax.shard_map(body, mesh=handle.mesh, in_specs=(arrays, batch, gate), out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=0)


def run_once(handle: Any, body: Callable[..., Any], out_specs: Any) -> tuple[Any, Any, Any]:
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    out = one_program(handle, body, out_specs)(*per_shard.with_batch(handle, start, batch))
    return jax.block_until_ready(out), start, batch


# ---- nothing is removed, nothing is merged ----


def test_a_staged_gradient_whose_pin_nobody_reads_reaches_native_code(handle):
    def body(arrays: Any, batch: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch.ids, arrays.table, gate, handle)
        rows = ops.lookup_done(pin, handle)
        ops.stage_update(batch.grads, None, None, True, per_shard.rows_gate(pin, rows), handle)
        return arrays._replace(table=table)

    run_once(handle, body, per_shard.specs_of(handle)[0])
    assert runtime.stats(handle)["stage_calls"] == RANKS
    runtime.check(handle)


def test_the_same_gradient_staged_twice_is_two_calls_and_the_second_is_refused(handle):
    def body(arrays: Any, batch: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch.ids, arrays.table, gate, handle)
        rows = ops.lookup_done(pin, handle)
        gate = per_shard.rows_gate(pin, rows)
        for _ in range(2):
            ops.stage_update(batch.grads, None, None, True, gate, handle)
        return arrays._replace(table=table)

    run_once(handle, body, per_shard.specs_of(handle)[0])
    stats = runtime.stats(handle)
    assert (stats["stage_calls"], stats["refused_calls"]) == (2 * RANKS, RANKS)
    with pytest.raises(PipelineError, match="stage_update number 2 came before an update start took number 1"):
        runtime.check(handle)


def test_the_same_update_applied_twice_is_two_calls_and_the_second_is_refused(handle):
    def body(arrays: Any, batch: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch.ids, arrays.table, gate, handle)
        rows = ops.lookup_done(pin, handle)
        gate = ops.stage_update(batch.grads, None, None, True, per_shard.rows_gate(pin, rows), handle)
        once, _, first = per_shard.update(Arrays(table, arrays.row_state), gate, handle)
        twice, _, second = per_shard.update(once, gate, handle)
        return twice, first, second

    arrays, _, gate, _ = per_shard.specs_of(handle)
    (updated, *_), start, batch = run_once(handle, body, (arrays, gate, gate))
    stats = runtime.stats(handle)
    assert (stats["update_begin_calls"], stats["update_lease_calls"]) == (2 * RANKS, 2 * RANKS)
    assert stats["update_done_calls"] == 2 * RANKS
    assert stats["updates"] == 1
    with pytest.raises(PipelineError, match=r"update (start|_?done)"):
        runtime.check(handle)
    assert_same_bits(updated.table, per_shard.oracle(start, [batch]).table, "table, updated once")


def test_a_lookup_whose_rows_nobody_reads_is_made_and_keeps_nobody_waiting(handle):
    def body(arrays: Any, batch: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch.ids, arrays.table, gate, handle)
        ops.lookup_done(pin, handle, token_ids=batch.ids)
        return arrays._replace(table=table)

    run_once(handle, body, per_shard.specs_of(handle)[0])
    stats = runtime.stats(handle)
    assert (stats["lookup_begin_calls"], stats["lookup_done_calls"], stats["lookups"]) == (RANKS, RANKS, 1)
    per_shard.assert_trains_like_the_oracle(handle)


def test_a_start_and_its_done_may_be_in_two_programs(handle):
    def start_only(arrays: Any, batch: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch.ids, arrays.table, gate, handle)
        return arrays._replace(table=table), pin

    arrays, batch_spec, gate, _ = per_shard.specs_of(handle)
    ((_, pin), start, batch) = run_once(handle, start_only, (arrays, gate))
    done = jax.shard_map(
        lambda pin, ids: ops.lookup_done(pin, handle, token_ids=ids),
        mesh=handle.mesh,
        in_specs=(gate, batch_spec.ids),
        out_specs=batch_spec.grads,
    )
    assert_same_bits(jax.jit(done)(pin, batch.ids), start.table[batch.ids], "rows")


# ---- order ----


def overlapping_steps(handles: list[Any], source_order: str) -> tuple[Any, Any, Any]:
    """Staleness 1 over two tables whose calls are ordered within each table only. Programs as `per_shard.stale_steps`,
    on pairs."""
    both = [per_shard.specs_of(handle) for handle in handles]
    arrays, batch, gate = (tuple(specs[i] for specs in both) for i in range(3))

    def jit(function: Any, in_specs: Any, out_specs: Any) -> Any:
        sharded = jax.shard_map(function, mesh=handles[0].mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(sharded, donate_argnums=0)

    indices = (1, 0) if source_order == "reversed" else (0, 1)

    def arm(arrays: Any, ids: Any, pins: Any) -> Any:
        arrays, pins = list(arrays), list(pins)
        for t in indices:
            table, pins[t] = ops.lookup_start(ids[t], arrays[t].table, pins[t], handles[t])
            arrays[t] = arrays[t]._replace(table=table)
        return tuple(arrays), tuple(pins)

    def step(arrays: Any, batch: Any, next_ids: Any, pins: Any) -> Any:
        arrays, pins, rows = list(arrays), list(pins), [None, None]

        def consume(t: int) -> None:
            rows[t] = ops.lookup_done(pins[t], handles[t], token_ids=batch[t].ids)
            pins[t] = per_shard.rows_gate(pins[t], rows[t])

        def apply(t: int) -> None:
            arrays[t], _, pins[t] = per_shard.update(arrays[t], pins[t], handles[t])

        def start(t: int) -> None:
            table, pins[t] = ops.lookup_start(next_ids[t], arrays[t].table, pins[t], handles[t])
            arrays[t] = arrays[t]._replace(table=table)

        def stage(t: int) -> None:
            staged = ops.stage_update(batch[t].grads, None, None, True, pins[t], handles[t])
            pins[t] = order.depend(pins[t], staged)

        calls = (consume, apply, start, stage)
        if source_order == "table by table":
            for t in indices:
                for call in calls:
                    call(t)
        else:
            for call in calls:
                for t in indices:
                    call(t)
        return tuple(arrays), tuple(pins), tuple(rows)

    def flush(arrays: Any, pins: Any) -> Any:
        out = []
        for t in indices:
            rows = ops.lookup_done(pins[t], handles[t])
            out.append((t, per_shard.update(arrays[t], per_shard.rows_gate(pins[t], rows), handles[t])[0]))
        return tuple(updated for _, updated in sorted(out, key=lambda pair: pair[0]))

    ids = tuple(spec.ids for spec in batch)
    rows = tuple(spec.grads for spec in batch)
    return (
        jit(arm, (arrays, ids, gate), (arrays, gate)),
        jit(step, (arrays, batch, ids, gate), (arrays, gate, rows)),
        jit(flush, (arrays, gate), arrays),
    )


@pytest.mark.parametrize(("source_order", "runs"), [("interleaved", 200), ("table by table", 20), ("reversed", 20)])
def test_overlapping_steps_over_two_tables_are_exactly_one_step_stale_in_every_run(source_order, runs):
    handles = [per_shard.make_handle(RANKS, name) for name in ("first", "second")]
    starts = [per_shard.make_start(seed) for seed in (1, 2)]
    batches = list(zip(*(per_shard.make_batches(4, seed) for seed in (5, 6)), strict=True))
    expected = [per_shard.oracle(starts[t], [pair[t] for pair in batches], 1) for t in range(2)]
    arm, step, flush = overlapping_steps(handles, source_order)
    on_device = [jax.tree.map(lambda x: jax.device_put(x, per_shard.tokens_on(handles[0])), pair) for pair in batches]
    for _ in range(runs):
        arrays, gates = zip(*(per_shard.place(h, start) for h, start in zip(handles, starts, strict=True)), strict=True)
        arrays, pins = arm(arrays, tuple(batch.ids for batch in on_device[0]), gates)
        all_rows = []
        for k, pair in enumerate(on_device):
            next_ids = tuple(batch.ids for batch in on_device[min(k + 1, len(on_device) - 1)])
            arrays, pins, rows = step(arrays, pair, next_ids, pins)
            all_rows.append(rows)
        arrays = flush(arrays, pins)
        for t in range(2):
            assert_same_bits(np.stack([np.asarray(rows[t]) for rows in all_rows]), expected[t].rows, "rows")
            assert_same_bits(arrays[t].table, expected[t].table, "table")
            assert_same_bits(arrays[t].row_state, expected[t].row_state, "row_state")
            runtime.native().return_to_first_step(handles[t].context_id)
    for handle in handles:
        runtime.check(handle)
        runtime.close_context(handle)


# ---- buffers that the caller reuses ----


def test_ids_may_be_overwritten_as_soon_as_their_lookup_has_begun(handle):
    """The last device comes late, so that the others' lookups wait while their ids are overwritten."""
    held_back = threading.Event()
    last = handle.flatten_replicas[-1]

    def wait_on_last(rank: Any, gate: Any) -> Any:
        if int(rank) == RANKS - 1:
            assert held_back.wait(60), last
        return np.asarray(gate)

    def body(arrays: Any, batch: Any, gate: Any) -> Any:
        rank = jax.lax.axis_index(handle.table_axis)
        gate = jax.pure_callback(wait_on_last, jax.ShapeDtypeStruct((1,), np.float32), rank, gate)
        table, pin = ops.lookup_start(batch.ids, arrays.table, gate, handle)
        return arrays._replace(table=table), ops.lookup_done(pin, handle)

    arrays_spec, batch_spec, gate_spec, _ = per_shard.specs_of(handle)
    program = jax.jit(
        jax.shard_map(
            body,
            mesh=handle.mesh,
            in_specs=(arrays_spec, batch_spec, gate_spec),
            out_specs=(arrays_spec, batch_spec.grads),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
    wanted = start.table[batch.ids]
    arrays, gate = per_shard.place(handle, start)
    batch_on_device = jax.device_put(batch, per_shard.tokens_on(handle))
    _, rows = program(arrays, batch_on_device, gate)
    deadline = time.monotonic() + 60
    while runtime.stats(handle)["tokens"] < (RANKS - 1) * handle.tokens_per_rank:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for shard in batch_on_device.ids.addressable_shards[:-1]:
        ctypes.memset(shard.data.unsafe_buffer_pointer(), 0, shard.data.nbytes)
    held_back.set()
    assert_same_bits(rows, wanted, "rows of the ids that were there at the start")


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_object_has_its_ids_when_the_step_returns(staleness):
    """A loader that fills the same arrays again and again, without waiting for the steps."""
    batches = two.make_batches(6)
    step = two.make_step(mesh_of(RANKS), staleness=staleness)

    def loop(loader: Any) -> Any:
        losses = []
        with step:
            state = step.init(two.make_params(), jax.random.key(0))
            for batch, upcoming in loader:
                state, metrics = step(state, batch, upcoming)
                losses.append(metrics["loss"])
            return step.snapshot(step.flush(state))["tables"], np.stack(losses)

    def refilled() -> Any:
        # Aligned, so that nothing but a copy keeps JAX from reading them in place.
        buffers = [{name: aligned_like(batches[0][name]) for name in two.NAMES} for _ in range(2)]
        for k, pair in enumerate(with_next(batches)):
            filled = []
            for batch, ids in zip(pair, (buffers[k % 2], buffers[(k + 1) % 2]), strict=True):
                for name, array in ids.items():
                    array[:] = 0 if batch is None else batch[name]
                filled.append(None if batch is None else batch | ids)
            yield filled
            for ids in buffers:
                for array in ids.values():
                    array[:] = 0

    tables, losses = loop(with_next(batches))
    refilled_tables, refilled_losses = loop(refilled())
    assert_same_bits(refilled_losses, losses, "losses")
    for name in two.NAMES:
        assert_same_bits(refilled_tables[name]["weights"], tables[name]["weights"], name)


def aligned_like(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raw = np.zeros(x.nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + x.nbytes].view(x.dtype).reshape(x.shape)
