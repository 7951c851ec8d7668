"""Contexts that wait, are aborted, timed out, closed and opened again."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_bridge import ContextError, runtime

from . import _per_shard as per_shard
from ._programs import assert_same_run, mesh_of, opened


def half_a_mesh_waits(handle: Any) -> tuple[Any, Any]:
    """Looks up on two of the handle's four devices, which wait for the others. Returns (arrays, rows)."""
    half = mesh_of(2)
    calls = per_shard.Calls(handle, half)
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
        calls = per_shard.Calls(handle, others)
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
