"""The area under the ROC curve, exactly, ties included."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Probability that a random positive scores above a random negative, a tie counting one half.

    Args:
        labels: [n], 0 or 1.
        scores: [n], any real dtype.

    Returns:
        The Mann-Whitney U statistic over the number of pairs, from average ranks; nan if either class is absent or a
        score is NaN. (Hanley and McNeil 1982, "The meaning and use of the area under a ROC curve".)
    """
    labels, scores = np.asarray(labels), np.asarray(scores)
    if labels.shape != scores.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must be vectors of one length")
    positive = labels > 0.5
    positives = int(np.count_nonzero(positive))
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0 or np.isnan(scores).any():
        return float("nan")
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    average_rank = np.cumsum(sizes) - (sizes - 1) / 2.0
    rank_sum = float(np.sum(average_rank[group][positive]))
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)
