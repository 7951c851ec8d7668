"""Tables stay where they are: nothing table-shaped is made in a compiled step but by our own calls, and a buffer keeps
its address over steps. Without donation, a step copies once (staleness 0) or is refused (staleness 1)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jax_bridge import ContextError, runtime, with_next

from . import _per_shard as per_shard
from . import _two_tables as two
from ._hlo import all_instructions
from ._programs import assert_same_bits, handle_on, mesh_of

DEVICES = 4
# What hands a buffer on, and does not make another.
HANDING_ON = {"parameter", "custom-call", "get-tuple-element", "tuple", "while", "bitcast", "call", "conditional"}


def copies_of(text: str, shapes: set[str]) -> list[str]:
    """Instructions that make an array of one of these shapes, and are none of our calls."""
    return [
        f"{instruction.name} = {instruction.shape} {instruction.opcode}"
        for instruction in all_instructions(text)
        if instruction.opcode not in HANDING_ON and any(shape in instruction.shape for shape in shapes)
    ]


def shapes_of_tables() -> set[str]:
    """As a compiled program for four devices prints them: shards, and row states."""
    return {f"f32[{rows},{two.WIDTH // DEVICES}]" for rows in two.ROWS.values()} | {
        f"f32[{rows}]" for rows in two.ROWS.values()
    }


def addresses(tables: Any) -> Any:
    return jax.tree.map(lambda x: [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards], tables)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_jitted_step_copies_no_table_and_buffers_keep_their_addresses(staleness):
    batches = two.make_batches(20)
    with two.make_step(mesh_of(DEVICES), staleness=staleness) as step:
        state = step.init(two.make_params(), jax.random.key(0))
        before = addresses(state.tables)
        for batch, upcoming in with_next(batches):
            state, _ = step(state, batch, upcoming)
            assert addresses(state.tables) == before
        state = step.flush(state)
        assert addresses(state.tables) == before

        program, ids = step.program, two.ids_of(batches[0])
        traced, arguments = (
            (program.exact, (state, batches[0], ids))
            if staleness == 0
            else (program.stale, (state, batches[0], ids, ids))
        )
        text = jax.jit(traced, donate_argnums=0).lower(*arguments).compile().as_text()
        assert copies_of(text, shapes_of_tables()) == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_scan_copies_no_table_in_its_iterations(staleness):
    batches = two.make_batches(10)
    with two.make_step(mesh_of(DEVICES), staleness=staleness) as step:
        state = step.init(two.make_params(), jax.random.key(0))
        before = addresses(state.tables)
        if staleness == 1:
            run, arguments = two.scanned(step), (two.stacked(batches), two.next_ids_of(batches))
        else:
            exact = step.program_for(batches[0]).exact
            run = jax.jit(lambda state, xs: jax.lax.scan(lambda s, x: exact(s, *x), state, xs), donate_argnums=0)
            arguments = ((two.stacked(batches), two.ids_of(two.stacked(batches))),)
        compiled = run.lower(state, *arguments).compile()
        assert copies_of(compiled.as_text(), shapes_of_tables()) == []
        state, _ = jax.block_until_ready(compiled(state, *jax.device_put(arguments, compiled.input_shardings[0][1:])))
        assert addresses(state.tables) == before


def test_the_check_for_copies_sees_one():
    program = jax.jit(lambda table: table.at[0].set(0.0))
    text = program.lower(jax.ShapeDtypeStruct((53, 2), np.float32)).compile().as_text()
    assert copies_of(text, {"f32[53,2]"})


# ---- without donation, by the per-shard operations ----


def test_staleness_zero_without_donation_copies_once_and_leaves_the_old_table_usable():
    handle = per_shard.make_handle(DEVICES)
    step = per_shard.exact_step(handle, donate=False)
    start, batches = per_shard.make_start(), per_shard.make_batches(3)
    arrays, gate = per_shard.place(handle, start)
    text = step.lower(arrays, batches[0], gate).compile().as_text()
    table_copies = copies_of(text, {per_shard.shard_shape(DEVICES)})
    assert len(table_copies) == 1, table_copies
    assert "copy" in table_copies[0]

    for batch in batches:  # each from the same old arrays
        updated, rows, _ = step(arrays, batch, gate)
        expected = per_shard.oracle(start, [batch])
        assert_same_bits(rows, start.table[batch.ids], "rows")
        assert_same_bits(updated.table, expected.table, "table")
        assert_same_bits(updated.row_state, expected.row_state, "row_state")
        assert_same_bits(arrays.table, start.table, "old table")
        assert_same_bits(arrays.row_state, start.row_state, "old row_state")
    runtime.close_context(handle)


def test_staleness_one_without_donation_is_refused_and_reopening_recovers():
    handle = per_shard.make_handle(DEVICES)
    start, batches = per_shard.make_start(), per_shard.make_batches(4)
    arm, stale, _ = per_shard.stale_steps(handle, donate=False)
    arrays, gate = per_shard.place(handle, start)
    arrays, pin = arm(arrays, batches[0].ids, gate)
    # Nothing is staged in the first step, so its update touches no table, wherever it lies.
    arrays, pin, *_ = stale(arrays, batches[0], batches[1].ids, pin)
    with pytest.raises(jax.errors.JaxRuntimeError, match="different table buffers") as caught:
        jax.block_until_ready(stale(arrays, batches[1], batches[2].ids, pin))
    first = str(caught.value)
    assert "donate it to the jitted step (jax.jit(step, donate_argnums=...))" in first
    assert f"async_emb '{handle.name}' update start on rank" in first
    assert "of step 2" in first

    def our_line(message: str) -> str:
        (line,) = {part for part in message.splitlines() if "async_emb" in part}
        return line[line.index("async_emb") :]

    with pytest.raises(jax.errors.JaxRuntimeError) as again:
        jax.block_until_ready(per_shard.exact_step(handle)(*per_shard.with_batch(handle, start, batches[0])))
    assert our_line(str(again.value)) == our_line(first), "a poisoned context repeats its first error"

    runtime.close_context(handle)
    runtime.open_context(handle)
    per_shard.assert_trains_like_the_oracle(handle)
    runtime.close_context(handle)


def test_the_object_refuses_staleness_one_without_donation_before_anything_runs():
    with pytest.raises(ContextError, match="donate"):
        two.make_step(mesh_of(DEVICES), staleness=1, donate=False)


# ---- one table for two ----


@pytest.mark.parametrize("ranks", [1, DEVICES])
def test_one_array_for_two_tables_is_refused_with_donation_and_right_without(ranks):
    mesh = mesh_of(ranks)
    handles = [handle_on(mesh, tokens=per_shard.TOKENS, width=per_shard.WIDTH, name=n) for n in ("first", "second")]
    start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]

    def step(first: Any, second: Any, gate: Any) -> Any:
        out = []
        for handle, arrays in zip(handles, (first, second), strict=True):
            arrays, rows, gate = per_shard.global_exact_step(handle, arrays, batch, gate)
            out.append((arrays, rows))
        return out

    arrays, gate = per_shard.place(handles[0], start)
    if ranks == 1:  # jax 0.10.2 itself crashes where an array on several devices is donated twice
        with pytest.raises(jax.errors.JaxRuntimeError, match="donate the same buffer twice"):
            jax.jit(step, donate_argnums=(0, 1))(arrays, arrays, gate)

    expected = per_shard.oracle(start, [batch])
    for updated, rows in jax.jit(step)(arrays, arrays, gate):
        assert_same_bits(rows, start.table[batch.ids], "rows")
        assert_same_bits(updated.table, expected.table, "table")
    assert_same_bits(arrays.table, start.table, "the array that was given")
    for handle in handles:
        runtime.close_context(handle)
