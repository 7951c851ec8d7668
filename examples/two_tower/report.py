"""What a run leaves behind: `metrics.csv`, `config.toml` and `metrics.png` in a folder of its own.

Each row of the CSV is on disk before the next step begins, so a run that is interrupted leaves a readable file.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The scale of the exposed time ends no lower: below, a step that waited for nothing would look like one that waited.
LEAST_EXPOSED_MS = 0.1

Scalar = str | int | float | bool | None


class ReportError(ValueError):
    """A run folder that cannot be made."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of `metrics.csv`. Seconds of training exclude evaluation; a value that was not measured is None."""

    step: int
    epoch: int
    examples: int
    seconds: float
    loss: float
    test_auc: float | None = None
    exposed_seconds: float | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


class RunFolder:
    """Owns `out/name`. Refuses a folder that exists, so that no earlier run is overwritten."""

    def __init__(self, out: Path, name: str, config: Mapping[str, Mapping[str, Scalar]]) -> None:
        self.path = out / name
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise ReportError(f"{self.path} exists already; choose another --name or remove it") from None
        except OSError as error:
            raise ReportError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from None
        self.csv, self.config, self.png = (self.path / file for file in ("metrics.csv", "config.toml", "metrics.png"))
        self.config.write_text(to_toml(config), encoding="utf-8")
        self._file = self.csv.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)
        self._file.flush()

    def write(self, row: Row) -> None:
        self._writer.writerow(_cell(value) for value in dataclasses.astuple(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def plot(self, title: str) -> None:
        plot(read_rows(self.csv), self.png, title)


class NoFolder(RunFolder):
    """What a process has that writes nothing, because another one does."""

    def __init__(self, out: Path, name: str, config: Mapping[str, Mapping[str, Scalar]]) -> None:
        self.path = out / name
        self.csv, self.config, self.png = (self.path / file for file in ("metrics.csv", "config.toml", "metrics.png"))

    def write(self, row: Row) -> None:
        pass

    def close(self) -> None:
        pass

    def plot(self, title: str) -> None:
        pass


def read_rows(path: Path) -> list[Row]:
    """Reads a `metrics.csv` back, also one of a run that still goes on or was interrupted."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                step=int(line["step"]),
                epoch=int(line["epoch"]),
                examples=int(line["examples"]),
                seconds=float(line["seconds"]),
                loss=float(line["loss"]),
                test_auc=float(line["test_auc"]) if line["test_auc"] else None,
                exposed_seconds=float(line["exposed_seconds"]) if line["exposed_seconds"] else None,
            )
            for line in csv.DictReader(file)
        ]


def to_toml(sections: Mapping[str, Mapping[str, Scalar]]) -> str:
    """Sections of scalars as TOML 1.0; a value of None is left out, as TOML has no null."""
    blocks = []
    for section, values in sections.items():
        lines = [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{_toml_key(section)}]", *lines]) + "\n")
    return "\n".join(blocks)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Draws loss, test AUC and exposed time per step over the steps, as a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    loss, auc, exposed = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    _plot_loss(loss, rows)
    _plot_auc(auc, rows)
    _plot_exposed(exposed, rows)
    for axes in (loss, auc, exposed):
        axes.grid(True, axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)
    exposed.set_xlabel("step")
    figure.savefig(path)


def _plot_loss(axes: Axes, rows: list[Row]) -> None:
    steps = [row.step for row in rows]
    axes.plot(steps, [row.loss for row in rows], color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    average, smooth = math.nan, []
    for row in rows:
        average = row.loss if math.isnan(average) else 0.9 * average + 0.1 * row.loss
        smooth.append(average)
    axes.plot(steps, smooth, color="tab:blue", linewidth=1.8, label="moving average")
    axes.set_ylabel("training loss\n(mean log loss)")
    if rows:
        axes.legend(frameon=False, loc="upper right")


def _plot_auc(axes: Axes, rows: list[Row]) -> None:
    measured = [(row.step, row.test_auc) for row in rows if row.test_auc is not None]
    axes.plot([step for step, _ in measured], [auc for _, auc in measured], "o-", color="tab:green", markersize=5)
    for step, auc in measured[-1:]:
        axes.annotate(f"{auc:.4f}", (step, auc), textcoords="offset points", xytext=(4, 8), ha="right")
    axes.margins(y=0.25)
    axes.set_ylabel("test AUC")


def _plot_exposed(axes: Axes, rows: list[Row]) -> None:
    axes.set_ylabel("exposed time\n(ms per step)")
    measured = [(row.step, row.exposed_seconds) for row in rows if row.exposed_seconds is not None]
    if len(measured) < 2:
        axes.text(0.5, 0.5, "not measured in this run", transform=axes.transAxes, ha="center", color="0.5")
        axes.set_yticks([])
        return
    steps, milliseconds = [], []
    for (step_before, before), (step, now) in itertools.pairwise(measured):
        if step > step_before:
            steps.append(step)
            milliseconds.append(1000.0 * (now - before) / (step - step_before))
    axes.plot(steps, milliseconds, color="tab:orange", linewidth=1.0)
    # One slow step (a compilation, another program) should not flatten all the others.
    usual = sorted(milliseconds)[int(0.98 * (len(milliseconds) - 1))] if milliseconds else 0.0
    axes.set_ylim(0.0, max(1.5 * usual, LEAST_EXPOSED_MS))
    total = f"{measured[-1][1]:.3f} s in the whole run"
    axes.set_title(total, loc="right", fontsize=9)


def _cell(value: float | int | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _toml_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _toml_value(key)


def _toml_value(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
