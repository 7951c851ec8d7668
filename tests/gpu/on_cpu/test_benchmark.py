"""What of the GPU benchmark can be checked without a GPU: what it counts, and how it prints that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from benchmarks import gpu_peers, gpu_table
from benchmarks.gpu_cases import Config, configs, lookup_bytes, update_bytes
from benchmarks.gpu_ours import EPS, LEARNING_RATE, kernel_name
from benchmarks.gpu_table import Line, as_json, as_text, cells
from benchmarks.ids import IDS, make_ids
from benchmarks.timing import Times, times_of
from jax_bridge import reference

REPOSITORY = Path(__file__).parents[3]


def test_the_whole_table_has_every_width_dtype_and_kind_of_ids():
    assert len(configs(quick=False)) == len(set(configs(quick=False))) == 24
    assert set(configs(quick=True)) < set(configs(quick=False))


def test_the_bytes_are_those_of_the_formulas():
    assert lookup_bytes(tokens=10, row_bytes=256) == 10 * 4 + 10 * 256 * 2
    assert update_bytes(tokens=10, distinct=3, row_bytes=256) == 10 * 4 + 10 * 256 + 3 * (256 + 256 + 4 + 4)
    assert Config(64, "float32", "uniform").row_bytes == 2 * Config(64, "bfloat16", "uniform").row_bytes == 256


def test_a_share_is_bytes_over_time_over_bandwidth():
    assert Times(p50=100.0, p90=200.0, count=50).share(400_000_000, bandwidth=5e12) == pytest.approx(0.8)
    assert times_of([1.0, 2.0, 3.0, 4.0, 100.0]) == Times(p50=3.0, p90=pytest.approx(61.6), count=5)


@pytest.mark.parametrize("kind", IDS)
def test_ids_are_in_the_table_and_come_as_their_name_says(kind):
    rows, tokens = 100_000, 50_000
    ids = make_ids(kind, rows, tokens, np.random.default_rng(0))
    assert ids.dtype == np.int32
    assert ids.shape == (tokens,)
    assert ids.min() >= 0
    assert ids.max() < rows
    counts = np.sort(np.bincount(ids, minlength=rows))[::-1]
    if kind == "uniform":
        assert counts[0] < 12
        assert np.count_nonzero(counts) == pytest.approx(rows * (1 - np.exp(-tokens / rows)), rel=0.02)
    else:
        exponent = float(kind.split()[1])
        shares = np.arange(1, rows + 1.0) ** -exponent
        assert counts[0] / tokens == pytest.approx(shares[0] / shares.sum(), rel=0.05)
        assert counts[:10].sum() / tokens == pytest.approx(shares[:10].sum() / shares.sum(), rel=0.05)
        assert np.argmax(np.bincount(ids, minlength=rows)) != 0, "the hottest row lies anywhere"


def test_unknown_ids_are_refused():
    with pytest.raises(ValueError, match="none of uniform, zipf"):
        make_ids("pareto 2", 10, 10, np.random.default_rng(0))


def line() -> Line:
    measured = Line(Config(64, "float32", "uniform"), 1_000_000, distinct=950_000)
    measured.gather = Times(120.0, 125.0, 50)
    measured.pair = Times(260.0, 270.0, 50)
    measured.update = Times(500.0, 600.0, 50)
    measured.peers["torch"] = (Times(130.0, 140.0, 50), Times(9000.0, 9100.0, 50))
    measured.peers["jax"] = (Times(150.0, 160.0, 5), None)
    return measured


def test_a_line_says_what_was_reached_and_what_was_not():
    bandwidth = 4.2e12
    found = dict(zip(range(13), cells(line(), bandwidth), strict=True))
    assert [found[i] for i in range(4)] == ["64", "float32", "uniform", "950,000"]
    assert found[4] == "120"
    assert found[5] == f"{100 * lookup_bytes(10**6, 256) / 120e-6 / bandwidth:.0f} % ok"
    assert found[6] == "260 (270)"
    assert found[9].endswith(" <60")
    assert [found[i] for i in (10, 11, 12)] == ["130 / 9,000", "150 / -", "- / -"]


def test_only_wide_uniform_lines_have_a_goal_for_lookups():
    assert [c for c in configs(False) if c.has_lookup_goal] == [
        c for c in configs(False) if c.width >= 64 and c.ids == "uniform"
    ]
    slow = line()
    slow.config = Config(32, "float32", "uniform")
    assert "<" not in cells(slow, 4.2e13)[5]


def test_the_table_is_text_of_equal_columns():
    text = as_text([line(), Line(Config(256, "bfloat16", "zipf 1.05"), 1_000_000)], 4.2e12)
    header, rule, first, second = text.splitlines()
    assert set(rule) == {"-"}
    assert header.index("distinct") + len("distinct") == first.index("950,000") + len("950,000")
    assert second.split()[:4] == ["256", "bfloat16", "zipf", "1.05"]
    assert all(len(row) <= 150 for row in text.splitlines())


def test_the_record_can_be_read_back():
    record = json.loads(json.dumps(as_json(line(), 4.2e12)))
    assert record["config"] == {"width": 64, "dtype": "float32", "ids": "uniform"}
    assert record["peers"]["torch"]["update"]["p50"] == 9000.0
    assert record["peers"]["jax"]["update"] is None
    assert 0 < record["shares_of_copy"]["update"] < record["shares_of_copy"]["gather"] < 1.2
    assert gpu_table.HEADERS[-3:] == tuple(gpu_peers.PEERS)


def test_kernels_are_known_by_their_names():
    ours = "void async_emb::cuda::run_body<async_emb::cuda::v1::GatherChunks<16, true> >(async_emb::cuda::GatherChunks)"
    cub = "void cub::CUB_300001_SM_900::detail::radix_sort::DeviceRadixSortOnesweepKernel<cub::Policy>(bool*)"
    assert kernel_name(ours) == "GatherChunks"
    assert kernel_name(cub) == "DeviceRadixSortOnesweepKernel"
    assert kernel_name("void at::native::vectorized_elementwise_kernel<4>(int)") is None


def in_torch(table: Any, state: Any, ids: Any, grads: Any) -> Any:
    arrays = [torch.from_numpy(x.copy()) for x in (table, state, ids, grads)]
    assert np.array_equal(gpu_peers.torch_lookup(arrays[0], arrays[2]), table[ids])
    gpu_peers.torch_update(*arrays)
    return arrays[:2]


def in_jax(table: Any, state: Any, ids: Any, grads: Any) -> Any:
    assert np.array_equal(gpu_peers.jax_take(table, ids), table[ids])
    return jax.jit(gpu_peers.jax_update)(table, state, ids, grads)


@pytest.mark.parametrize("peer", [in_torch, in_jax])
def test_a_peer_follows_the_same_rule(peer):
    rng = np.random.default_rng(1)
    table, state = rng.normal(size=(50, 8)).astype(np.float32), rng.random(50).astype(np.float32)
    ids = rng.integers(0, 50, 200).astype(np.int32)
    grads = rng.normal(size=(200, 8)).astype(np.float32)
    got_table, got_state = peer(table, state, ids, grads)
    wanted = reference.rowwise_adagrad_update(
        table, state, ids, grads, learning_rate=LEARNING_RATE, eps=EPS, decay_factor=1.0
    )
    np.testing.assert_allclose(got_table, wanted.table, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got_state, wanted.row_state, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_fails():
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--quick"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "benchmark: not run, because torch" in result.stderr
    assert result.stdout == ""
