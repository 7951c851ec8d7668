"""MovieLens ratings: finding them, reading them, splitting them by time.

Four layouts are recognised by their first line:

    ml-100k   u.data        user TAB item TAB rating TAB timestamp
    ml-1m     ratings.dat   user::item::rating::timestamp        (ml-10m too)
    ml-latest ratings.csv   userId,movieId,rating,timestamp      (ml-20m, ml-25m, ml-32m too)
    recbole   NAME.inter    tab separated, typed header: user_id:token, item_id:token, rating:float, ...
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from examples.two_tower.settings import PADDING_ID

POSITIVE_RATING = 4.0
FIELDS = ("user", "item", "rating", "timestamp")
MAX_REPORTED_ROWS = 5

Batch = dict[str, np.ndarray]
"""users and items: int32 [B], PADDING_ID where filled up; labels and weights: float32 [B], weight 0 where filled up."""


class DataError(ValueError):
    """Ratings that are missing or cannot be read; names the file and, for a row, the line."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """Labelled pairs in order of time. users, items: int32 [n]; labels: float32 [n], 0 or 1."""

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: np.ndarray | slice) -> Examples:
        return Examples(self.users[index], self.items[index], self.labels[index])


class Dataset(Protocol):
    """What a training run reads: the size of the tables, a stream of batches, and the examples that come after it."""

    @property
    def name(self) -> str: ...
    @property
    def user_rows(self) -> int: ...
    @property
    def item_rows(self) -> int: ...
    @property
    def train_size(self) -> int: ...
    @property
    def test(self) -> Examples: ...

    def batches(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """One epoch in `ceil(train_size / batch)` batches of exactly `batch` positions."""
        ...


@dataclasses.dataclass(frozen=True)
class Ratings:
    """A ratings file in memory, ids made dense.

    users, items: int32 [n]; ratings: float32 [n]; timestamps: float64 [n], seconds.
    """

    name: str
    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray
    timestamps: np.ndarray
    user_rows: int
    item_rows: int


@dataclasses.dataclass(frozen=True)
class SplitRatings:
    """Ratings cut at one moment: everything before it trains, everything after it tests."""

    name: str
    user_rows: int
    item_rows: int
    train: Examples
    test: Examples

    @property
    def train_size(self) -> int:
        return len(self.train)

    def batches(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        order = np.random.default_rng([seed, epoch]).permutation(len(self.train))
        for start in range(0, len(order), batch):
            yield fill_up(self.train.take(order[start : start + batch]), batch)


def fill_up(examples: Examples, batch: int) -> Batch:
    """`examples` as a batch of exactly `batch` positions; the filling has PADDING_ID and weight 0."""
    missing = batch - len(examples)
    return {
        "users": np.pad(examples.users, (0, missing), constant_values=PADDING_ID),
        "items": np.pad(examples.items, (0, missing), constant_values=PADDING_ID),
        "labels": np.pad(examples.labels, (0, missing)),
        "weights": np.pad(np.ones(len(examples), np.float32), (0, missing)),
    }


def split_by_time(ratings: Ratings, test_fraction: float) -> SplitRatings:
    """Cuts at the timestamp before which `1 - test_fraction` of the ratings lie.

    Ratings of one instant never stand on both sides. Within one instant the order of the file is kept.
    """
    order = np.argsort(ratings.timestamps, kind="stable")
    times = ratings.timestamps[order]
    cut = round(len(order) * (1.0 - test_fraction))
    if 0 < cut < len(order):
        cut = int(np.searchsorted(times, times[cut], side="left"))
    if not 0 < cut < len(order):
        raise DataError(
            f"{ratings.name}: {len(order)} ratings between timestamps {times[0] if len(times) else 'none'} and "
            f"{times[-1] if len(times) else 'none'} cannot be split by time into training and test data"
        )
    labels = (ratings.ratings >= POSITIVE_RATING).astype(np.float32)
    examples = Examples(ratings.users, ratings.items, labels).take(order)
    train, test = examples.take(slice(None, cut)), examples.take(slice(cut, None))
    return SplitRatings(ratings.name, ratings.user_rows, ratings.item_rows, train, test)


def find_ratings(data: Path | None) -> Path:
    """The ratings file behind `--data`: a file as it is, a folder's ratings file, or without either the installed
    MovieLens-100K of the `recbole` package, which is looked up but not imported."""
    if data is None:
        spec = importlib.util.find_spec("recbole")
        for place in (spec.submodule_search_locations or []) if spec else []:
            candidate = Path(place, "dataset_example", "ml-100k", "ml-100k.inter")
            if candidate.is_file():
                return candidate
        raise DataError(
            "MovieLens-100K is not installed: run `pip install --no-deps recbole==1.2.1` (only its data files are "
            "read), or give --data a MovieLens folder, or --synthetic a number of examples"
        )
    if data.is_dir():
        inter = sorted(data.glob("*.inter"))
        for candidate in (data / "u.data", data / "ratings.dat", data / "ratings.csv", *inter[:1]):
            if candidate.is_file():
                return candidate
        raise DataError(
            f"{data}: no u.data, ratings.dat, ratings.csv or *.inter in this folder; give the ratings file itself"
        )
    if not data.is_file():
        raise DataError(f"{data}: no such file or folder")
    if data.suffix in (".zip", ".gz", ".tar"):
        raise DataError(f"{data}: is an archive; unpack it and give the folder")
    return data


def read_ratings(path: Path) -> Ratings:
    """Reads a ratings file of any of the four layouts, ids numbered in order of first appearance.

    Only two dictionaries of ids and four numeric columns are held, never the text. Raises DataError with the file, the
    line number and the text of the first rows that do not parse.
    """
    user_ids: dict[str, int] = {}
    item_ids: dict[str, int] = {}
    users, items, ratings, timestamps = array("i"), array("i"), array("f"), array("d")
    problems: list[str] = []
    # A byte that is no UTF-8 is replaced: it then fails as a number, with its line, instead of ending the read.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        separator, columns, first_row = _layout(path, file.readline())
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if number < first_row or not line.strip():
                continue
            try:
                user, item, rating, timestamp = _parse(line, separator, columns)
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}: {line.strip()[:80]!r}")
                if len(problems) == MAX_REPORTED_ROWS:
                    break
                continue
            users.append(user_ids.setdefault(user, len(user_ids)))
            items.append(item_ids.setdefault(item, len(item_ids)))
            ratings.append(rating)
            timestamps.append(timestamp)
    if problems:
        raise DataError("\n".join(problems))
    if not users:
        raise DataError(f"{path}: holds no ratings")
    return Ratings(
        name=_dataset_name(path),
        users=np.asarray(users, np.int32),
        items=np.asarray(items, np.int32),
        ratings=np.asarray(ratings, np.float32),
        timestamps=np.asarray(timestamps, np.float64),
        user_rows=len(user_ids),
        item_rows=len(item_ids),
    )


def _dataset_name(path: Path) -> str:
    """ml-1m for ml-1m/ratings.dat, ml-100k for ml-100k.inter."""
    return path.resolve().parent.name if path.stem in ("ratings", "u") else path.stem


def _layout(path: Path, first_line: str) -> tuple[str, Mapping[str, int], int]:
    """Separator, position of each field, and the number of the first line that holds a rating."""
    line = first_line.strip()
    separator = next((mark for mark in ("\t", "::", ",") if mark in line), None)
    if separator is None:
        raise DataError(
            f"{path}:1: no tab, '::' or comma between fields, so this is no MovieLens ratings file: {line[:80]!r}"
        )
    names = [name.strip().split(":")[0].lower() for name in line.split(separator)]
    aliases = {
        "user": ("user_id", "userid"),
        "item": ("item_id", "movieid"),
        "rating": ("rating",),
        "timestamp": ("timestamp",),
    }
    known = {alias for field in aliases.values() for alias in field}
    if not known.intersection(names):
        return separator, {field: position for position, field in enumerate(FIELDS)}, 1
    columns: dict[str, int] = {}
    for field in FIELDS:
        position = next((names.index(alias) for alias in aliases[field] if alias in names), None)
        if position is None:
            raise DataError(f"{path}:1: the header has no column {aliases[field][0]}: {line[:80]!r}")
        columns[field] = position
    return separator, columns, 2


def _parse(line: str, separator: str, columns: Mapping[str, int]) -> tuple[str, str, float, float]:
    values = line.rstrip("\r\n").split(separator)
    if len(values) <= max(columns.values()):
        raise ValueError(f"{len(values)} fields where {max(columns.values()) + 1} are needed")
    user, item = values[columns["user"]].strip(), values[columns["item"]].strip()
    if not user or not item:
        raise ValueError("the user or the item is empty")
    return user, item, _number(values, columns, "rating"), _number(values, columns, "timestamp")


def _number(values: list[str], columns: Mapping[str, int], field: str) -> float:
    try:
        number = float(values[columns[field]])
    except ValueError:
        raise ValueError(f"{field} {values[columns[field]].strip()!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{field} {number} is not finite")
    return number
