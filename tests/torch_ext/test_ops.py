"""The operators give the bits that the NumPy oracle gives."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch

from jax_bridge import reference
from torch_ext import (
    gather_rows,
    gradient_norm,
    rowwise_adagrad_,
    rowwise_adagrad_lazy_,
    segment_sum,
    unique_ids,
)

from .batches import DTYPES, Batch, assert_same_bits, bits, make_batch, to_numpy

WIDTHS = (1, 3, 12, 32, 64, 100, 257)
PLAIN = {"learning_rate": 0.05, "eps": 1e-6, "decay_factor": 0.9, "weight_decay_factor": 0.999}
LAZY = {"step": 90, "learning_rate": 0.05, "eps": 1e-6, "accum_decay_rate": 0.01, "weight_decay_rate": 0.001}
OPTIONS = (
    pytest.param({}, id="nearest"),
    pytest.param({"max_grad_norm": 0.5}, id="clipped"),
    pytest.param({"max_grad_norm": 1e9}, id="not clipped"),
    pytest.param({"max_grad_norm": 0.0}, id="clipped to nothing"),
    pytest.param({"rounding": "stochastic", "seed": 2**32 - 1, "rounding_step": 7}, id="stochastic"),
)


def copy_of(batch: Batch) -> Batch:
    return Batch(**{field.name: getattr(batch, field.name).clone() for field in fields(batch)})


def summed(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    unique, offsets, positions = unique_ids(batch.ids)
    return unique, *segment_sum(batch.grads, offsets, positions)


class TestGatherRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
    def test_copies_rows_and_zeros_where_there_is_none(self, dtype, width, id_dtype):
        batch = make_batch(width=width, dtype=dtype)
        ids = batch.ids.to(id_dtype)
        expected = torch.where(ids[:, None] >= 0, batch.table[ids.clamp(min=0).long()], 0)
        assert_same_bits(gather_rows(batch.table, ids), expected)

    def test_keeps_the_shape_of_the_ids(self):
        table = torch.arange(12.0).reshape(4, 3)
        assert gather_rows(table, torch.tensor([[0, 1], [2, 3]])).shape == (2, 2, 3)
        assert gather_rows(table, torch.tensor(2)).tolist() == [6.0, 7.0, 8.0]
        assert gather_rows(table, torch.empty(0, dtype=torch.int64)).shape == (0, 3)

    def test_keeps_the_payload_of_nan(self):
        table = torch.tensor([[0x7FA12345, -0x00345678]], dtype=torch.int32).view(torch.float32)
        assert_same_bits(gather_rows(table, torch.tensor([0, 0])), torch.cat([table, table]))

    def test_a_batch_large_enough_for_many_threads(self):
        table = torch.randn(1000, 64)
        ids = torch.randint(0, 1000, (50_000,))
        assert_same_bits(gather_rows(table, ids), table[ids])


class TestUniqueIds:
    @pytest.mark.parametrize("tokens", [0, 1, 2, 300, 5000])
    def test_lists_every_id_and_its_positions(self, tokens):
        ids = make_batch(tokens=tokens).ids
        unique, offsets, positions = unique_ids(ids)
        assert unique.tolist() == sorted(set(ids.tolist()) - {-1})
        occurrences = [positions[begin:end].tolist() for begin, end in pairwise(offsets)]
        assert occurrences == [(ids == u).nonzero().flatten().tolist() for u in unique]

    def test_no_rows_at_all(self):
        unique, offsets, positions = unique_ids(torch.tensor([-1, -1]))
        assert (unique.tolist(), offsets.tolist(), positions.tolist()) == ([], [0], [])

    def test_the_largest_ids(self):
        unique, _, positions = unique_ids(torch.tensor([[2**31 - 2, 5], [0, 5]]))
        assert unique.tolist() == [0, 5, 2**31 - 2]
        assert positions.tolist() == [2, 1, 3, 0]


class TestSegmentSum:
    @pytest.mark.parametrize("grad_dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_matches_the_oracle(self, grad_dtype, width):
        batch = make_batch(rows=9, width=width, grad_dtype=grad_dtype)
        _, sums, statistics = summed(batch)
        expected = reference.segment_sum(to_numpy(batch.grads), reference.unique_ids(batch.ids.numpy()))
        assert_same_bits(sums, expected)
        assert_same_bits(statistics, reference.row_statistics(expected))
        assert_same_bits(gradient_norm(statistics), np.asarray(reference.global_norm(to_numpy(statistics))))

    def test_one_occurrence_of_minus_zero_stays(self):
        _, offsets, positions = unique_ids(torch.tensor([3]))
        sums, statistics = segment_sum(torch.tensor([[-0.0]]), offsets, positions)
        assert (bits(sums).item(), statistics.item()) == (-(2**31), 0.0)

    def test_no_rows(self):
        sums, statistics = segment_sum(torch.ones(2, 3), *unique_ids(torch.tensor([-1, -1]))[1:])
        assert (sums.shape, statistics.shape) == ((0, 3), (0,))
        assert gradient_norm(statistics).item() == 0.0


class TestRowwiseAdagrad:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [1, 12, 100])
    @pytest.mark.parametrize("options", OPTIONS)
    def test_matches_the_oracle(self, dtype, width, options):
        batch = make_batch(dtype=dtype, width=width)
        expected = reference.rowwise_adagrad_update(
            to_numpy(batch.table), batch.row_state.numpy(), batch.ids.numpy(), to_numpy(batch.grads), **PLAIN, **options
        )
        rowwise_adagrad_(batch.table, batch.row_state, *summed(batch), **PLAIN, **options)
        assert_same_bits(batch.table, expected.table)
        assert_same_bits(batch.row_state, expected.row_state)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("options", OPTIONS)
    def test_lazy_matches_the_oracle(self, dtype, options):
        batch = make_batch(dtype=dtype)
        expected = reference.rowwise_adagrad_lazy_update(
            to_numpy(batch.table),
            batch.row_state.numpy(),
            batch.last_step.numpy(),
            ids=batch.ids.numpy(),
            grads=to_numpy(batch.grads),
            **LAZY,
            **options,
        )
        rowwise_adagrad_lazy_(batch.table, batch.row_state, batch.last_step, *summed(batch), **LAZY, **options)
        assert_same_bits(batch.table, expected.table)
        assert_same_bits(batch.row_state, expected.row_state)
        assert_same_bits(batch.last_step, expected.last_step)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
    def test_a_norm_that_is_not_finite_changes_nothing(self, bad):
        batch = make_batch()
        before = copy_of(batch)
        batch.grads[17, 3] = bad
        batch.ids[17] = 4
        unique, sums, statistics = summed(batch)
        rowwise_adagrad_(batch.table, batch.row_state, unique, sums, statistics, **PLAIN)
        assert not gradient_norm(statistics).isfinite()
        assert_same_bits(batch.table, before.table)
        assert_same_bits(batch.row_state, before.row_state)

    def test_rows_outside_of_the_batch_keep_their_bits(self):
        batch = make_batch(rows=1000, tokens=20)
        before = copy_of(batch)
        rowwise_adagrad_(batch.table, batch.row_state, *summed(batch), **PLAIN)
        outside = torch.ones(1000, dtype=torch.bool)
        outside[batch.ids[batch.ids >= 0].long()] = False
        assert_same_bits(batch.table[outside], before.table[outside])
        assert_same_bits(batch.row_state[outside], before.row_state[outside])
        assert not torch.equal(batch.table, before.table)

    def test_float16_saturates(self):
        table = torch.full((1, 1), 65504.0, dtype=torch.float16)
        arguments = (torch.zeros(1, dtype=torch.int32), torch.full((1, 1), -1.0), torch.ones(1))
        rowwise_adagrad_(table, torch.zeros(1), *arguments, learning_rate=1e6, eps=0.0)
        assert table.item() == 65504.0

    def test_the_same_bits_for_any_number_of_threads(self):
        results = []
        threads = torch.get_num_threads()
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                batch = make_batch(rows=5000, width=64, tokens=20_000, dtype=torch.bfloat16)
                options = {"rounding": "stochastic", "seed": 1, "rounding_step": 2}
                rowwise_adagrad_(batch.table, batch.row_state, *summed(batch), **PLAIN, **options)
                results.append(batch)
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            assert_same_bits(other.table, results[0].table)
            assert_same_bits(other.row_state, results[0].row_state)

    def test_tells_autograd_that_the_table_changed(self):
        batch = make_batch()
        weights = torch.ones(batch.table.shape[1], requires_grad=True)
        product = (batch.table * weights).sum()
        rowwise_adagrad_(batch.table, batch.row_state, *summed(batch), **PLAIN)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


# ---- gradients


@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,)])
def test_the_gradient_of_gather_rows_is_that_of_a_sparse_embedding(shape):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(10, 4, generator=generator).requires_grad_()
    same = table.detach().clone().requires_grad_()
    ids = torch.randint(0, 10, shape, generator=generator)
    factors = torch.randn(*shape, 4, generator=generator)
    (torch.ops.async_emb.gather_rows(table, ids) * factors).sum().backward()
    (torch.nn.functional.embedding(ids, same, sparse=True) * factors).sum().backward()
    assert table.grad.is_sparse
    torch.testing.assert_close(table.grad.to_dense(), same.grad.to_dense(), rtol=0, atol=0)


def test_an_entry_without_a_row_has_no_gradient():
    table = torch.randn(5, 3, requires_grad=True)
    torch.ops.async_emb.gather_rows(table, torch.tensor([-1, 2, -1])).sum().backward()
    assert table.grad.to_dense().nonzero()[:, 0].unique().tolist() == [2]


def test_gradients_reach_what_was_put_into_the_table():
    weights = torch.randn(5, 3, dtype=torch.float32, requires_grad=True)
    rows = torch.ops.async_emb.gather_rows(weights * 2, torch.tensor([1, 1]))
    rows.sum().backward()
    assert weights.grad.to_dense()[1].tolist() == [4, 4, 4]
