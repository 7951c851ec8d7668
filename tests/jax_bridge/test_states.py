"""Which call may follow which: every refusal says what came when, costs nothing, and is said once. And contexts that
are aborted, timed out, closed and opened again."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_bridge import ContextError, PipelineError, ops, runtime

from . import _per_shard as per_shard
from ._per_shard import Arrays, Batch
from ._programs import assert_same_bits, assert_same_run, mesh_of, opened

REPOSITORY = Path(__file__).parents[2]
RANKS = 2


class Calls:
    """Each operation as a program of its own, on one table."""

    def __init__(self, handle: Any, mesh: Any = None) -> None:
        arrays, batch, gate, results = per_shard.specs_of(handle)
        mesh = handle.mesh if mesh is None else mesh

        def program(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
            donated = (0,) if in_specs[0] is arrays else ()
            sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
            return jax.jit(sharded, donate_argnums=donated)

        def lookup_start(arrays: Arrays, ids: Any, gate: Any) -> Any:
            table, pin = ops.lookup_start(ids, arrays.table, gate, handle)
            return arrays._replace(table=table), pin

        def update_start(arrays: Arrays, gate: Any) -> Any:
            rule = per_shard.RULE
            table, state, pin = ops.rowwise_adagrad_update_start(
                *arrays, gate, handle, learning_rate=rule.learning_rate, eps=rule.eps, decay_factor=rule.state_decay
            )
            return Arrays(table, state), pin

        self.lookup_start = program(lookup_start, (arrays, batch.ids, gate), (arrays, gate))
        self.lookup_done = program(
            lambda pin, ids: ops.lookup_done(pin, handle, token_ids=ids), (gate, batch.ids), batch.grads
        )
        self.stage_update = program(
            lambda grads, gate: ops.stage_update(grads, None, None, True, gate, handle), (batch.grads, gate), gate
        )
        self.update_start = program(update_start, (arrays, gate), (arrays, gate))
        self.update_done = program(lambda gate: ops.rowwise_adagrad_update_done(gate, handle)[:3], (gate,), results)


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls(per_shard.make_handle(RANKS))


@pytest.fixture
def handle() -> Any:
    with opened(per_shard.make_handle(RANKS)) as handle:
        yield handle


@dataclasses.dataclass
class Steps:
    """Exact steps, one call after the other. Results go into the fields."""

    calls: Calls
    batches: list[Batch]
    arrays: Arrays
    gate: Any
    pin: Any = None
    rows: Any = None
    results: Any = None

    def lookup_start(self, k: int) -> None:
        self.arrays, self.pin = self.calls.lookup_start(self.arrays, self.batches[k].ids, self.gate)

    def lookup_done(self, k: int) -> None:
        self.rows = self.calls.lookup_done(self.pin, self.batches[k].ids)

    def lookup_done_with_an_old_pin(self, k: int) -> None:
        self.rows = self.calls.lookup_done(self.pin - 1, self.batches[k].ids)

    def lookup_done_of_another_batch(self, k: int, positions: tuple[int, ...] = (5, 13)) -> None:
        """Another one on both ranks, which hold eight tokens each."""
        other = self.batches[k].ids.copy()
        other[list(positions)] = 60
        self.rows = self.calls.lookup_done(self.pin, other)

    def stage_update(self, k: int) -> None:
        self.calls.stage_update(self.batches[k].grads, self.gate)

    def update_start(self, k: int) -> None:
        self.arrays, _ = self.calls.update_start(self.arrays, self.gate)

    def update_done(self, k: int) -> None:
        self.results = self.calls.update_done(self.gate)

    def wait(self) -> None:
        jax.block_until_ready((self.arrays, self.pin, self.rows, self.results))


IN_ORDER = ("lookup_start", "lookup_done", "stage_update", "update_start", "update_done")
# How many calls of the second step have been made, the call that comes then, and what is said about it.
REFUSALS = [
    (
        1,
        "lookup_start",
        "lookup_start of step 3 came before lookup_done of step 2: consume each lookup",
    ),
    (0, "lookup_done", "lookup_done with nothing armed: step 1 was the last started and is consumed"),
    (2, "lookup_done", "lookup_done with nothing armed: step 2 was the last started and is consumed"),
    (1, "lookup_done_with_an_old_pin", "lookup_done got a stale pin of step 1, but step 2 is armed: pass the pin that"),
    (
        1,
        "lookup_done_of_another_batch",
        r"lookup_done was given token_ids of another batch: step 2 was armed with row \d+ at position (5|13), but "
        "token_ids have 60 there",
    ),
    (3, "stage_update", "stage_update number 3 came before an update start took number 2"),
    (4, "stage_update", "stage_update number 3 came before update_done of step 2"),
    (1, "update_start", "update start of step 2 came before lookup_done of step 2: the update would change rows that"),
    (
        2,
        "update_start",
        "update start of step 2 has nothing staged: only the first one may; call stage_update",
    ),
    (4, "update_start", "update start of step 3 came before update_done of step 2"),
    (0, "update_done", "update_done with nothing armed: update step 1 was the last started and is consumed"),
    (3, "update_done", "update_done with nothing armed: update step 1 was the last started and is consumed"),
]


@pytest.fixture
def steps(calls, handle) -> Steps:
    """Two steps to make, the first of which has been made."""
    arrays, gate = per_shard.place(handle, per_shard.make_start())
    steps = Steps(calls, per_shard.make_batches(2), arrays, gate)
    for call in IN_ORDER:
        getattr(steps, call)(0)
    return steps


@pytest.mark.parametrize(("made", "call", "message"), REFUSALS, ids=[f"{call} after {n}" for n, call, _ in REFUSALS])
def test_a_refused_call_says_what_came_when_and_loses_nothing(handle, steps, made, call, message):
    for name in IN_ORDER[:made]:
        getattr(steps, name)(1)
    steps.wait()
    before, rows = jax.tree.map(np.array, steps.arrays), steps.rows

    getattr(steps, call)(1)
    steps.wait()
    steps.rows = rows
    assert runtime.stats(handle)["refused_calls"] == RANKS
    for got, wanted in zip(steps.arrays, before, strict=True):
        assert_same_bits(got, wanted, "arrays passed through")
    with pytest.raises(PipelineError, match=rf"async_emb 'table' [\w ]+ on rank \d \(device \d\): {message}") as caught:
        runtime.check(handle)
    assert "tables and state are as before this call" in str(caught.value)
    runtime.check(handle)  # said once

    # What was under way goes on as if nothing had been.
    for name in IN_ORDER[made:]:
        getattr(steps, name)(1)
    expected = per_shard.oracle(per_shard.make_start(), steps.batches)
    assert_same_bits(steps.rows, expected.rows[1], "rows")
    assert_same_bits(steps.results[0], expected.norms[1], "norm")
    assert [int(x) for x in steps.results[1:]] == [1, 1]
    assert_same_bits(steps.arrays.table, expected.table, "table")
    assert_same_bits(steps.arrays.row_state, expected.row_state, "row_state")
    runtime.check(handle)


def test_gradients_without_a_batch_are_refused(calls, handle):
    arrays, gate = per_shard.place(handle, per_shard.make_start())
    steps = Steps(calls, per_shard.make_batches(2), arrays, gate)
    steps.stage_update(0)
    steps.update_done(0)
    steps.wait()
    with pytest.raises(
        PipelineError, match="stage_update number 1 has no batch to belong to: no lookup was consumed yet"
    ):
        runtime.check(handle)
    per_shard.assert_trains_like_the_oracle(handle)


def test_from_a_refusal_on_nothing_is_applied_until_it_has_been_said(handle, steps):
    steps.lookup_done(1)
    before = jax.tree.map(np.array, steps.arrays)
    for call in IN_ORDER:
        getattr(steps, call)(1)
        steps.wait()
        if call == "lookup_done":
            assert np.isnan(steps.rows).all(), "rows that nobody can take for real ones"
    assert [float(x) for x in steps.results] == [0, 0, 0]
    for got, wanted in zip(steps.arrays, before, strict=True):
        assert_same_bits(got, wanted, "arrays passed through")
    assert runtime.stats(handle)["refused_calls"] == 6 * RANKS
    with pytest.raises(PipelineError, match="lookup_done with nothing armed: step 1"):
        runtime.check(handle)

    for call in IN_ORDER:
        getattr(steps, call)(1)
    expected = per_shard.oracle(per_shard.make_start(), steps.batches)
    assert_same_bits(steps.arrays.table, expected.table, "table")


def test_rows_of_another_batch_on_one_rank_alone_cost_the_lookup_but_neither_table_nor_state(handle, steps):
    """Only that rank can know, and the other has consumed its rows by then."""
    steps.lookup_start(1)
    before = jax.tree.map(np.array, steps.arrays)
    steps.lookup_done_of_another_batch(1, positions=(13,))
    steps.wait()
    with pytest.raises(
        PipelineError, match=r"on rank 1 .* at position 13, but .* The ranks stood at different calls, so"
    ):
        runtime.check(handle)
    for got, wanted in zip(steps.arrays, before, strict=True):
        assert_same_bits(got, wanted, "arrays passed through")

    for call in IN_ORDER:
        getattr(steps, call)(1)
    expected = per_shard.oracle(per_shard.make_start(), steps.batches)
    assert_same_bits(steps.rows, expected.rows[1], "rows")
    assert_same_bits(steps.arrays.table, expected.table, "table")
    runtime.check(handle)


def test_the_first_update_may_find_nothing_staged_and_says_so_in_its_results(calls, handle):
    start = per_shard.make_start()
    arrays, gate = per_shard.place(handle, start)
    steps = Steps(calls, [], arrays, gate)
    steps.update_start(0)
    steps.update_done(0)
    assert [float(x) for x in steps.results] == [0, 0, 0]
    assert_same_bits(steps.arrays.table, start.table, "table")
    runtime.check(handle)


# ---- contexts that wait, end, and are opened again ----


def half_a_mesh_waits(handle: Any) -> tuple[Any, Any]:
    """Looks up on two of the handle's four devices, which wait for the others. Returns (arrays, rows)."""
    half = mesh_of(2)
    calls = Calls(handle, half)
    tokens = 2 * handle.tokens_per_rank
    half_handle = per_shard.make_handle(half, name="half", tokens=tokens, width=2 * handle.shard_width)
    start = per_shard.make_start(width=2 * handle.shard_width)
    arrays, gate = per_shard.place(half_handle, start)
    ids = np.zeros(tokens, np.int32)
    arrays, pin = calls.lookup_start(arrays, ids, gate)
    deadline = time.monotonic() + 60
    while runtime.stats(handle)["lookup_lease_calls"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return arrays, pin


def test_abort_from_another_thread_ends_a_lookup_that_waits():
    with opened(per_shard.make_handle(4, name="torn")) as handle:
        arrays, pin = half_a_mesh_waits(handle)
        waiting = threading.Timer(0.2, runtime.abort_context, (handle, "an operator gave up"))
        waiting.start()
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="async_emb context 'torn' was aborted: an operator gave up"
        ):
            jax.block_until_ready((arrays, pin))
        waiting.join()
        # Every later call says the same, until the context is closed and opened.
        step = per_shard.exact_step(handle)
        start, batch = per_shard.make_start(), per_shard.make_batches(1)[0]
        with pytest.raises(jax.errors.JaxRuntimeError, match="'torn' was aborted: an operator gave up"):
            jax.block_until_ready(step(*per_shard.with_batch(handle, start, batch)))
        runtime.close_context(handle)
        runtime.open_context(handle)
        per_shard.assert_trains_like_the_oracle(handle)


