"""Reads a run's `config.toml` back, so that the run can be made again."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from pathlib import Path
from typing import Any

from examples.two_tower.settings import Settings, SettingsError

# What a run writes down of itself and its data, beside its settings; only where the data came from is read.
_SECTIONS = ("run", "data", "settings")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings that make the same run again, and its data: a ratings file or a number of generated examples."""

    settings: Settings
    data: Path | None
    synthetic: int | None

    def as_options(self) -> dict[str, Any]:
        """By the names of the command line's options, for those that it has."""
        settings = self.settings
        return {
            "staleness": 0 if settings.schedule == "staleness0" else 1,
            "plain": settings.schedule == "plain",
            "data": None if self.data is None else str(self.data),
            "synthetic": self.synthetic,
            **{name: getattr(settings, name) for name in ("epochs", "batch", "width", "seed", "devices", "dtype")},
        }


def read_config(path: Path) -> Config:
    """Raises SettingsError that names the file, and the key that is wrong."""
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    for name in sections:
        _require_known(path, "section", name, _SECTIONS)
    fields = {field.name: type(field.default) for field in dataclasses.fields(Settings)}
    values = sections.get("settings", {})
    for name, value in values.items():
        _require_known(path, "setting", name, tuple(fields))
        wanted = fields[name]
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise SettingsError(f"{path}: {name}={value!r} must be of type {wanted.__name__}")
    data = sections.get("data", {})
    try:
        settings = Settings(**values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    return Config(settings, Path(data["file"]) if "file" in data else None, data.get("synthetic"))


def _require_known(path: Path, what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        closest = difflib.get_close_matches(name, known, n=1)
        advice = f"; the closest is {closest[0]!r}" if closest else f"; there are {', '.join(known)}"
        raise SettingsError(f"{path}: there is no {what} {name!r}{advice}")
