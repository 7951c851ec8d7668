"""Order between the caller's stream and the side streams, while a GPU is busy; and a host that never waits for it.

Nothing here measures time. `busy` keeps a stream occupied for about half a second by a kernel that only counts
cycles, and events tell what has been reached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from jax_bridge import reference
from tests.jax_bridge import _fifty_steps as fifty_steps
from tests.jax_bridge._programs import assert_same_bits

from ._cases import Case, Rule, assert_like_the_oracle, hot_id, of_fifty_steps, random_batches, random_start
from ._native_ranks import NativeRanks, Rank, Report, capsule, to_numpy

LONG = 1_000_000_000  # cycles: about half a second at 1.8 GHz


def busy(cycles: int = LONG) -> torch.cuda.Event:
    """Occupies the current stream. The event is reached when it is free again."""
    torch.cuda._sleep(cycles)
    event = torch.cuda.Event()
    event.record()
    return event


def case_of(ranks: int = 1, *, steps: int = 4, tokens: int = 240, width: int = 64) -> Case:
    batches = random_batches(np.float32, width, steps, tokens=tokens)
    return Case("streams", random_start(np.float32, width), batches, Rule(), ranks=ranks)


@pytest.fixture
def one():
    """One rank that has taken one exact step, so that nothing is loaded for the first time, and its oracle."""
    with warmed_up(case_of()) as ranks:
        yield ranks


@contextlib.contextmanager
def warmed_up(case: Case) -> Any:
    with NativeRanks(case) as ranks:
        ranks.on_ranks(lambda rank, _: whole_step(rank, 0))
        torch.cuda.synchronize()
        ranks.model = model_of(case)
        ranks.model.step(case.batches[0].ids, lambda *_: (case.batches[0].grads, True))
        yield ranks


def model_of(case: Case) -> reference.Simulation:
    return reference.Simulation(
        case.start.table, case.start.row_state, staleness=0, options=dict(case.rule.for_oracle()), id_policy="drop"
    )


def whole_step(rank: Rank, k: int) -> tuple[torch.Tensor, Report]:
    inputs = rank.inputs(rank.case.batches[k])
    rank.lookup_begin(inputs.ids)
    rows = rank.lookup_done(inputs.ids)
    rank.stage(inputs)
    rank.update_begin(rank.case.rule, rank.numbers(rank.case.rule, k))
    return rows, rank.update_done()


def assert_step_of_model(ranks: NativeRanks, k: int, rows: torch.Tensor, report: Report) -> None:
    batch = ranks.case.batches[k]
    wanted = ranks.model.step(batch.ids, lambda *_: (batch.grads, True))
    assert_same_bits(to_numpy(rows), wanted.rows, "rows")
    assert_same_bits(to_numpy(report.norm), wanted.update.norm, "norm")
    assert_same_bits(ranks.tables(), ranks.model.table, "table")


# ---- the host does not wait


def test_no_call_waits_for_a_busy_gpu(one):
    (rank,) = one.ranks
    with rank.on_stream():
        inputs, numbers = rank.inputs(one.case.batches[1]), rank.numbers(one.case.rule, 1)
        torch.cuda.synchronize()
        free = busy()
        rank.lookup_begin(inputs.ids)
        assert not free.query(), "lookup_begin returned while the stream was busy"
        rows = rank.lookup_done(inputs.ids)
        assert not free.query()
        rank.stage(inputs)
        assert not free.query()
        rank.update_begin(one.case.rule, numbers)
        assert not free.query()
        report = rank.update_done()
        rank.settle()
        assert not free.query(), "a whole step was given to the GPU meanwhile"
    torch.cuda.synchronize()
    assert_step_of_model(one, 1, rows, report)


def test_the_first_calls_of_a_context_do_not_wait_either():
    """Nothing is allocated by a step, and every kernel was loaded when the context opened."""
    case = case_of()
    with NativeRanks(case) as ranks:
        (rank,) = ranks.ranks
        with rank.on_stream():
            inputs, numbers = rank.inputs(case.batches[0]), rank.numbers(case.rule, 0)
            # torch loads and allocates at first use, too: what the driver needs of it is done once before.
            for tensor in (*inputs[:3], *numbers):
                tensor.clone().view(torch.uint8 if tensor.dtype == torch.bool else tensor.dtype).fill_(1)
            torch.zeros(240, 64, device="cuda")
            torch.cuda.synchronize()
            free = busy()
            rank.lookup_begin(inputs.ids)
            assert not free.query()
            rank.lookup_done(inputs.ids)
            rank.stage(inputs)
            rank.update_begin(case.rule, numbers)
            rank.update_done()
            assert not free.query()


# ---- the side stream does not wait for what came after the start


def reached_while_busy(event: torch.cuda.Event, free: torch.cuda.Event) -> bool:
    """Waits until one of the two is reached. True: the event, and the stream is still busy."""
    while not event.query():
        if free.query():
            return False
        time.sleep(0.001)
    return not free.query()


def test_a_lookup_overlaps_a_long_kernel_on_the_stream_that_started_it(one):
    (rank,) = one.ranks
    with rank.on_stream():
        inputs = rank.inputs(one.case.batches[1])
        torch.cuda.synchronize()
        rank.lookup_begin(inputs.ids)
        free = busy(2 * LONG)
    another = torch.cuda.Stream()
    # What settles on another stream waits for the lookup alone.
    one.native.DeviceRank(one.context_id, 0, 0, another.cuda_stream).settle()
    looked_up = torch.cuda.Event()
    looked_up.record(another)
    assert reached_while_busy(looked_up, free)
    with rank.on_stream():
        rows = rank.lookup_done(inputs.ids)
    torch.cuda.synchronize()
    assert_same_bits(to_numpy(rows), reference.lookup(one.model.table, one.case.batches[1].ids), "rows")


def test_an_update_overlaps_a_long_kernel_on_the_stream_that_started_it(one):
    (rank,) = one.ranks
    with rank.on_stream():
        inputs, numbers = rank.inputs(one.case.batches[1]), rank.numbers(one.case.rule, 1)
        torch.cuda.synchronize()
        rank.lookup_begin(inputs.ids)
        rows = rank.lookup_done(inputs.ids)
        rank.stage(inputs)
        rank.update_begin(one.case.rule, numbers)
        free = busy(2 * LONG)
        another = torch.cuda.Stream()
        one.native.DeviceRank(one.context_id, 0, 0, another.cuda_stream).settle()
        updated = torch.cuda.Event()
        updated.record(another)
        assert reached_while_busy(updated, free)
        report = rank.update_done()
    torch.cuda.synchronize()
    assert_step_of_model(one, 1, rows, report)


# ---- what came before the start on the stream comes first, and what comes after a done comes later


def test_inputs_that_a_busy_stream_has_yet_to_write_are_waited_for(one):
    (rank,) = one.ranks
    case = one.case
    with rank.on_stream():
        ready, numbers = rank.inputs(case.batches[1]), rank.numbers(case.rule, 1)
        late = ready._replace(ids=torch.zeros_like(ready.ids), grads=torch.zeros_like(ready.grads))
        torch.cuda.synchronize()
        busy()
        late.ids.copy_(ready.ids)
        rank.lookup_begin(late.ids)
        rows = rank.lookup_done(ready.ids)
        busy()
        late.grads.copy_(ready.grads)
        rank.stage(late)
        rank.update_begin(case.rule, numbers)
        report = rank.update_done()
    torch.cuda.synchronize()
    assert_step_of_model(one, 1, rows, report)


def test_a_table_that_a_busy_stream_has_yet_to_write_is_read_as_written(one):
    (rank,) = one.ranks
    ids = one.case.batches[1].ids
    with rank.on_stream():
        inputs = rank.inputs(one.case.batches[1])
        torch.cuda.synchronize()
        busy()
        rank.table.mul_(2.0)
        rank.lookup_begin(inputs.ids)
        rows = rank.lookup_done(inputs.ids)
        rank.table.mul_(0.5)
    torch.cuda.synchronize()
    assert_same_bits(to_numpy(rows), 2 * reference.lookup(one.model.table, ids), "rows")


def test_what_follows_an_update_on_the_stream_sees_all_of_it():
    """The update is long (one id with a hundred thousand occurrences), and the copy of the table is asked for at
    once."""
    case = hot_id(1)
    with NativeRanks(case) as ranks:
        (rank,) = ranks.ranks
        with rank.on_stream():
            whole_step(rank, 0)
            copy = rank.table.clone()
        torch.cuda.synchronize()
        model = model_of(case)
        model.step(case.batches[0].ids, lambda *_: (case.batches[0].grads, True))
        assert_same_bits(to_numpy(copy), model.table, "a copy made right after update_done")


def test_rows_of_a_lookup_stay_as_they_are_while_the_next_one_is_made(one):
    """The arena's rows are delivered before the next lookup may write there."""
    (rank,) = one.ranks
    case = one.case
    with rank.on_stream():
        inputs = [rank.inputs(batch) for batch in case.batches]
        torch.cuda.synchronize()
        busy()
        rows = []
        for each in inputs:
            rank.lookup_begin(each.ids)
            rows.append(rank.lookup_done(each.ids))
    torch.cuda.synchronize()
    for got, batch in zip(rows, case.batches, strict=True):
        assert_same_bits(to_numpy(got), reference.lookup(one.model.table, batch.ids), "rows")


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_ranks_that_are_held_up_at_random_give_the_same_bits(ranks, staleness):
    """Each rank's stream is busy for a while before some of its calls, and its thread sometimes sleeps."""
    case = of_fifty_steps(ranks, fifty_steps.ONE_OF_EACH_DTYPE[0], staleness)
    draws = [np.random.default_rng(rank) for rank in range(ranks)]

    def hold_up(rank: int, call: str) -> None:
        if draws[rank].random() < 0.2:
            torch.cuda._sleep(int(draws[rank].integers(1_000, 3_000_000)))
        if draws[rank].random() < 0.02:
            time.sleep(0.002)

    with NativeRanks(case) as context:
        assert_like_the_oracle(context.run(hold_up), case)


def test_a_step_beside_matrix_products_gives_the_same_bits():
    case = of_fifty_steps(2, fifty_steps.ONE_OF_EACH_DTYPE[1], staleness=1)
    factors = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()

    def work(rank: int, call: str) -> None:
        if call in ("update_done", "stage"):  # where the forward and the backward lie
            torch.mm(factors, factors)

    with NativeRanks(case) as ranks:
        assert_like_the_oracle(ranks.run(work), case)


# ---- refusals that only the device can find


def refused_step(ranks: NativeRanks, wrong: Any) -> tuple[list[Any], np.ndarray[Any, Any]]:
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


def assert_nothing_was_applied(ranks: NativeRanks, results: list[Any], before: np.ndarray[Any, Any]) -> None:
    for rows, report in results:
        assert bool(torch.isnan(rows).all()), "rows of a refused lookup are NaN"
        assert [float(x) for x in report] == [0, 0, 0]
    assert_same_bits(ranks.tables(), before, "table")


def assert_goes_on(ranks: NativeRanks) -> None:
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
        while ranks.native.stats(ranks.context_id)["lookup_done_calls"] == 0:
            time.sleep(0.001)
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
            time.sleep(0.05)


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
