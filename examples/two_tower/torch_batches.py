"""The generated stream as a dataset of torch's. Imports no JAX: the workers of a `DataLoader` need none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, get_worker_info

from examples.two_tower.settings import Settings
from examples.two_tower.synthetic import SyntheticStream


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """One epoch of batches: users and items int32 [B], labels and weights float32 [B]. Workers take turns."""

    def __init__(self, stream: SyntheticStream, settings: Settings) -> None:
        self._stream = stream
        self._settings = settings

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number, batch in enumerate(self._stream.batches(self._settings.batch, self._settings.seed, 0)):
            if number % step == first:
                # torch's own memory, at multiples of 64 bytes; NumPy's begins anywhere.
                yield {name: torch.from_numpy(array).clone() for name, array in batch.items()}
