"""The two towers between torch and JAX: fed by a torch `DataLoader`, judged by a metric of torch's, without a copy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.two_tower import torch_loader, torch_ranking
from examples.two_tower.async_tables import AsyncTrainer
from examples.two_tower.settings import Settings
from examples.two_tower.synthetic import SyntheticStream
from examples.two_tower.train import make_mesh

ROOT = Path(__file__).parents[2]
STREAM = SyntheticStream(2000, 0, 0.1)


def run(module: str, *options: str) -> str:
    command = [sys.executable, "-m", f"examples.two_tower.{module}", "--synthetic", "2000", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_batches_of_a_loader_are_read_where_they_lie_and_give_the_bits_of_numpys():
    settings = Settings(batch=256, devices=2, width=8)
    loader = torch_loader.loader_of(STREAM, settings, workers=0, start="spawn")
    losses, shared, total = torch_loader.train(settings, STREAM, loader)
    assert shared == total == len(losses) * 256 * 16
    trainer = AsyncTrainer(settings, STREAM, make_mesh(2))
    try:
        pairs = trainer.pairs(STREAM.batches(settings.batch, settings.seed, 0))
        assert losses == [float(trainer.step(batch, upcoming)) for batch, upcoming in pairs]
        trainer.flush()
    finally:
        trainer.close()


def test_tables_and_parameters_are_judged_where_they_lie():
    settings = Settings(batch=256, devices=1, width=8, schedule="staleness0")
    trainer = AsyncTrainer(settings, STREAM, make_mesh(1))
    try:
        for batch, upcoming in trainer.pairs(STREAM.batches(settings.batch, settings.seed, 0)):
            trainer.step(batch, upcoming)
        trainer.flush()
        test = STREAM.test
        with torch_ranking.lent(trainer) as (embeddings, params):
            for name, embedding in embeddings.items():
                assert embedding.weight.data_ptr() == trainer.state.tables[name].weights.unsafe_buffer_pointer()
            assert params["users"]["w1"].data_ptr() == trainer.state.params["users"]["w1"].unsafe_buffer_pointer()
            scores, liked = torch_ranking.rank(embeddings, params, test)
        with pytest.raises(RuntimeError, match="has ended"):
            embeddings["users"](torch.tensor([0]))
        # Of one user, JAX's scores differ from torch's by what is the same for all items.
        users, items = np.full(STREAM.item_rows, test.users[0]), np.arange(STREAM.item_rows, dtype=np.int32)
        by_jax = trainer.scores(users, items)
        row = scores[int(np.searchsorted(np.unique(test.users), test.users[0]))].numpy()
        np.testing.assert_allclose(row - row[0], by_jax - by_jax[0], atol=1e-5)
        assert int(liked.sum()) == len(
            {*zip(test.users[test.labels > 0.5], test.items[test.labels > 0.5], strict=True)}
        )
    finally:
        trainer.close()


def test_recall_and_ndcg_of_small_rankings():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    liked = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    recall, ndcg = torch_ranking.recall_and_ndcg(scores, liked, 2)
    assert recall == pytest.approx((1 / 2 + 2 / 2) / 2)
    ideal = 1 + 1 / np.log2(3)
    assert ndcg == pytest.approx((1 / ideal + 1) / 2)
    assert torch_ranking.recall_and_ndcg(scores, liked, 9) == (
        1.0,
        pytest.approx(((1 + 1 / np.log2(5)) / ideal + 1) / 2),
    )


def test_the_loader_runs_as_a_program_with_workers_of_its_own():
    steps, shared = run("torch_loader", "--batch", "512").splitlines()
    assert re.fullmatch(r"4 steps, loss 0\.\d+ to 0\.\d+", steps)
    assert shared == "32,768 of 32,768 bytes of batches were read where torch has put them"


def test_the_ranking_runs_as_a_program():
    before, after = run("torch_ranking", "--k", "5").splitlines()
    assert re.fullmatch(r"before: recall@5 0\.\d{4} NDCG@5 0\.\d{4}", before)
    assert re.fullmatch(r"after:  recall@5 0\.\d{4} NDCG@5 0\.\d{4}", after)
