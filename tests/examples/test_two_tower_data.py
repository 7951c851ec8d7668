"""Reading ratings in every layout, splitting them by time, and the generated stream."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from examples.two_tower.data import DataError, Ratings, fill_up, find_ratings, read_ratings, split_by_time
from examples.two_tower.settings import PADDING_ID
from examples.two_tower.synthetic import CHUNK, SyntheticStream

LAYOUTS = {
    "u.data": "196\t242\t3\t881250949\n186\t302\t4\t891717742\n196\t302\t5\t878887116\n",
    "ratings.dat": "196::242::3::881250949\n186::302::4::891717742\n196::302::5::878887116\n",
    "ratings.csv": (
        "userId,movieId,rating,timestamp\n196,242,3.0,881250949\n186,302,4.0,891717742\n196,302,5.0,878887116\n"
    ),
    "small.inter": (
        "item_id:token\tuser_id:token\trating:float\ttimestamp:float\n"
        "242\t196\t3\t881250949\n302\t186\t4\t891717742\n302\t196\t5\t878887116\n"
    ),
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_reads_as_the_same_ratings(tmp_path, name):
    ratings = read_ratings(write(tmp_path, name, LAYOUTS[name]))
    np.testing.assert_array_equal(ratings.users, np.array([0, 1, 0], np.int32))
    np.testing.assert_array_equal(ratings.items, np.array([0, 1, 1], np.int32))
    np.testing.assert_array_equal(ratings.ratings, np.array([3, 4, 5], np.float32))
    np.testing.assert_array_equal(ratings.timestamps, np.array([881250949, 891717742, 878887116], np.float64))
    assert (ratings.user_rows, ratings.item_rows) == (2, 2)
    assert ratings.users.dtype == ratings.items.dtype == np.int32


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_stands_for_the_ratings_file_in_it(tmp_path, name):
    path = write(tmp_path, name, LAYOUTS[name])
    write(tmp_path, "README", "not ratings")
    assert find_ratings(tmp_path) == path


def test_byte_order_mark_windows_line_ends_and_blank_lines_are_no_rows(tmp_path):
    text = "\ufeff" + LAYOUTS["u.data"].replace("\n", "\r\n") + "\r\n"
    ratings = read_ratings(write(tmp_path, "u.data", text))
    assert len(ratings.users) == 3
    assert ratings.user_rows == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("186\t302\t4", "3 fields where 4 are needed"),
        ("186\t302\tfour\t891717742", "rating 'four' is not a number"),
        ("186\t302\t4\tyesterday", "timestamp 'yesterday' is not a number"),
        ("186\t302\tnan\t891717742", "rating nan is not finite"),
        ("\t302\t4\t891717742", "the user or the item is empty"),
    ],
)
def test_a_row_that_does_not_parse_is_reported_with_file_and_line(tmp_path, row, reason):
    path = write(tmp_path, "u.data", f"196\t242\t3\t881250949\n{row}\n196\t302\t5\t878887116\n")
    with pytest.raises(DataError) as caught:
        read_ratings(path)
    assert str(caught.value) == f"{path}:2: {reason}: {row.strip()!r}"


def test_line_numbers_count_the_header(tmp_path):
    path = write(tmp_path, "ratings.csv", "userId,movieId,rating,timestamp\n1,2,3,4\n1,2,x,4\n")
    with pytest.raises(DataError, match=r"ratings\.csv:3: rating 'x'"):
        read_ratings(path)


def test_reading_stops_at_the_fifth_row_that_does_not_parse(tmp_path):
    with pytest.raises(DataError) as caught:
        read_ratings(write(tmp_path, "u.data", "a\tb\n" * 100))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "2", "3", "4", "5"]


def test_a_header_without_a_needed_column_is_reported(tmp_path):
    path = write(tmp_path, "x.inter", "user_id:token\titem_id:token\trating:float\n1\t2\t3\n")
    with pytest.raises(DataError, match=r"x\.inter:1: the header has no column timestamp"):
        read_ratings(path)


def test_what_is_no_ratings_file_is_refused_with_advice(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        find_ratings(tmp_path / "absent")
    with pytest.raises(DataError, match="give the ratings file itself"):
        find_ratings(tmp_path)
    with pytest.raises(DataError, match="unpack it"):
        find_ratings(write(tmp_path, "ml-1m.zip", "PK"))
    with pytest.raises(DataError, match=r"poem\.txt:1: no tab"):
        read_ratings(write(tmp_path, "poem.txt", "roses are red\n"))
    with pytest.raises(DataError, match=r"empty\.csv:1"):
        read_ratings(write(tmp_path, "empty.csv", ""))
    with pytest.raises(DataError, match="holds no ratings"):
        read_ratings(write(tmp_path, "ratings.csv", "userId,movieId,rating,timestamp\n"))


def ratings_at(timestamps, values=None) -> Ratings:
    count = len(timestamps)
    index = np.arange(count, dtype=np.int32)
    values = np.full(count, 4.0, np.float32) if values is None else np.asarray(values, np.float32)
    return Ratings("made", index, index, values, np.asarray(timestamps, np.float64), count, count)


def test_the_split_trains_on_the_past_and_tests_on_the_future():
    times = np.random.default_rng(0).permutation(100)
    split = split_by_time(ratings_at(times), 0.2)
    assert len(split.train) == 80
    assert times[split.train.users].max() < times[split.test.users].min()
    assert sorted([*split.train.users, *split.test.users]) == list(range(100))


def test_ratings_of_one_instant_stay_on_one_side():
    times = [0, 1, 2, 3, 4, 4, 4, 4, 4, 5]
    split = split_by_time(ratings_at(times), 0.2)
    assert len(split.train) == 4
    assert len(split.test) == 6


def test_ratings_without_a_past_and_a_future_are_refused():
    with pytest.raises(DataError, match="cannot be split by time"):
        split_by_time(ratings_at([7] * 50), 0.2)


def test_a_rating_of_four_and_above_is_positive():
    split = split_by_time(ratings_at([0, 1, 2, 3, 4], [3.5, 4.0, 5.0, 1.0, 4.5]), 0.2)
    np.testing.assert_array_equal(split.train.labels, [0, 1, 1, 0])
    np.testing.assert_array_equal(split.test.labels, [1])


def test_an_epoch_shows_each_example_once_and_fills_the_last_batch_up():
    split = split_by_time(ratings_at(range(100)), 0.1)
    batches = list(split.batches(32, seed=0, epoch=0))
    assert [len(batch["users"]) for batch in batches] == [32, 32, 32]
    users = np.concatenate([batch["users"] for batch in batches])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert sorted(users[weights == 1]) == list(range(90))
    assert set(users[weights == 0]) == {PADDING_ID}
    assert weights.sum() == 90


def test_the_order_depends_on_seed_and_epoch_alone():
    split = split_by_time(ratings_at(range(100)), 0.1)

    def order(seed, epoch):
        return [*next(split.batches(64, seed, epoch))["users"]]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_filling_up_keeps_dtypes():
    split = split_by_time(ratings_at(range(10)), 0.1)
    dtypes = {name: values.dtype for name, values in fill_up(split.train, 16).items()}
    assert dtypes == {"users": np.int32, "items": np.int32, "labels": np.float32, "weights": np.float32}


def test_the_generated_stream_has_the_size_asked_for_and_repeats_itself():
    size = CHUNK + 20_000
    stream, again = SyntheticStream(size, 3, 0.1), SyntheticStream(size, 3, 0.1)
    batches = list(stream.batches(4096, seed=0, epoch=0))
    assert stream.train_size + len(stream.test) == size
    assert len(batches) == -(-stream.train_size // 4096)
    assert sum(batch["weights"].sum() for batch in batches) == stream.train_size
    assert {len(batch["users"]) for batch in batches} == {4096}
    for batch, other in zip(batches, again.batches(4096, seed=9, epoch=1), strict=True):
        np.testing.assert_array_equal(batch["users"], other["users"])
    np.testing.assert_array_equal(stream.test.labels, again.test.labels)


def test_the_generated_stream_does_not_depend_on_the_batch():
    stream = SyntheticStream(CHUNK + 5_000, 0, 0.1)

    def items(batch):
        return np.concatenate([b["items"][b["weights"] == 1] for b in stream.batches(batch, 0, 0)])

    np.testing.assert_array_equal(items(1000), items(4096))


def test_generated_popularity_follows_zipf_and_labels_follow_taste():
    stream = SyntheticStream(60_000, 0, 0.2)
    train = next(stream.batches(48_000, 0, 0))
    counts = np.sort(np.bincount(train["items"], minlength=stream.item_rows))[::-1]
    assert counts[0] > 10 * counts[len(counts) // 2]
    taste = np.sum(stream._user_taste[train["users"]] * stream._item_taste[train["items"]], axis=1)
    assert train["labels"][taste > 0.5].mean() > 0.7
    assert train["labels"][taste < -0.5].mean() < 0.3


@pytest.mark.skipif(
    importlib.util.find_spec("recbole") is None,
    reason="MovieLens-100K is not installed: pip install --no-deps recbole==1.2.1",
)
def test_movielens_100k_is_found_and_read_without_importing_its_package():
    import sys

    ratings = read_ratings(find_ratings(None))
    assert "recbole" not in sys.modules
    assert (len(ratings.users), ratings.user_rows, ratings.item_rows) == (100_000, 943, 1682)
    assert set(ratings.ratings) == {1.0, 2.0, 3.0, 4.0, 5.0}
    split = split_by_time(ratings, 0.1)
    assert abs(len(split.test) - 10_000) < 100
    assert split.name == "ml-100k"
