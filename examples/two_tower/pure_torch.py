"""The two-tower model in torch alone, on the same native tables: no JAX is imported.

    python -m examples.two_tower.pure_torch --synthetic 100000 --epochs 2
    torchrun --nproc-per-node 2 -m examples.two_tower.pure_torch --synthetic 100000

In one process the tables are whole; under torchrun each process holds a part of their columns and of every batch, and
DistributedDataParallel keeps the towers alike. It writes what the JAX example writes: metrics.csv and config.toml.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from examples.two_tower.data import Batch, Dataset, find_ratings, read_ratings, split_by_time
from examples.two_tower.metrics import auc
from examples.two_tower.report import NoFolder, Row, RunFolder
from examples.two_tower.settings import PADDING_ID, Settings
from examples.two_tower.synthetic import SyntheticStream
from torch_ext import AsyncEmbedding, RowwiseAdagrad, with_next

EVALUATION_BATCH = 8192


class Tower(torch.nn.Module):
    """Two layers over the rows of a table, and a bias that is linear in them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(settings.width, settings.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(settings.hidden, settings.output),
        )
        self.bias = torch.nn.Linear(settings.width, 1)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rows.float()
        return self.layers(rows), self.bias(rows)[:, 0]


class TwoTowers(torch.nn.Module):
    """The dense part: the score of each pair, float32 [B], from the rows of its user and of its item."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.users, self.items = Tower(settings), Tower(settings)

    def forward(self, user_rows: torch.Tensor, item_rows: torch.Tensor) -> torch.Tensor:
        (user, user_bias), (item, item_bias) = self.users(user_rows), self.items(item_rows)
        return (user * item).sum(1) + user_bias + item_bias


class Trainer:
    """The tables, the towers, and a step over both."""

    def __init__(self, settings: Settings, dataset: Dataset) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

        def table(name: str, rows: int, seed: int) -> AsyncEmbedding:
            return AsyncEmbedding(
                rows,
                settings.width,
                name=name,
                optimizer=RowwiseAdagrad(
                    learning_rate=settings.table_learning_rate,
                    half_life=settings.table_half_life,
                    eps=settings.table_eps,
                ),
                staleness=1 if settings.schedule == "staleness1" else 0,
                dtype=getattr(torch, settings.dtype),
                init=lambda generator, shape: settings.table_init_scale * torch.randn(shape, generator=generator),
                seed=seed,
                padding_id=PADDING_ID,
                gradient_scale=1 / self.ranks,  # the towers learn from the mean over ranks
            )

        self.tables = {
            "users": table("users", dataset.user_rows, 2 * settings.seed),
            "items": table("items", dataset.item_rows, 2 * settings.seed + 1),
        }
        torch.manual_seed(settings.seed)
        self.towers: Any = TwoTowers(settings)
        if self.ranks > 1:
            self.towers = torch.nn.parallel.DistributedDataParallel(self.towers)
        self.dense = torch.optim.Adam(self.towers.parameters(), lr=settings.dense_learning_rate)

    def step(self, batch: Batch, upcoming: Batch | None) -> float:
        """Trains on one batch, of which this rank takes its part. The mean logistic loss over that part."""
        mine = self._part(batch)
        rows = {name: table(mine[name]) for name, table in self.tables.items()}
        score = self.towers(rows["users"], rows["items"])
        losses = torch.nn.functional.softplus(score) - mine["labels"] * score
        # Over the real examples of the whole batch, so that ranks whose part is filling weigh nothing.
        loss = (losses * mine["weights"]).sum() * (self.ranks / max(float(batch["weights"].sum()), 1.0))
        for name, table in self.tables.items():
            if table.staleness == 1 and upcoming is not None:
                table.prefetch(self._part(upcoming)[name])
        self.dense.zero_grad()
        loss.backward()
        finite = bool(torch.isfinite(loss))
        for table in self.tables.values():
            table.step(apply=finite)
        self.dense.step()
        return float(loss.detach())

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Scores of pairs, float32 [n], on every rank; works in the middle of training."""
        self.towers.eval()
        with torch.no_grad():
            # The towers themselves: the copies of all ranks are alike.
            towers = self.towers.module if self.ranks > 1 else self.towers
            return towers(self.tables["users"](users), self.tables["items"](items)).numpy()

    def flush(self) -> None:
        for table in self.tables.values():
            table.flush()
        self.towers.train()

    def exposed_seconds(self) -> float:
        return sum(table.stats().get("exposed_wait_seconds", 0.0) for table in self.tables.values())

    def close(self) -> None:
        for table in self.tables.values():
            table.close()

    def _part(self, batch: Batch) -> dict[str, torch.Tensor]:
        share = len(batch["labels"]) // self.ranks
        mine = slice(self.rank * share, (self.rank + 1) * share)
        return {name: torch.from_numpy(values[mine]) for name, values in batch.items()}


