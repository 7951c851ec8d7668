"""The AUC equals its definition: the share of pairs in the right order, ties counting half."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.two_tower.metrics import auc


def brute_force(labels, scores) -> float:
    positives = [score for label, score in zip(labels, scores, strict=True) if label]
    negatives = [score for label, score in zip(labels, scores, strict=True) if not label]
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return wins / (len(positives) * len(negatives))


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=60))
def test_auc_counts_ordered_pairs(pairs):
    labels, scores = np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], np.float32)
    if 0 < labels.sum() < len(labels):
        assert auc(labels, scores) == pytest.approx(brute_force(labels, scores), abs=1e-12)
    else:
        assert math.isnan(auc(labels, scores))


def test_auc_of_scores_without_ties_equals_the_brute_force():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 300), rng.standard_normal(300)
    assert auc(labels, scores) == pytest.approx(brute_force(labels, scores), abs=1e-12)


def test_perfect_reversed_and_constant_scores():
    labels = np.array([0, 0, 1, 1])
    assert auc(labels, np.array([1, 2, 3, 4])) == 1.0
    assert auc(labels, np.array([4, 3, 2, 1])) == 0.0
    assert auc(labels, np.zeros(4)) == 0.5


def test_a_score_that_is_nan_gives_no_auc():
    assert math.isnan(auc(np.array([0, 1, 1]), np.array([0.0, np.nan, 1.0])))


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        auc(np.zeros(3), np.zeros(4))
