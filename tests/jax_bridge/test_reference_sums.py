"""The oracle's ids, lookup, and sums in their canonical order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_bridge import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
DTYPES = (F32, BF16, F16)
CANONICAL = {F32: 0x7FC00000, BF16: 0x7FC0, F16: 0x7E00}


def bits(values):
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}")


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def floats(pattern):
    return np.asarray(pattern, np.uint32).view(np.float32)


def test_ids_outside_the_table_follow_one_policy_and_are_reported():
    ids = np.array([[3, -1, 8], [9, 2**31 - 1, -(2**31)]])
    for policy, expected in (
        ("error", [3, -1, -1, -1, -1, -1]),
        ("drop", [3, -1, -1, -1, -1, -1]),
        ("clamp", [3, 0, 7, 7, 7, 0]),
    ):
        cleaned, report = reference.clean_ids(ids, 8, id_policy=policy)
        assert cleaned.dtype == np.int32
        assert cleaned.shape == (2, 3)
        assert cleaned.ravel().tolist() == expected
        assert report == (5, (1, -1))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_type_are_compared_before_they_are_narrowed(dtype):
    largest = np.iinfo(dtype).max
    cleaned, report = reference.clean_ids(np.array([1, largest], dtype), 8)
    assert cleaned.tolist() == [1, -1]
    assert report == (1, (1, largest))


def test_padding_reads_no_row_and_is_no_error():
    assert reference.clean_ids([5, 2, -7], 8, padding_id=2)[0].tolist() == [5, -1, -1]
    cleaned, report = reference.clean_ids([5, -7], 8, padding_id=-7, id_policy="clamp")
    assert cleaned.tolist() == [5, -1]
    assert report == (0, None)


def test_an_id_clamped_onto_the_padding_id_is_padding():
    cleaned, report = reference.clean_ids([-3, 4, 0], 8, padding_id=0, id_policy="clamp")
    assert cleaned.tolist() == [-1, 4, -1]
    assert report == (1, (0, -3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lookup_copies_bits(dtype):
    rng = np.random.default_rng(0)
    size = f"u{dtype.itemsize}"
    patterns = rng.integers(0, 2 ** (8 * dtype.itemsize), (9, 5), dtype=size)
    patterns[4] = CANONICAL[dtype] | 1  # NaNs with a payload
    patterns[5] = np.asarray(CANONICAL[dtype] >> 1, size) | patterns[5]  # many are signalling
    ids = np.array([4, 0, -1, 5, 4, 8])
    rows = reference.lookup(patterns.view(dtype), ids)
    assert rows.dtype == dtype
    assert np.array_equal(bits(rows), np.where(ids[:, None] < 0, 0, patterns[ids]))


def test_lookup_refuses_an_id_that_was_not_cleaned():
    with pytest.raises(ValueError, match=r"id 9 at position 1 .* 8 rows"):
        reference.lookup(np.zeros((8, 2), np.float32), [0, 9])


def test_unique_ids_ascend_and_list_their_tokens_in_order():
    index = reference.unique_ids([7, -1, 2, 7, 7, 2])
    assert index.unique.tolist() == [2, 7]
    assert index.offsets.tolist() == [0, 2, 5]
    assert index.positions.tolist() == [2, 5, 0, 3, 4]


def test_segments_of_the_caller_give_the_same_index():
    index = reference.unique_from_segments([1, -1, 0, 1, 1, 0], [2, 7, 8, 8], 8)
    for given_part, own_part in zip(index, reference.unique_ids([7, -1, 2, 7, 7, 2]), strict=True):
        assert np.array_equal(given_part, own_part)


def test_a_unique_token_that_no_token_refers_to_has_no_place():
    index = reference.unique_from_segments([2, 0], [1, 3, 5, 8], 8)
    assert index.unique.tolist() == [1, 5]
    sums = reference.segment_sum(np.array([[1.0], [2.0]], np.float32), index)
    assert sums.ravel().tolist() == [2.0, 1.0]


@pytest.mark.parametrize("tokens", [[3, 1, 8], [1, 1, 8], [-1, 2, 8], [1, 8, 2]])
def test_unique_tokens_must_ascend_and_end_in_padding(tokens):
    with pytest.raises(ValueError, match="must ascend"):
        reference.unique_from_segments([0], tokens, 8)


def plain_segment_sum(rows):
    """The canonical order written as loops over scalars."""
    blocks = []
    for start in range(0, len(rows), 32):
        total = rows[start]
        for row in rows[start + 1 : start + 32]:
            total = total + row
        blocks.append(total)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[1], [32], [33], [1, 64, 65, 31, 100, 2]])
def test_duplicates_are_summed_in_blocks_of_32(dtype, counts):
    rng = np.random.default_rng(len(counts))
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    grads = rng.normal(size=(len(ids), 3)).astype(dtype)
    sums = reference.segment_sum(grads, reference.unique_ids(ids))
    for segment in range(len(counts)):
        assert same_bits(sums[segment], plain_segment_sum(grads[ids == segment].astype(np.float32)))


def test_a_sum_of_one_negative_zero_is_negative_zero():
    sums = reference.segment_sum(np.array([[-0.0]], np.float32), reference.unique_ids([3]))
    assert bits(sums).tolist() == [[0x80000000]]


def plain_dyadic_sum(values):
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return plain_dyadic_sum(values[:half]) + plain_dyadic_sum(values[half:])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 31, 64, 100])
def test_dyadic_sums_are_trees_over_aligned_blocks(count):
    values = np.random.default_rng(count).random((4, count), dtype=np.float32) ** 4
    assert same_bits(reference.dyadic_sum(values), np.array([plain_dyadic_sum(row) for row in values], np.float32))


@given(st.integers(1, 70), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_dyadic_sums_do_not_depend_on_how_aligned_blocks_are_spread(count, log_block, seed):
    values = np.random.default_rng(seed).random(count, dtype=np.float32) ** 6
    block = 2**log_block
    parts = [reference.dyadic_sum(values[i : i + block])[()] for i in range(0, count, block)]
    assert same_bits(reference.dyadic_sum(np.array(parts, np.float32)), reference.dyadic_sum(values))


def test_sums_over_nothing_are_zero():
    assert reference.dyadic_sum(np.zeros((2, 0), np.float32)).tolist() == [0, 0]
    assert reference.global_norm(np.zeros(0, np.float32)) == 0


def test_row_statistics_leave_padding_columns_out():
    summed = np.array([[3.0, 4.0, np.nan]], np.float32)
    statistics = reference.row_statistics(summed, 2)
    assert statistics.tolist() == [25.0]
    assert reference.global_norm(statistics) == 5.0


def test_a_norm_that_is_not_a_number_is_the_canonical_one():
    norm = reference.global_norm(floats([0xFFC01234, 0x3F800000]))
    assert bits(norm) == 0x7FC00000
