"""A generated stream of clicks of any length, whose popularity follows Zipf's law and whose taste can be learned.

Each user and each item has a hidden vector; a pair is liked with probability sigmoid(4 * <user, item> / sqrt(RANK)).
Popularity of rank r goes with r^-1.05 for items and r^-0.7 for users. The stream is made chunk by chunk, each
chunk from its own seed, so that memory holds one chunk and the hidden vectors, however long the stream is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from examples.two_tower.data import Batch, DataError, Examples, fill_up

RANK = 4
CHUNK = 1 << 16
MAX_USERS, MAX_ITEMS = 1_000_000, 100_000
MAX_TEST = 200_000


class SyntheticStream:
    """`examples` clicks, the last `test_fraction` of them (at most 200,000) for the test.

    There is one user for 100 examples, at most a million, and one item for 400, at most a hundred thousand.
    """

    def __init__(self, examples: int, seed: int, test_fraction: float) -> None:
        if examples < 1000:
            raise DataError(f"--synthetic {examples}: at least 1000 examples are needed for a training and a test part")
        self.name = f"synthetic-{examples}"
        self.user_rows = min(MAX_USERS, max(50, examples // 100))
        self.item_rows = min(MAX_ITEMS, max(50, examples // 400))
        test_size = min(MAX_TEST, max(1, round(examples * test_fraction)))
        self.train_size = examples - test_size
        self._seed = seed
        rng = np.random.default_rng([seed, 0])
        self._user_taste = rng.standard_normal((self.user_rows, RANK), np.float32)
        self._item_taste = rng.standard_normal((self.item_rows, RANK), np.float32)
        self._user_of_rank = rng.permutation(self.user_rows).astype(np.int32)
        self._item_of_rank = rng.permutation(self.item_rows).astype(np.int32)
        self._user_share = _cumulative_zipf(self.user_rows, 0.7)
        self._item_share = _cumulative_zipf(self.item_rows, 1.05)
        self._test_size = test_size

    @functools.cached_property
    def test(self) -> Examples:
        chunks = list(self._chunks(self.train_size, self.train_size + self._test_size))
        return Examples(*(np.concatenate([getattr(c, f) for c in chunks]) for f in ("users", "items", "labels")))

    def batches(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """In the order of the stream, in every epoch: shuffling a stream of independent draws would change nothing."""
        rest: list[Examples] = []
        held = 0
        for chunk in self._chunks(0, self.train_size):
            start = 0
            while start < len(chunk):
                piece = chunk.take(slice(start, start + batch - held))
                start, held = start + len(piece), held + len(piece)
                rest.append(piece)
                if held == batch:
                    yield fill_up(_concatenate(rest), batch)
                    rest, held = [], 0
        if rest:
            yield fill_up(_concatenate(rest), batch)

    def _chunks(self, begin: int, end: int) -> Iterator[Examples]:
        for number in range(begin // CHUNK, -(-end // CHUNK)):
            first = number * CHUNK
            yield self._chunk(number).take(slice(max(begin - first, 0), min(end - first, CHUNK)))

    def _chunk(self, number: int) -> Examples:
        rng = np.random.default_rng([self._seed, 1, number])
        users = self._user_of_rank[np.searchsorted(self._user_share, rng.random(CHUNK))]
        items = self._item_of_rank[np.searchsorted(self._item_share, rng.random(CHUNK))]
        score = np.einsum("nr,nr->n", self._user_taste[users], self._item_taste[items]) * (4.0 / np.sqrt(RANK))
        labels = rng.random(CHUNK) < 1.0 / (1.0 + np.exp(-score))
        return Examples(users, items, labels.astype(np.float32))


def _concatenate(pieces: list[Examples]) -> Examples:
    if len(pieces) == 1:
        return pieces[0]
    return Examples(*(np.concatenate([getattr(piece, f) for piece in pieces]) for f in ("users", "items", "labels")))


def _cumulative_zipf(count: int, exponent: float) -> np.ndarray:
    share = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    share /= share[-1]
    return share
