"""Everything a run depends on, in one frozen record that is written to `config.toml`."""

from __future__ import annotations

import dataclasses
from typing import Literal

Schedule = Literal["staleness1", "staleness0", "plain"]

SCHEDULES: tuple[Schedule, ...] = ("staleness1", "staleness0", "plain")

# Marks the filling at the end of an epoch's last batch. It reads a row of zeros and is never trained.
PADDING_ID = -1


class SettingsError(ValueError):
    """An option that cannot work, with what to choose instead."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of one training run. Lengths of time are in steps; a learning rate has no unit."""

    schedule: Schedule = "staleness1"
    epochs: int = 6
    batch: int = 1024
    width: int = 64
    hidden: int = 64
    output: int = 32
    seed: int = 0
    devices: int = 4
    dtype: str = "float32"
    dense_learning_rate: float = 1e-3
    table_learning_rate: float = 0.02
    table_half_life: float = 5000.0
    table_eps: float = 1e-8
    table_init_scale: float = 0.01
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        for field in ("epochs", "batch", "width", "hidden", "output", "devices"):
            if getattr(self, field) < 1:
                raise SettingsError(f"{field}={getattr(self, field)} must be at least 1")
        if self.seed < 0:
            raise SettingsError(f"seed={self.seed} must not be negative")
        for field in ("batch", "width"):
            value = getattr(self, field)
            if value % self.devices:
                advice = -(-value // self.devices) * self.devices
                raise SettingsError(f"{field}={value} does not divide over {self.devices} devices; use {advice}")
        if self.schedule not in SCHEDULES:
            raise SettingsError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise SettingsError(f"dtype={self.dtype!r} is none of float32, bfloat16, float16")
        if self.schedule == "plain" and self.dtype != "float32":
            raise SettingsError(f"the plain JAX peer keeps its tables in float32, not {self.dtype}")
        if not 0.0 < self.test_fraction < 1.0:
            raise SettingsError(f"test_fraction={self.test_fraction} must lie between 0 and 1")
