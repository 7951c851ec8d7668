"""The training loop, the same for every schedule."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import jax
import numpy as np

from examples.two_tower.data import Batch, Dataset, Examples
from examples.two_tower.metrics import auc
from examples.two_tower.report import Row, RunFolder
from examples.two_tower.settings import PADDING_ID, Settings

# The loss is read this many steps late: then it is ready, and reading it does not make the host wait for the devices.
READ_LATE = 2
# Steps that compile are left out of the speed.
WARM_UP = 3
EVALUATION_BATCH = 8192
MAX_ROWS = 5000


class Trainer(Protocol):
    """What the loop needs from an implementation: plain JAX or asynchronous tables."""

    def pairs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]: ...
    def step(self, batch: Batch, upcoming: Batch | None) -> jax.Array: ...
    def flush(self) -> None: ...
    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray: ...
    def exposed_seconds(self) -> float | None: ...
    def close(self) -> None: ...


class Watcher(Protocol):
    """Is told about progress: the step that was dispatched, of how many, and the latest loss and AUC known."""

    def __call__(self, step: int, total: int, loss: float | None, test_auc: float | None) -> None: ...


class Stopped(Exception):
    """The run was asked to stop; what it had measured is on disk."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Times in seconds. `seconds` is training without evaluation; speed leaves the first, compiling steps out too."""

    test_auc: float
    examples_per_second: float
    seconds: float
    exposed_seconds: float | None
    steps: int


def make_mesh(devices: int) -> jax.sharding.Mesh:
    """A mesh of `devices` devices with one axis, "table", over which both tables and batches are split."""
    if len(jax.devices()) < devices:
        raise RuntimeError(
            f"{devices} devices are asked for, JAX sees {len(jax.devices())}: "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={devices} before jax is imported"
        )
    axis_types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("table",), axis_types=axis_types, devices=jax.devices()[:devices])


def make_trainer(settings: Settings, dataset: Dataset) -> Trainer:
    mesh = make_mesh(settings.devices)
    if settings.schedule == "plain":
        from examples.two_tower.plain_jax import PlainTrainer

        return PlainTrainer(settings, dataset, mesh)
    from examples.two_tower.async_tables import AsyncTrainer

    return AsyncTrainer(settings, dataset, mesh)


def describe(
    settings: Settings, dataset: Dataset, name: str, source: Mapping[str, str | int]
) -> dict[str, dict[str, str | int | float | bool | None]]:
    """The sections of `config.toml`. `source` is where the data came from."""
    return {
        "run": {
            "name": name,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "optax": importlib.metadata.version("optax"),
        },
        "data": {
            "name": dataset.name,
            "user_rows": dataset.user_rows,
            "item_rows": dataset.item_rows,
            "train_examples": dataset.train_size,
            "test_examples": len(dataset.test),
            **source,
        },
        "settings": dataclasses.asdict(settings),
    }


def train(
    settings: Settings, dataset: Dataset, folder: RunFolder, watch: Watcher, stop: threading.Event | None = None
) -> Result:
    """Trains for `settings.epochs`, evaluates after each, and writes the metrics as it goes.

    Raises Stopped soon after `stop` is set: within one step.
    """
    trainer = make_trainer(settings, dataset)
    try:
        return _Loop(settings, dataset, folder, watch, stop or threading.Event(), trainer).run()
    finally:
        trainer.close()
        folder.close()


@dataclasses.dataclass
class _Loop:
    settings: Settings
    dataset: Dataset
    folder: RunFolder
    watch: Watcher
    stop: threading.Event
    trainer: Trainer

    def __post_init__(self) -> None:
        self.steps_per_epoch = math.ceil(self.dataset.train_size / self.settings.batch)
        self.total = self.settings.epochs * self.steps_per_epoch
        self.log_every = math.ceil(self.total / MAX_ROWS)
        self.unread: collections.deque[tuple[Row, jax.Array]] = collections.deque()
        self.clock = _Clock()
        self.loss: float | None = None
        self.auc: float | None = None

    def run(self) -> Result:
        examples, warm_examples, warm_seconds = 0, 0, 0.0
        with self.clock:
            for step, (batch, upcoming) in enumerate(self.trainer.pairs(self._batches()), start=1):
                self._check()
                loss = self.trainer.step(batch, upcoming)
                examples += int(batch["weights"].sum())
                if step == WARM_UP:
                    loss.block_until_ready()
                    warm_examples, warm_seconds = examples, self.clock.seconds()
                ends_epoch = step % self.steps_per_epoch == 0
                if ends_epoch or step % self.log_every == 0:
                    epoch = (step - 1) // self.steps_per_epoch + 1
                    self.unread.append((Row(step, epoch, examples, self.clock.seconds(), math.nan), loss))
                if step == self.total:
                    self.trainer.flush()
                if ends_epoch:
                    self._end_epoch()
                else:
                    self._write_rows(until=step - READ_LATE)
                self.watch(step, self.total, self.loss, self.auc)
        seconds = self.clock.seconds()
        timed = (examples - warm_examples, seconds - warm_seconds) if self.total > WARM_UP else (examples, seconds)
        assert self.auc is not None
        return Result(self.auc, timed[0] / timed[1], seconds, self.trainer.exposed_seconds(), self.total)

    def _batches(self) -> Iterator[Batch]:
        for epoch in range(self.settings.epochs):
            yield from self.dataset.batches(self.settings.batch, self.settings.seed, epoch)

    def _write_rows(self, until: int) -> None:
        while self.unread and self.unread[0][0].step <= until:
            row, loss = self.unread.popleft()
            self._write(row, loss)

    def _write(self, row: Row, loss: jax.Array, test_auc: float | None = None) -> None:
        self.loss = float(loss)
        exposed = self.trainer.exposed_seconds()
        self.folder.write(dataclasses.replace(row, loss=self.loss, test_auc=test_auc, exposed_seconds=exposed))

    def _end_epoch(self) -> None:
        last, loss = self.unread.pop()
        self._write_rows(until=last.step)
        loss.block_until_ready()
        with self.clock.paused():
            self.auc = self._evaluate(self.dataset.test)
        self._write(last, loss, self.auc)

    def _evaluate(self, test: Examples) -> float:
        scores = []
        for start in range(0, len(test), EVALUATION_BATCH):
            self._check()
            part = test.take(slice(start, start + EVALUATION_BATCH))
            # Always the same size, so that one compiled function serves all parts.
            missing = (0, EVALUATION_BATCH - len(part))
            users = np.pad(part.users, missing, constant_values=PADDING_ID)
            items = np.pad(part.items, missing, constant_values=PADDING_ID)
            scores.append(self.trainer.scores(users, items)[: len(part)])
        return auc(test.labels, np.concatenate(scores))

    def _check(self) -> None:
        if self.stop.is_set():
            raise Stopped


class _Clock:
    """Adds up the seconds in which it runs."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def __enter__(self) -> _Clock:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._total, self._since = self.seconds(), None

    def paused(self) -> _Pause:
        return _Pause(self)

    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.perf_counter() - self._since)


@dataclasses.dataclass
class _Pause:
    clock: _Clock

    def __enter__(self) -> None:
        self.clock.__exit__()

    def __exit__(self, *_: object) -> None:
        self.clock.__enter__()
