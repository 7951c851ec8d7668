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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_gather_rows(dtype):
    batch = make_batch(dtype=dtype)
    opcheck(OPS.gather_rows.default, (batch.table.requires_grad_(), batch.ids.reshape(3, -1)))


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


def test_a_compiled_lookup_has_gradient_rows_and_no_break():
    lookup = torch.compile(lambda table, ids: (gather_rows(table, ids) ** 2).sum(), backend="aot_eager", fullgraph=True)
    compiled, eager = make_batch(), make_batch()
    lookup(compiled.table.requires_grad_(), compiled.ids).backward()
    (gather_rows(eager.table.requires_grad_(), eager.ids) ** 2).sum().backward()
    assert compiled.table.grad.is_sparse
    assert compiled.table.grad._nnz() == int((compiled.ids >= 0).sum()), "a row for each token, and no dense table"
    assert_same_bits(compiled.table.grad.coalesce().values(), eager.table.grad.coalesce().values())


def test_operators_whose_shapes_depend_on_shapes_alone_run_on_meta_tensors():
    batch = make_batch()
    table, ids, grads = (x.to("meta") for x in (batch.table, batch.ids, batch.grads))
    assert OPS.gather_rows(table, ids).shape == (300, 12)
    offsets, positions = (torch.empty(n, dtype=torch.int32, device="meta") for n in (8, 300))
    sums, statistics = OPS.segment_sum(grads, offsets, positions)
    assert (sums.shape, statistics.shape, sums.device.type) == ((7, 12), (7,), "meta")
    assert OPS.gradient_norm(statistics).shape == ()
    assert OPS.rowwise_adagrad_(table, batch.row_state.to("meta"), offsets[1:], sums, statistics, **RULE) is None
    state = (batch.row_state.to("meta"), batch.last_step.to("meta"))
    assert OPS.rowwise_adagrad_lazy_(table, *state, offsets[1:], sums, statistics, **LAZY_RULE) is None


def test_a_step_runs_where_only_deterministic_algorithms_are_allowed():
    results = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            batch = make_batch()
            unique, offsets, positions = unique_ids(batch.ids)
            gather_rows(batch.table.requires_grad_(), batch.ids).sum().backward()
            gradient = batch.table.grad.coalesce().values()
            table = batch.table.detach()
            rowwise_adagrad_(table, batch.row_state, unique, *segment_sum(batch.grads, offsets, positions), **RULE)
            results.append((gradient, table))
        finally:
            torch.use_deterministic_algorithms(False)
    for plain, deterministic in zip(*results, strict=True):
        assert_same_bits(deterministic, plain)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
def test_transformations_without_a_rule_name_the_operator_and_the_way(transform):
    batch = make_batch()
    with pytest.raises(RuntimeError, match=r"torch_ext\.gather_rows: table is being differentiated.*use backward\(\)"):
        transform(lambda table: gather_rows(table, batch.ids).sum())(batch.table)


def test_forward_mode_is_refused_instead_of_being_zero():
    batch = make_batch()
    with torch.autograd.forward_ad.dual_level():
        table = torch.autograd.forward_ad.make_dual(batch.table, torch.ones_like(batch.table))
        with pytest.raises(RuntimeError, match=r"torch_ext\.gather_rows: .*in forward mode"):
            gather_rows(table, batch.ids)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_ids_is_a_lookup_of_all():
    batch = make_batch()
    rows = torch.func.vmap(lambda ids: gather_rows(batch.table, ids))(batch.ids.reshape(3, -1))
    assert_same_bits(rows, gather_rows(batch.table, batch.ids.reshape(3, -1)))
