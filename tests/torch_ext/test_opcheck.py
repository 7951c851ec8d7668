"""The operators keep torch's contracts: schema, fake kernels, autograd registration, compilation."""

from __future__ import annotations

import pytest
import torch

from torch_ext import gather_rows, rowwise_adagrad_, segment_sum, unique_ids

from .batches import DTYPES, assert_same_bits, make_batch

RULE = {"learning_rate": 0.05, "eps": 1e-6}
LAZY_RULE = {**RULE, "step": 5, "accum_decay_rate": 0.01, "weight_decay_rate": 0.001}
OPS = torch.ops.async_emb


def opcheck(op, arguments, keywords=None) -> None:
    results = torch.library.opcheck(op, arguments, keywords or {})
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_rows(dtype):
    batch = make_batch(dtype=dtype)
    opcheck(OPS.gather_rows.default, (batch.table, batch.ids.reshape(3, -1)))


@pytest.mark.parametrize("tokens", [0, 300])
def test_unique_ids(tokens):
    opcheck(OPS.unique_ids.default, (make_batch(tokens=tokens).ids,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_segment_sum_and_gradient_norm(dtype):
    batch = make_batch(dtype=dtype)
    _, offsets, positions = unique_ids(batch.ids)
    opcheck(OPS.segment_sum.default, (batch.grads, offsets, positions))
    opcheck(OPS.gradient_norm.default, (segment_sum(batch.grads, offsets, positions)[1],))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 1, "rounding_step": 2}])
def test_updates(dtype, options):
    batch = make_batch(dtype=dtype)
    unique, offsets, positions = unique_ids(batch.ids)
    gradient = (unique, *segment_sum(batch.grads, offsets, positions))
    opcheck(OPS.rowwise_adagrad_.default, (batch.table, batch.row_state, *gradient), {**RULE, **options})
    opcheck(
        OPS.rowwise_adagrad_lazy_.default,
        (batch.table, batch.row_state, batch.last_step, *gradient),
        {**LAZY_RULE, **options},
    )


def test_a_whole_step_exports_and_gives_the_same_bits():
    class Step(torch.nn.Module):
        def forward(self, table, row_state, ids, grads):
            rows = gather_rows(table, ids)
            unique, offsets, positions = unique_ids(ids)
            sums, statistics = segment_sum(grads, offsets, positions)
            rowwise_adagrad_(table, row_state, unique, sums, statistics, **RULE)
            return rows

    eager, exported = make_batch(), make_batch()
    inputs = (exported.table, exported.row_state, exported.ids, exported.grads)
    program = torch.export.export(Step(), tuple(tensor.clone() for tensor in inputs)).module()
    rows = program(*inputs)
    assert_same_bits(rows, Step()(eager.table, eager.row_state, eager.ids, eager.grads))
    assert_same_bits(exported.table, eager.table)
    assert_same_bits(exported.row_state, eager.row_state)


def test_a_whole_step_compiles_without_graph_breaks():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(table, row_state, ids, grads):
        rows = gather_rows(table, ids)
        unique, offsets, positions = unique_ids(ids)
        sums, statistics = segment_sum(grads, offsets, positions)
        rowwise_adagrad_(table, row_state, unique, sums, statistics, **RULE)
        return rows

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled, eager = make_batch(), make_batch()
        step(compiled.table, compiled.row_state, compiled.ids, compiled.grads)
    unique, offsets, positions = unique_ids(eager.ids)
    rowwise_adagrad_(eager.table, eager.row_state, unique, *segment_sum(eager.grads, offsets, positions), **RULE)
    assert_same_bits(compiled.table, eager.table)
