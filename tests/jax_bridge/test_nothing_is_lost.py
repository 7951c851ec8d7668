"""A step that fails, or a state that is dropped, while a lookup or an update runs on the side: no memory is touched
that is no longer ours, the context closes at once, and opened again it gives the bits that it should.

`tests/asan.sh` runs these under the address sanitizer, which sees every use of memory that XLA has freed.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_bridge import runtime, with_next

from . import _per_shard as per_shard
from . import _two_tables as two
from ._programs import assert_same_bits, assert_same_run, mesh_of

# Large enough that work on the side takes a while, and that freed memory is soon used for something else.
SIZES = {"rows": 4096, "width": 64}
TOKENS = 2048
CLOSES_WITHIN = 20.0  # seconds; on a busy machine, under a sanitizer


class Fault:
    """A place in a program where a host callback raises, on some ranks, once it is told to."""

    def __init__(self, point: str, ranks: set[int]) -> None:
        self.point = point
        self.ranks = ranks
        self.armed = False
        self.raised = threading.Event()

    def callback(self, rank: Any, pin: Any) -> Any:
        if self.armed and int(rank) in self.ranks:
            self.raised.set()
            raise ValueError("the callback raises")
        return np.asarray(pin)

    def hook(self, handle: Any) -> per_shard.Hook:
        return lambda point, pin: through_the_host(handle, self.callback, pin) if point == self.point else pin


def through_the_host(handle: Any, callback: Callable[[Any, Any], Any], pin: Any) -> Any:
    rank = jax.lax.axis_index(handle.table_axis)
    return jax.pure_callback(callback, jax.ShapeDtypeStruct((1,), np.float32), rank, pin)


@contextmanager
def canaries() -> Iterator[Callable[[], None]]:
    """Gives a function that allocates arrays, as whoever comes next would. None may have changed in the end."""
    arrays: list[Any] = []
    fill = jax.jit(lambda value: jnp.full((SIZES["rows"], 16), value))

    def allocate() -> None:
        for _ in range(20):
            arrays.append(fill(float(len(arrays))))

    yield allocate
    for i, array in enumerate(arrays):
        assert_same_bits(array, np.full((SIZES["rows"], 16), i, np.float32), "an array of somebody else")


def close_at_once(handle: Any) -> None:
    begin = time.monotonic()
    runtime.close_context(handle)
    assert time.monotonic() - begin < CLOSES_WITHIN


def make_handle(ranks: int) -> Any:
    handle = per_shard.make_handle(ranks, tokens=TOKENS, width=SIZES["width"])
    runtime.close_context(handle)
    runtime.open_context(handle)
    return handle


@pytest.fixture(scope="module")
def material() -> Any:
    start, batches = per_shard.make_start(**SIZES), per_shard.make_batches(4, tokens=TOKENS, **SIZES)
    return start, batches, [per_shard.oracle(start, batches, staleness) for staleness in (0, 1)]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("point", ["lookup", "update", "stage"])
def test_a_callback_that_raises_between_start_and_done_corrupts_nothing(material, ranks, staleness, point):
    start, batches, expected = material
    handle = make_handle(ranks)
    fault = Fault(point, set(range(ranks)))
    make, run = ((per_shard.exact_step, run_exact), (per_shard.stale_steps, run_stale))[staleness]
    program = make(handle, check_vma=False, hook=fault.hook(handle))
    for _ in range(3):
        with canaries() as allocate:
            fault.armed = False
            assert_same_run(run(program, handle, start, batches), expected[staleness])
            runtime.native().return_to_first_step(handle.context_id)
            fault.armed = True
            with pytest.raises(jax.errors.JaxRuntimeError, match="the callback raises"):
                run(program, handle, start, batches)
            allocate()
            close_at_once(handle)
            runtime.open_context(handle)
    runtime.close_context(handle)


run_exact, run_stale = per_shard.run_exact, per_shard.run_stale


def message_of(array: Any) -> str | None:
    """What the array's computation failed with."""
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("ending", ["abort", "close"])
@pytest.mark.parametrize("point", ["lookup", "update", "stage"])
def test_where_one_rank_fails_the_others_wait_until_the_host_ends_it(material, point, ending):
    start, batches, expected = material
    handle = make_handle(4)
    fault = Fault(point, {2})
    step = per_shard.exact_step(handle, check_vma=False, hook=fault.hook(handle))
    fault.armed = True
    with canaries() as allocate:
        arrays, _, results = step(*per_shard.with_batch(handle, start, batches[0]))
        assert fault.raised.wait(60)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the callback raises"):
            arrays.table.addressable_shards[2].data.block_until_ready()
        allocate()
        if ending == "abort":
            runtime.abort_context(handle, "rank 2 has failed")
        else:
            close_at_once(handle)
        messages = [message_of(results[0].addressable_shards[rank].data) for rank in (0, 1, 3)]
        assert len(set(messages)) == 1
        said = {"abort": "'table' was aborted: rank 2 has failed", "close": "'table' was closed while a call waited"}
        if point == "update":  # rank 2 has lent its table, or has failed before it did
            assert messages[0] is None or said[ending] in messages[0]
        else:
            assert said[ending] in messages[0]
        close_at_once(handle)
    fault.armed = False
    runtime.open_context(handle)
    assert_same_run(run_exact(step, handle, start, batches), expected[0])
    runtime.close_context(handle)