def test_close_ends_a_lookup_that_waits():
    with opened(per_shard.make_handle(4, name="torn")) as handle:
        arrays, pin = half_a_mesh_waits(handle)
        runtime.close_context(handle)
        with pytest.raises(jax.errors.JaxRuntimeError, match="'torn' was closed while a call waited: finish the steps"):
            jax.block_until_ready((arrays, pin))
        runtime.open_context(handle)
        per_shard.assert_trains_like_the_oracle(handle)


def test_a_wait_that_is_too_long_names_who_is_missing_and_in_which_call(monkeypatch):
    monkeypatch.setenv("ASYNC_EMB_TIMEOUT_SECONDS", "1")
    with opened(per_shard.make_handle(4, name="torn")) as handle:
        begin = time.monotonic()
        message = (
            r"async_emb 'torn' timed out after 1 s in lookup_start of step 1: missing rank 2 \(device 2\), "
            r"rank 3 \(device 3\). Set ASYNC_EMB_TIMEOUT_SECONDS to wait longer"
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(half_a_mesh_waits(handle))
        assert 1 <= time.monotonic() - begin < 30


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_no_positive_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("ASYNC_EMB_TIMEOUT_SECONDS", text)
    handle = per_shard.make_handle(2, name="never opened")
    with pytest.raises(ContextError, match=re.escape(f"ASYNC_EMB_TIMEOUT_SECONDS={text!r} is not a positive number")):
        runtime.open_context(handle)
    assert not runtime.is_open(handle)


def test_a_step_on_a_closed_context_says_how_to_open_it():
    handle = per_shard.make_handle(2, name="closed")
    step = per_shard.exact_step(handle)
    start, batches = per_shard.make_start(), per_shard.make_batches(2)
    with opened(handle):
        assert_same_run(per_shard.run_exact(step, handle, start, batches), per_shard.oracle(start, batches))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"'closed' is closed: open it again with open_context\(handle\)"
    ):
        per_shard.run_exact(step, handle, start, batches)
    with opened(handle):
        assert_same_run(per_shard.run_exact(step, handle, start, batches), per_shard.oracle(start, batches))


