"""A run's folder: the CSV is readable at any moment, the configuration is TOML, the picture is a PNG."""

import dataclasses
import tomllib

import pytest

from examples.two_tower.report import COLUMNS, ReportError, Row, RunFolder, plot, read_rows, to_toml
from examples.two_tower.settings import Settings, SettingsError

ROWS = [Row(step, 1, 1024 * step, 0.5 * step, 0.75 - step / 64, None, step / 64) for step in range(1, 20)]
ROWS.append(Row(20, 1, 20480, 10.0, 0.03, 0.75, 0.02))


def test_rows_are_on_disk_before_the_run_ends(tmp_path):
    folder = RunFolder(tmp_path, "run", {})
    assert folder.csv.read_text().strip() == ",".join(COLUMNS)
    for count, row in enumerate(ROWS, start=1):
        folder.write(row)
        assert len(read_rows(folder.csv)) == count
    assert read_rows(folder.csv) == ROWS
    folder.close()


def test_a_run_folder_that_exists_is_not_overwritten(tmp_path):
    RunFolder(tmp_path, "run", {}).close()
    with pytest.raises(ReportError, match="exists already; choose another --name"):
        RunFolder(tmp_path, "run", {})


def test_a_run_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="choose another --out"):
        RunFolder(tmp_path / "file", "run", {})


def test_the_configuration_comes_back_from_toml(tmp_path):
    config = {"settings": dataclasses.asdict(Settings()), "run": {"name": "first"}}
    folder = RunFolder(tmp_path, "run", config)
    folder.close()
    assert tomllib.loads(folder.config.read_text(encoding="utf-8")) == config


@pytest.mark.parametrize(
    "value",
    ["", 'quo"te', "back\\slash", "line\nend\ttab", "\x00\x1f\x7f", "ü 😀", 0, -5, 1e-8, 1e300, 0.1, True, False],
)
def test_any_scalar_comes_back_from_toml(value):
    back = tomllib.loads(to_toml({"a section": {"a key": value, "plain-key": 1, "absent": None}}))
    assert back == {"a section": {"a key": value, "plain-key": 1}}
    assert type(back["a section"]["a key"]) is type(value)


@pytest.mark.parametrize(
    "rows",
    [ROWS, ROWS[:1], [], [dataclasses.replace(row, exposed_seconds=None) for row in ROWS]],
    ids=["full", "one row", "no rows", "nothing exposed"],
)
def test_a_picture_is_drawn_of_any_run(tmp_path, rows):
    plot(rows, tmp_path / "metrics.png", "Title")
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 1022}, "batch=1022 does not divide over 4 devices; use 1024"),
        ({"width": 30}, "width=30 does not divide over 4 devices; use 32"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"dtype": "int8"}, "dtype='int8' is none of"),
        ({"schedule": "plain", "dtype": "bfloat16"}, "keeps its tables in float32"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_advice(options, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**options)
