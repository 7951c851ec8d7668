"""How a step or a context ends that does not go as it should: refusals that only the device can find, waits for a rank
that does not come, and contexts that are closed and opened again."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from jax_bridge import reference
from tests.jax_bridge._programs import assert_same_bits

from ._native_ranks import NativeRanks, Rank, capsule, to_numpy
from ._steps import Modelled, assert_step_of_model, busy, case_of, warmed_up, whole_step

# ---- refusals that only the device can find


def refused_step(ranks: Modelled, wrong: Any) -> tuple[list[Any], np.ndarray[Any, Any]]:
    """A step whose lookup_done is `wrong`: what it gave, and the table before it. The host goes on unknowing."""
    before = ranks.tables()

    def body(rank: Rank, number: int) -> Any:
        inputs = rank.inputs(rank.case.batches[1])
        rank.lookup_begin(inputs.ids)
        rows = wrong(rank, number, inputs)
        rank.stage(inputs)
        rank.update_begin(rank.case.rule, rank.numbers(rank.case.rule, 1))
        return rows, rank.update_done()

    results = ranks.on_ranks(body)
    torch.cuda.synchronize()
    return results, before


def assert_nothing_was_applied(ranks: Modelled, results: list[Any], before: np.ndarray[Any, Any]) -> None:
    for rows, report in results:
        assert bool(torch.isnan(rows).all()), "rows of a refused lookup are NaN"
        assert [float(x) for x in report] == [0, 0, 0]
    assert_same_bits(ranks.tables(), before, "table")


def assert_goes_on(ranks: Modelled) -> None:
    """From its first-step state."""
    results = ranks.on_ranks(lambda rank, _: whole_step(rank, 2))
    torch.cuda.synchronize()
    rows = torch.cat([rows for rows, _ in results])
    assert_step_of_model(ranks, 2, rows, results[0][1])


def test_a_stale_pin_voids_all_that_follows_on_every_rank():
    with warmed_up(case_of(2)) as ranks:
        stale = torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        results, before = refused_step(ranks, lambda rank, _, inputs: rank.lookup_done(inputs.ids, pin=stale))
        assert_nothing_was_applied(ranks, results, before)
        told = ranks.native.take_refusal(ranks.context_id)
        assert "lookup_done on rank 0 (device 100): lookup_done got a stale pin of step 1, but step 2 is armed" in told
        assert "Nothing was applied" in told
        assert ranks.native.take_refusal(ranks.context_id) is None
        assert_goes_on(ranks)


def test_ids_of_another_batch_on_one_rank_stop_every_rank_at_the_same_place():
    with warmed_up(case_of(2)) as ranks:
        position = 17
        given = ranks.case.batches[1].ids.copy()
        armed = int(given[120 + position])
        given[120 + position] = (armed + 1) % ranks.case.rows
        other = dataclasses.replace(ranks.case, batches=(ranks.case.batches[1]._replace(ids=given),))

        def wrong(rank: Rank, number: int, inputs: Any) -> torch.Tensor:
            return rank.lookup_done(rank.inputs(other.batches[0]).ids)

        results, before = refused_step(ranks, wrong)
        for _, report in results:
            assert [float(x) for x in report] == [0, 0, 0]
        assert_same_bits(ranks.tables(), before, "table")
        told = ranks.native.take_refusal(ranks.context_id)
        assert "rank 1 (device 101): lookup_done was given token_ids of another batch" in told
        assert f"row {armed} at position {120 + position}, but token_ids have {(armed + 1) % 97} there" in told
        assert_goes_on(ranks)


# ---- ends


def test_abort_ends_the_wait_for_a_rank_that_does_not_come():
    case = case_of(2)
    with NativeRanks(case) as ranks:
        raised: list[BaseException] = []

        def wait() -> None:
            rank = ranks.ranks[0]
            try:
                with rank.on_stream():
                    rank.lookup_begin(rank.inputs(case.batches[0]).ids)
                    rank.lookup_done()
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + 30
        while ranks.native.stats(ranks.context_id)["lookup_done_calls"] == 0:
            assert time.monotonic() < deadline, "the done has not been called"
            time.sleep(0.001)  # until the thread is inside of the call; nothing tells when
        ranks.native.abort_context(ranks.context_id, "the test says so")
        thread.join(timeout=30)
        assert not thread.is_alive()
        assert "was aborted: the test says so" in str(raised[0])
        with pytest.raises(RuntimeError, match="the test says so"):
            ranks.ranks[1].lookup_begin(ranks.ranks[1].inputs(case.batches[0]).ids)


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over():
    case = case_of(2)
    with NativeRanks(case, timeout_seconds=0.5) as ranks:
        rank = ranks.ranks[0]
        rank.lookup_begin(rank.inputs(case.batches[0]).ids)
        with pytest.raises(RuntimeError, match=r"timed out .* missing rank 1 \(device 101\)"):
            rank.lookup_done()


def test_closing_and_opening_twenty_times_takes_no_more_memory():
    case = case_of(4, tokens=24_000)
    with NativeRanks(case) as ranks:
        ranks.native.close_context(ranks.context_id)
        torch.cuda.synchronize()
        free_before, _ = torch.cuda.mem_get_info()
        for _ in range(20):
            ranks.open()
            assert torch.cuda.mem_get_info()[0] < free_before, "an arena is there"
            ranks.native.close_context(ranks.context_id)
        deadline = time.monotonic() + 10  # the last owner may be the thread that watches for timeouts
        while torch.cuda.mem_get_info()[0] < free_before - (4 << 20):
            assert time.monotonic() < deadline, "memory of a closed context is still taken"
            time.sleep(0.05)  # between two looks


def test_closing_while_the_gpu_is_busy_waits_for_the_work():
    case = case_of()
    with NativeRanks(case) as ranks:
        (rank,) = ranks.ranks
        with rank.on_stream():
            inputs = rank.inputs(case.batches[0])
            torch.cuda.synchronize()
            free = busy()
            rank.lookup_begin(inputs.ids)
            rows = rank.lookup_done()
            ranks.native.close_context(ranks.context_id)
            assert free.query(), "the lookup came after the long kernel, so its end did too"
        torch.cuda.synchronize()
        assert_same_bits(to_numpy(rows), reference.lookup(case.start.table, case.batches[0].ids), "rows")


def test_a_tensor_that_is_no_capsule_is_refused():
    with NativeRanks(case_of()) as ranks:
        rank = ranks.ranks[0]
        taken = capsule(rank.pin)
        torch.utils.dlpack.from_dlpack(taken)
        with pytest.raises(ValueError, match="DLPack capsule"):
            rank.calls.lookup_begin(taken, capsule(rank.table), capsule(rank.pin))