def test_a_step_on_other_devices_than_the_handles_says_so():
    handle = per_shard.make_handle(2, name="elsewhere")
    others = jax.sharding.Mesh(np.array(jax.devices("cpu")[4:6]), handle.mesh.axis_names)
    with opened(handle):
        calls = Calls(handle, others)
        right_handle = per_shard.make_handle(others, name="others")
        arrays, gate = per_shard.place(right_handle, per_shard.make_start())
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"'elsewhere' has no rank on device [45]: run the step on the"
        ):
            jax.block_until_ready(calls.lookup_start(arrays, np.zeros(per_shard.TOKENS, np.int32), gate))
    with opened(right_handle):
        per_shard.assert_trains_like_the_oracle(right_handle)


def status(field: str) -> int:
    """A number of /proc/self/status: threads, or KiB."""
    return int(re.search(rf"^{field}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads and memory by /proc")
def test_closing_and_opening_again_twenty_times_leaves_no_thread_and_no_memory_behind():
    sizes = {"width": 64, "tokens": 8192}
    handle = per_shard.make_handle(4, name="reopened", **sizes)
    step = per_shard.exact_step(handle)
    start, batches = per_shard.make_start(width=64), per_shard.make_batches(2, **sizes)

    def once() -> None:
        with opened(handle):
            arrays, gate = per_shard.place(handle, start)
            for batch in batches:
                arrays, *_ = step(arrays, batch, gate)
            jax.block_until_ready(arrays)
            nonlocal arena
            arena = runtime.stats(handle)["arena_bytes"]

    arena = 0.0
    for _ in range(5):
        once()
    threads, resident = status("Threads"), status("VmRSS")
    for _ in range(20):
        once()
    assert status("Threads") <= threads + 2, "threads that idle are kept for a while; none is added by each opening"
    assert (status("VmRSS") - resident) * 1024 < 4 * arena, "twenty arenas would be five times as much"


# ---- torch and JAX in one process ----


@pytest.mark.parametrize("first", ["jax", "torch"])
def test_the_frameworks_may_be_imported_in_either_order(first):
    """And the native module may be there before JAX, or come after JAX has started its backend."""
    program = {
        "jax": "import jax; jax.devices(); import torch",
        "torch": "import torch, torch_ext; torch_ext.native(); import jax",
    }[first]
    program += """
from tests.jax_bridge import _per_shard as per_shard
from tests.jax_bridge._programs import assert_same_run
handle, start, batches = per_shard.make_handle(2), per_shard.make_start(), per_shard.make_batches(2)
run = per_shard.run_exact(per_shard.exact_step(handle), handle, start, batches)
assert_same_run(run, per_shard.oracle(start, batches))
rows = torch.ops.async_emb.gather_rows(torch.arange(12.0).reshape(6, 2), torch.tensor([5, 1], dtype=torch.int32))
assert rows.tolist() == [[10.0, 11.0], [2.0, 3.0]], rows
print("trained")
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "trained\n"
