"""Order between the caller's stream and the side streams, while a GPU is busy; and a host that never waits for it.

Nothing here measures time. `busy` keeps a stream occupied for about half a second by a kernel that only counts
cycles, and events tell what has been reached.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from jax_bridge import reference
from tests.jax_bridge import _fifty_steps as fifty_steps
from tests.jax_bridge._programs import assert_same_bits

from ._cases import assert_like_the_oracle, hot_id, of_fifty_steps
from ._native_ranks import NativeRanks, to_numpy
from ._steps import LONG, assert_step_of_model, busy, case_of, model_of, warmed_up, whole_step


@pytest.fixture
def one():
    """One rank that has taken one exact step, so that nothing is loaded for the first time, and its oracle."""
    with warmed_up(case_of()) as ranks:
        yield ranks


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
        time.sleep(0.001)  # between two looks; what is asserted is which came first
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
            time.sleep(0.002)  # a rank's thread that is late: orders vary, results must not

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
