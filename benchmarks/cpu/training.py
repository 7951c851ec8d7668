"""An epoch of the two-tower example on MovieLens-100K, beside the same model in plain JAX with dense gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.timing import alternately
from examples.two_tower.data import Dataset, find_ratings, read_ratings, split_by_time
from examples.two_tower.settings import Schedule, Settings
from examples.two_tower.train import make_trainer

from .row import Options, Row, faster

# After the first epoch the two have seen the same batches; ours with each update one step late.
LOSSES_AGREE = 0.02


def rows(options: Options) -> Iterator[Row]:
    data = split_by_time(read_ratings(find_ratings(None)), Settings.test_fraction)
    ours, theirs = Trained(data, "staleness1"), Trained(data, "plain")
    first, other = ours.epoch(), theirs.epoch()
    assert abs(first - other) < LOSSES_AGREE * other, f"the losses of the first epoch are {first} and {other}"
    times = alternately({"ours": ours.epoch, "theirs": theirs.epoch}, 1 if options.quick else 50, warm_up=0)
    ours.close()
    theirs.close()
    settings = ours.settings
    yield Row(
        "MovieLens epoch, staleness 1, 4 devices",
        f"{data.name}, {data.train_size:,} examples, batch {settings.batch:,}, width {settings.width} fp32",
        "the same model in plain JAX, dense gradients",
        times["ours"],
        times["theirs"],
        f"losses of the first epoch, {first:.4f} and {other:.4f}",
        faster(3.0),
        note=f"{data.user_rows:,} users and {data.item_rows:,} items: tables so small that dense gradients cost little",
    )


class Trained:
    """A trainer of the example, an epoch at a time."""

    def __init__(self, data: Dataset, schedule: Schedule) -> None:
        self.settings = dataclasses.replace(Settings(), schedule=schedule)
        self._data = data
        self._trainer = make_trainer(self.settings, data)
        self._epochs = 0

    def epoch(self) -> float:
        """Trains one; the mean of its losses, when everything has been applied."""
        batches = self._data.batches(self.settings.batch, self.settings.seed, self._epochs)
        losses = [self._trainer.step(batch, upcoming) for batch, upcoming in self._trainer.pairs(batches)]
        self._trainer.flush()
        self._epochs += 1
        return float(np.mean(jax.device_get(losses)))

    def close(self) -> None:
        self._trainer.close()