@pytest.mark.parametrize(("point", "late_at"), [("lookup", "begin"), ("update", "stage")])
def test_a_rank_that_fails_keeps_its_table_until_late_peers_are_done_with_it(material, point, late_at):
    start, batches, expected = material
    handle = make_handle(4)
    fault = Fault(point, {0})

    def wait_on_the_last_rank(rank: Any, pin: Any) -> Any:
        if fault.armed and int(rank) == 3:
            assert fault.raised.wait(60)
            time.sleep(0.3)
        return np.asarray(pin)

    def hook(at: str, pin: Any) -> Any:
        if at == late_at:
            return through_the_host(handle, wait_on_the_last_rank, pin)
        return fault.hook(handle)(at, pin)

    step = per_shard.exact_step(handle, check_vma=False, hook=hook)
    for _ in range(3):
        fault.armed = True
        with canaries() as allocate:
            arrays, *_ = step(*per_shard.with_batch(handle, start, batches[0]))
            assert fault.raised.wait(60)
            allocate()  # into whatever XLA gives away before the last rank comes
            assert "the callback raises" in str(message_of(arrays.table.addressable_shards[0].data))
            if point == "update":
                updated = per_shard.oracle(start, batches[:1]).table
                assert_same_bits(arrays.table.addressable_shards[3].data, updated[:, -SIZES["width"] // 4 :], "table")
            close_at_once(handle)
            # What is left of the step must not meet the context that is opened next.
            messages = [message_of(shard.data) for shard in arrays.table.addressable_shards]
            assert [message is None for message in messages] == [False, *[point == "update"] * 3]
        fault.armed = False
        fault.raised.clear()
        runtime.open_context(handle)
        assert_same_run(run_exact(step, handle, start, batches), expected[0])
        runtime.close_context(handle)
        runtime.open_context(handle)
    runtime.close_context(handle)


@pytest.mark.parametrize("late_at", ["begin", "stage"])
def test_what_is_left_of_a_failed_step_does_not_meet_the_context_that_is_opened_next(material, late_at):
    start, batches, expected = material
    handle = make_handle(4)
    fault = Fault("lookup" if late_at == "begin" else "update", {0})
    late, opened_again = threading.Event(), threading.Event()

    def hold_the_last_rank(rank: Any, pin: Any) -> Any:
        if fault.armed and int(rank) == 3:
            late.set()
            assert opened_again.wait(60)
        return np.asarray(pin)

    def hook(at: str, pin: Any) -> Any:
        if at == late_at:
            return through_the_host(handle, hold_the_last_rank, pin)
        return fault.hook(handle)(at, pin)

    step = per_shard.exact_step(handle, check_vma=False, hook=hook)
    for _ in range(3):
        fault.armed = True
        arrays, *_ = step(*per_shard.with_batch(handle, start, batches[0]))
        assert fault.raised.wait(60)
        assert late.wait(60)
        close_at_once(handle)
        runtime.open_context(handle)
        fault.armed = False
        opened_again.set()  # now the last rank goes on with the step that has failed
        assert_same_run(run_exact(step, handle, start, batches), expected[0])
        said = [message_of(shard.data) for shard in arrays.table.addressable_shards]
        assert None not in said[:3]
        assert "finish the steps before close" in said[3]
        for event in (fault.raised, late, opened_again):
            event.clear()
        runtime.close_context(handle)
        runtime.open_context(handle)
    runtime.close_context(handle)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_state_dropped_with_work_in_flight_corrupts_nothing(material, ranks):
    start, batches, expected = material
    handle = make_handle(ranks)
    steps = per_shard.stale_steps(handle)
    for _ in range(5):
        with canaries() as allocate:
            arm, step, _ = steps
            arrays, gate = per_shard.place(handle, start)
            arrays, pin = arm(arrays, batches[0].ids, gate)
            for batch, upcoming in itertools.pairwise(batches):
                arrays, pin, rows, results = step(arrays, batch, upcoming.ids, pin)
            del arrays, pin, rows, gate  # nobody has waited: steps are queued, and one runs
            gc.collect()
            allocate()
            jax.block_until_ready(results)  # a step that has not begun would find the context closed
            close_at_once(handle)
        runtime.open_context(handle)
    assert_same_run(run_stale(steps, handle, start, batches), expected[1])
    runtime.close_context(handle)


def test_steps_that_are_queued_when_the_context_closes_end_with_an_error_that_says_so(material):
    start, batches, expected = material
    handle = make_handle(4)
    step = per_shard.exact_step(handle)
    for _ in range(3):
        with canaries() as allocate:
            arrays, gate = per_shard.place(handle, start)
            for batch in batches:
                arrays, rows, _ = step(arrays, batch, gate)
            close_at_once(handle)
            message = message_of(rows)
            assert message is None or "'table' is closed" in message or "'table' was closed while a call" in message
            del arrays, rows
            allocate()
        runtime.open_context(handle)
    assert_same_run(run_exact(step, handle, start, batches), expected[0])
    runtime.close_context(handle)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_model_that_raises_ends_the_block_and_the_step_can_be_used_again(ranks, staleness):
    mesh = mesh_of(ranks)
    spec = P(mesh.axis_names)
    armed = False

    def callback(x: Any) -> Any:
        if armed:
            raise ValueError("the model raises")
        return np.asarray(x)

    def through_the_host(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(callback, shape, x)

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return jax.shard_map(through_the_host, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    identity.defvjp(lambda x: (identity(x), None), lambda _, g: (g,))

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        return two.losses_of(params, {name: identity(x) for name, x in rows.items()}, batch).mean()

    step = two.make_step(mesh, loss_fn, staleness=staleness)
    batches = two.make_batches(4)

    def train() -> Any:
        with step:
            state = step.init(two.make_params(), jax.random.key(0))
            for batch, upcoming in with_next(batches):
                state, _ = step(state, batch, upcoming)
            return step.snapshot(step.flush(state))

    before = train()
    armed = True
    begin = time.monotonic()
    with canaries() as allocate:
        with pytest.raises(jax.errors.JaxRuntimeError, match="the model raises"):
            train()
        assert time.monotonic() - begin < CLOSES_WITHIN
        allocate()
    armed = False
    after = train()
    for name in two.NAMES:
        assert_same_bits(after["tables"][name]["weights"], before["tables"][name]["weights"], name)