def train(settings: Settings, dataset: Dataset, folder: RunFolder) -> float:
    """Trains for ``settings.epochs``, writes a row after each, and gives the AUC of the test part."""
    trainer = Trainer(settings, dataset)
    seconds, steps, examples, test_auc = 0.0, 0, 0, float("nan")
    try:
        for epoch in range(settings.epochs):
            begin = time.perf_counter()
            loss = float("nan")
            for batch, upcoming in with_next(dataset.batches(settings.batch, settings.seed, epoch)):
                loss = trainer.step(batch, upcoming)
                steps, examples = steps + 1, examples + int(batch["weights"].sum())
            trainer.flush()
            seconds += time.perf_counter() - begin
            test_auc = _evaluate(trainer, dataset)
            folder.write(Row(steps, epoch + 1, examples, seconds, loss, test_auc, trainer.exposed_seconds()))
        return test_auc
    finally:
        trainer.close()
        folder.close()


def _evaluate(trainer: Trainer, dataset: Dataset) -> float:
    scores = []
    for table in trainer.tables.values():
        table.eval()
    for start in range(0, len(dataset.test), EVALUATION_BATCH):
        part = dataset.test.take(slice(start, start + EVALUATION_BATCH))
        scores.append(trainer.scores(part.users, part.items))
    for table in trainer.tables.values():
        table.train()
    trainer.towers.train()
    return auc(dataset.test.labels, np.concatenate(scores))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.two_tower.pure_torch", description=__doc__.splitlines()[0])
    parser.add_argument("--synthetic", type=int, help="instead of ratings, generate this many examples")
    parser.add_argument("--data", type=Path, help="a MovieLens folder or ratings file; else MovieLens-100K of recbole")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=1)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--batch", type=int, default=Settings.batch, help="examples in a step, over all processes")
    parser.add_argument("--width", type=int, default=Settings.width)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--dtype", default=Settings.dtype)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--name", help="folder of this run inside --out")
    given = parser.parse_args(arguments)

    processes = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    if processes > 1:
        dist.init_process_group("gloo")
    settings = Settings(
        schedule="staleness1" if given.staleness else "staleness0",
        epochs=given.epochs,
        batch=given.batch,
        width=given.width,
        seed=given.seed,
        devices=processes,
        dtype=given.dtype,
    )
    dataset: Dataset
    if given.synthetic is not None:
        dataset = SyntheticStream(given.synthetic, given.seed, settings.test_fraction)
    else:
        dataset = split_by_time(read_ratings(find_ratings(given.data)), settings.test_fraction)
    writes = processes == 1 or dist.get_rank() == 0
    name = given.name or f"{dataset.name}-torch-{settings.schedule}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = {"run": {"name": name, "torch": torch.__version__}, "settings": dataclasses.asdict(settings)}
    folder = (RunFolder if writes else NoFolder)(given.out, name, config)
    test_auc = train(settings, dataset, folder)
    if writes:
        print(f"test AUC {test_auc:.4f}, files in {folder.path}")
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
