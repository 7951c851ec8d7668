"""A minute of random shapes and ids over four processes leaves nothing behind."""

from __future__ import annotations

import pytest

from . import soak

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_a_minute_of_random_shapes_leaves_nothing_behind(tmp_path):
    results = soak.run(4, 60, 20_000, tmp_path, kinds_of_tables=1)
    assert len({(result["turns"], result["steps"]) for result in results}) == 1
    assert soak.judge(results) == []


def test_what_grows_is_noticed():
    flat = {"turns": 100, "steps": 1, "seconds": 1.0, "seen": [[10, 20, 1000]] * 100}
    growing = {**flat, "seen": [[10 + n / 5, 20 + n / 5, 1000 + 1000 * n] for n in range(100)]}
    assert soak.judge([flat]) == []
    assert len(soak.judge([flat, growing])) == 3
