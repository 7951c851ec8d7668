"""The config.toml that a run leaves makes the same run again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from examples.two_tower.config import read_config
from examples.two_tower.report import to_toml
from examples.two_tower.settings import Settings, SettingsError

CHANGED = Settings(schedule="staleness0", batch=256, width=16, hidden=8, table_half_life=10.0, dtype="bfloat16")


def write(folder: Path, data: dict | None = None, **changes) -> Path:
    settings = dataclasses.asdict(CHANGED) | changes
    (folder / "config.toml").write_text(to_toml({"run": {"name": "a"}, "data": data or {}, "settings": settings}))
    return folder / "config.toml"


def test_every_setting_comes_back(tmp_path):
    config = read_config(write(tmp_path, {"name": "synthetic-5000", "synthetic": 5000}))
    assert config.settings == CHANGED
    assert (config.data, config.synthetic) == (None, 5000)
    options = config.as_options()
    assert (options["staleness"], options["plain"], options["batch"]) == (0, False, 256)
    assert read_config(write(tmp_path, {"file": "ratings.csv"})).data == Path("ratings.csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bacth": 3}, "there is no setting 'bacth'; the closest is 'batch'"),
        ({"batch": "many"}, "batch='many' must be of type int"),
        ({"width": 15}, "width=15 does not divide over 4 devices; use 16"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path, changes, message):
    with pytest.raises(SettingsError) as e:
        read_config(path := write(tmp_path, **changes))
    assert str(e.value) == f"{path}: {message}"


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"missing\.toml cannot be read: No such file"):
        read_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(SettingsError, match=r"bad.toml is not TOML: .*line 1"):
        read_config(tmp_path / "bad.toml")
