"""CUDA gives the oracle's bits: tables, states, rows, norms and decisions, for several ranks on one GPU.

The same cases pass on the CPU pipeline (`on_cpu/test_cases.py`), so CPU and CUDA agree.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.jax_bridge import _fifty_steps as fifty_steps

from ._cases import (
    DTYPES,
    Batch,
    Case,
    Rule,
    Start,
    all_cases,
    assert_like_the_oracle,
    assert_same_run,
    backwards,
    expected,
    hot_id,
    of_fifty_steps,
    random_batches,
    random_start,
)
from ._native_ranks import NativeRanks, to_numpy, to_torch


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_cuda_gives_the_bits_of_the_oracle(case):
    with NativeRanks(case) as ranks:
        assert_like_the_oracle(ranks.run(), case)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tokens_count_in_the_order_of_the_global_array_whatever_rank_holds_them(ranks):
    case = backwards(of_fifty_steps(ranks, fifty_steps.PAIRWISE[3], staleness=1))
    with NativeRanks(case) as context:
        assert_like_the_oracle(context.run(), case)


def test_ten_repetitions_give_the_same_digest():
    case = hot_id(2)
    digests = set()
    for _ in range(10):
        with NativeRanks(case) as ranks:
            digests.add(ranks.run().run.digest())
    assert digests == {expected(case).digest()}


def test_two_runs_in_one_context_do_not_disturb_each_other():
    case = of_fifty_steps(2, fifty_steps.ONE_OF_EACH_DTYPE[0])
    with NativeRanks(case) as ranks:
        first = ranks.run().run
        after = dataclasses.replace(case, start=Start(first.table, first.row_state, first.last_step))
        assert_same_run(ranks.run().run, expected(after))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_as_large_as_a_benchmark_gives_the_bits_of_the_oracle(dtype):
    """Every launch needs more blocks than the GPU holds at once, so loops over items run more than once."""
    rows, width, tokens = 50_000, 64, 1 << 18
    rng = np.random.default_rng(3)
    ids = rng.integers(0, rows, tokens).astype(np.int32)
    (batch,) = random_batches(DTYPES[dtype], width, 1, tokens=tokens, rows=rows)
    case = Case(
        f"large, {dtype}",
        random_start(DTYPES[dtype], width, rows=rows),
        (batch._replace(ids=ids),),
        Rule(max_grad_norm=100.0, lazy=True, state_decay=0.01, weight_decay=1e-3),
        ranks=2,
    )
    with NativeRanks(case) as ranks:
        assert_like_the_oracle(ranks.run(), case)


def test_a_table_of_more_than_two_to_the_31_elements_is_read_and_written_where_it_should_be():
    """The table is too large for NumPy, so the oracle gets the rows of the batch alone, renumbered in their order."""
    rows, width, tokens = 9_000_000, 256, 4096
    assert rows * width > 2**31
    rng = np.random.default_rng(5)
    ids = rng.choice(np.r_[0:50, rows - 1000 : rows], tokens).astype(np.int32)
    small, renumbered = np.unique(ids, return_inverse=True)
    start = random_start(DTYPES["bfloat16"], width, rows=len(small))
    grads = rng.normal(size=(tokens, width)).astype(DTYPES["bfloat16"])
    compact = Case("compact", start, (Batch(renumbered.astype(np.int32), grads),))
    wanted = expected(compact)

    case = dataclasses.replace(compact, name="huge", batches=(Batch(ids, grads),))
    with NativeRanks(case) as ranks:
        (rank,) = ranks.ranks
        places = torch.from_numpy(small).long().cuda()
        rank.table = torch.full((rows, width), 7.0, dtype=torch.bfloat16, device="cuda")
        rank.table[places] = to_torch(start.table, "cuda")
        rank.row_state = torch.full((rows,), 0.5, device="cuda")
        rank.row_state[places] = to_torch(start.row_state, "cuda")
        torch.cuda.synchronize()
        with rank.on_stream():
            inputs = rank.inputs(case.batches[0])
            rank.lookup_begin(inputs.ids)
            looked_up = rank.lookup_done(inputs.ids)
            rank.stage(inputs)
            rank.update_begin(case.rule, rank.numbers(case.rule, 0))
            report = rank.update_done()
        torch.cuda.synchronize()
        assert np.array_equal(to_numpy(looked_up).view(np.int16), wanted.rows[0].view(np.int16))
        assert float(report.norm) == wanted.norms[0]
        table = to_numpy(rank.table[places])
        assert np.array_equal(table.view(np.int16), wanted.table.view(np.int16))
        assert np.array_equal(to_numpy(rank.row_state[places]), wanted.row_state)
        untouched = torch.ones(rows, dtype=torch.bool, device="cuda")
        untouched[places] = False
        for begin in range(0, rows, 1_000_000):
            part = slice(begin, begin + 1_000_000)
            assert bool((rank.table[part][untouched[part]] == 7.0).all())
            assert bool((rank.row_state[part][untouched[part]] == 0.5).all())
