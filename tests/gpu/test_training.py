"""The two-tower example on a GPU learns what it learns on CPUs.

XLA's matrix products add in other orders on a GPU, so the two are close, not equal: by AUC on examples that training
has not seen.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from examples.two_tower.async_tables import AsyncTrainer
from examples.two_tower.metrics import auc
from examples.two_tower.settings import PADDING_ID, Schedule, Settings
from examples.two_tower.synthetic import SyntheticStream

EXAMPLES, BATCH = 300_000, 1024  # 264 steps
TEST = 8192


def mesh_of(platform: str, count: int) -> Mesh:
    return Mesh(np.array(jax.devices(platform)[:count]), ("table",), axis_types=(AxisType.Auto,))


def trained_auc(schedule: Schedule, mesh: Mesh, *, examples: int = EXAMPLES) -> float:
    """Test AUC after one pass over a generated stream. Downloads nothing."""
    settings = Settings(schedule=schedule, batch=BATCH, devices=int(mesh.devices.size), table_learning_rate=0.05)
    dataset = SyntheticStream(examples, seed=0, test_fraction=settings.test_fraction)
    trainer = AsyncTrainer(settings, dataset, mesh)
    try:
        losses: list[Any] = [
            trainer.step(batch, upcoming) for batch, upcoming in trainer.pairs(dataset.batches(BATCH, 0, 0))
        ]
        trainer.flush()
        assert np.isfinite(np.asarray(jax.device_get(losses))).all()
        test = dataset.test.take(slice(0, TEST))
        missing = (0, TEST - len(test))
        users, items = (np.pad(ids, missing, constant_values=PADDING_ID) for ids in (test.users, test.items))
        return auc(test.labels, trainer.scores(users, items)[: len(test)])
    finally:
        trainer.close()


@pytest.mark.parametrize("schedule", ["staleness1", "staleness0"])
def test_a_gpu_learns_what_cpus_learn(schedule):
    on_gpu = trained_auc(schedule, mesh_of("cuda", 1))
    on_cpus = trained_auc(schedule, mesh_of("cpu", 4))
    assert on_cpus > 0.8, "the stream can be learned"
    assert abs(on_gpu - on_cpus) < 0.005
