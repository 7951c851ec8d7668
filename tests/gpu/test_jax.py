"""The package on a mesh of one GPU, by XLA: per-shard operations, training steps, objects, and hand-over with CPUs."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_bridge import IdError, PipelineError, runtime, with_next
from tests.jax_bridge import _fifty_steps as fifty_steps
from tests.jax_bridge import _per_shard as per_shard
from tests.jax_bridge import _programs as programs
from tests.jax_bridge import _training as training
from tests.jax_bridge import _two_tables as two
from tests.jax_bridge._hlo import all_instructions
from tests.jax_bridge._programs import Rule, assert_same_bits, assert_same_run
from tests.jax_bridge.test_timeline import compiled_jitted, marking, order_in_data, positions, run_jitted

STEPS = 12


@functools.cache
def gpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cuda")[:1]), ("table",), axis_types=(AxisType.Auto,))


# ---- per-shard operations under jit and shard_map


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("case", fifty_steps.PAIRWISE, ids=fifty_steps.name_of)
def test_fifty_steps_give_the_bits_of_the_oracle(case, staleness):
    handle = fifty_steps.handle_on_mesh(case[0], gpu_mesh())
    assert_same_run(fifty_steps.run_on(handle, case, staleness=staleness), fifty_steps.expected(case, staleness))


def test_a_bad_id_is_told_after_the_step_and_reads_zeros():
    handle = programs.handle_on(gpu_mesh(), tokens=8, width=4, name="bad id", id_policy="error")
    ids = np.array([1, 2, 99, 3, -1, 2, 1, 0], np.int32)
    start = programs.fresh(np.ones((10, 4), np.float32))
    batch = programs.Batch(ids, np.ones((8, 4), np.float32))
    outcome = programs.observe(handle, start, [batch], Rule())
    assert isinstance(outcome.error, IdError)
    assert "token id 99 at position 2 of lookup step 1" in str(outcome.error)
    assert outcome.stats["bad_ids"] == 2
    assert_same_run(outcome.run, programs.expected(start, [batch], Rule(), id_policy="error"))


def test_a_stale_pin_is_refused_and_everything_stays():
    handle = per_shard.make_handle(gpu_mesh(), "stale pin")
    start, batches = per_shard.make_start(), per_shard.make_batches(3)
    with programs.opened(handle):
        arm, stale, _ = per_shard.stale_steps(handle)
        arrays, gate = per_shard.place(handle, start)
        arrays, pin = arm(arrays, batches[0].ids, gate)
        old = np.asarray(pin)
        arrays, pin, *_ = stale(arrays, batches[0], batches[1].ids, pin)
        before = np.asarray(arrays.table)
        arrays, _, rows, (_, valid, _) = stale(arrays, batches[1], batches[2].ids, jax.device_put(old, pin.sharding))
        assert np.isnan(np.asarray(rows)).all()
        assert int(valid) == 0
        assert_same_bits(arrays.table, before, "table")
        with pytest.raises(PipelineError, match="stale pin of step 1, but step 2 is armed"):
            runtime.check(handle)
        runtime.check(handle)


def test_a_table_that_xla_would_have_to_copy_is_refused():
    handle = per_shard.make_handle(gpu_mesh(), "not donated")
    start, batches = per_shard.make_start(), per_shard.make_batches(3)
    arm, stale, _ = per_shard.stale_steps(handle, donate=False)
    arrays, gate = per_shard.place(handle, start)
    arrays, pin = arm(arrays, batches[0].ids, gate)
    arrays, pin, *_ = stale(arrays, batches[0], batches[1].ids, pin)
    with pytest.raises(jax.errors.JaxRuntimeError, match="different table buffers"):
        jax.block_until_ready(stale(arrays, batches[1], batches[2].ids, pin))
    runtime.close_context(handle)
    runtime.open_context(handle)
    per_shard.assert_trains_like_the_oracle(handle)
    runtime.close_context(handle)


# ---- training steps


@pytest.mark.parametrize("lead", ["runs ahead", "waits"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_training_gives_the_bits_of_the_rehearsal(staleness, lead):
    batches = training.make_batches(STEPS)
    with training.make_step(gpu_mesh(), staleness) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), staleness)
        if lead == "waits":
            for batch, upcoming in with_next(batches):
                state, _ = jax.block_until_ready(step(state, batch, upcoming))
        else:
            state, _ = training.run(step, state, batches)
        for batch in batches:
            rehearsal.step(batch)
        state = step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, state)


def addresses(tables: Any) -> Any:
    return jax.tree.map(lambda x: [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards], tables)


@pytest.mark.parametrize("staleness", [0, 1])
def test_donated_tables_keep_their_buffers(staleness):
    with training.make_step(gpu_mesh(), staleness) as step:
        state = training.start(step)
        before = addresses(state.tables)
        for batch, upcoming in with_next(training.make_batches(STEPS)):
            state, _ = step(state, batch, upcoming)
            assert addresses(state.tables) == before
        assert addresses(step.flush(state).tables) == before


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_compiled_step_copies_no_table(staleness):
    batch = training.make_batches(1)[0]
    with training.make_step(gpu_mesh(), staleness) as step:
        state = training.start(step)
        program, ids = step.program_for(batch), training.ids_of(batch)
        traced, more = (program.exact, (ids,)) if staleness == 0 else (program.stale, (ids, ids))
        text = jax.jit(traced, donate_argnums=0).lower(state, batch, *more).compile().as_text()
    shapes = {f"f32[{table.rows},{table.padded_width}]" for table in step.tables.values()}
    copies = [
        instruction.text
        for instruction in all_instructions(text)
        if instruction.opcode.startswith("copy") and any(shape in instruction.shape for shape in shapes)
    ]
    assert copies == []


def test_an_evaluation_lookup_between_two_steps_sees_the_table_as_it_is():
    rng = np.random.default_rng(9)
    batches = training.make_batches(STEPS)
    with training.make_step(gpu_mesh(), 1) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), 1)
        for batch, upcoming in with_next(batches):
            state, _ = step(state, batch, upcoming)
            rehearsal.step(batch)
            for name, table in step.tables.items():
                ids = rng.integers(0, table.rows, int(rng.integers(1, 50))).astype(np.int32)
                # The update of this very batch is staged, not applied, and the next lookup is under way.
                assert_same_bits(table.lookup(state.tables[name], ids), rehearsal.simulations[name].table[ids], name)
        state = step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, state)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("first", ["GPU first", "CPUs first"])
def test_a_snapshot_goes_on_between_a_gpu_and_four_cpus(first, staleness):
    batches = training.make_batches(STEPS)
    meshes = [gpu_mesh(), programs.mesh_of(4)]
    if first == "CPUs first":
        meshes.reverse()
    half = STEPS // 2
    with training.make_step(meshes[0], staleness) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), staleness)
        for batch, upcoming in itertools.pairwise(batches[: half + 1]):
            state, _ = step(state, batch, upcoming)
        snapshot = step.snapshot(state)
    with training.make_step(meshes[1], staleness) as step:
        state, _ = training.run(step, step.restore(snapshot), batches[half:])
        state = step.flush(state)
        for batch in batches:
            rehearsal.step(batch)
        rehearsal.flush()
        rehearsal.assert_state(step, state)


def test_a_step_whose_model_gives_nan_changes_nothing():
    batches = training.make_batches(3)
    batches[1]["target"]["items"][0, 0, 0] = np.nan
    with training.make_step(gpu_mesh(), 1) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), 1)
        state, history = training.run(step, state, batches)
        assert [bool(metrics["finite"]) for metrics in history] == [True, False, True]
        for batch in batches:
            rehearsal.step(batch)
        state = step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, state)


def test_a_step_that_raises_in_the_middle_leaves_nothing_running():
    batches = training.make_batches(4)
    step = training.make_step(gpu_mesh(), 1)

    class Stop(Exception):
        pass

    def train() -> None:
        with step:
            state = training.start(step)
            for k, (batch, upcoming) in enumerate(with_next(batches)):
                state, _ = step(state, batch, upcoming)
                if k == 2:
                    raise Stop  # a lookup is armed, gradients are staged, and the host is ahead

    with pytest.raises(Stop):
        train()
    with step:  # and the step can be used again
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), 1)
        state, _ = training.run(step, state, batches)
        for batch in batches:
            rehearsal.step(batch)
        state = step.flush(state)
        rehearsal.flush()
        rehearsal.assert_state(step, state)


# ---- order. On a GPU an event of the timeline is the moment in which a call is put on the stream.


def test_the_dense_part_is_put_on_the_stream_between_starts_and_dones():
    with two.make_step(gpu_mesh(), marking(gpu_mesh()), staleness=1) as step:
        runtime.start_timeline()
        run_jitted(step, two.make_batches(STEPS))
        events = runtime.stop_timeline()
    devices = {event.device for event in events}
    at: dict[Any, list[int]] = defaultdict(list)
    assert len(devices) == 1
    at |= positions(events, devices.pop())
    for k in range(STEPS):
        forward = [at["forward, rows of " + name, ""][k] for name in two.NAMES]
        backward = [at["backward, rows of " + name, ""][k] for name in two.NAMES]
        forward_ends, backward_begins = at["forward, losses", ""][k], at["backward, losses", ""][k]
        for name in two.NAMES:
            assert at["lookup_done", name][k] < at["update_begin", name][k] < min(forward)
            assert forward_ends < at["lookup_begin", name][k + 1] < backward_begins
            assert max(backward) < at["update_done", name][k] < at["stage_update", name][k]


def test_data_alone_gives_the_order_in_the_program_for_the_gpu():
    with two.make_step(gpu_mesh(), marking(gpu_mesh()), staleness=1) as step:
        assert all(order_in_data(compiled_jitted(step)).values())


def test_settle_stands_at_the_end_of_the_program_for_the_gpu():
    batch = training.make_batches(1)[0]
    with training.make_step(gpu_mesh(), 1) as step:
        state, ids = training.start(step), training.ids_of(batch)
        stale = jax.jit(step.program_for(batch).stale, donate_argnums=0)
        text = stale.lower(state, batch, ids, ids).compile().as_text()
    assert "is_scheduled=true" in text
    order = [found[1] for i in all_instructions(text) if (found := re.search(r'target="async_emb_(\w+)"', i.text))]
    first_settle = order.index("settle")
    assert set(order[first_settle:]) == {"settle"}, order
