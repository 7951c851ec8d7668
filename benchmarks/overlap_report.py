"""What the overlap benchmark found, as a table, as JSON and as a plot. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL = 0.85  # with dense work at least as long as the embedding


@dataclasses.dataclass(frozen=True)
class Measured:
    """One configuration; seconds a step, the mean of what the hosts measured.

    Attributes:
        exposed: that done calls waited for their results, as `stats()` counts it: mean of all steps.
        step, step_p90: from one forward to the next, median and 90th percentile.
        dense: forward and backward, median.
        not_dense: the median of a step without its dense work: whatever was waited for, and the calls themselves.
    """

    exposed: float
    step: float
    step_p90: float
    dense: float
    not_dense: float

    @classmethod
    def of_hosts(cls, found: Sequence[Mapping[str, Any]]) -> Measured:
        def mean(of: Any) -> float:
            return statistics.fmean(of(host) for host in found)

        return cls(
            exposed=mean(lambda host: host["exposed"]),
            step=mean(lambda host: statistics.median(host["step"])),
            step_p90=mean(lambda host: statistics.quantiles(host["step"], n=10)[-1]),
            dense=mean(lambda host: statistics.median(host["dense"])),
            not_dense=mean(
                lambda host: statistics.median(s - d for s, d in zip(host["step"], host["dense"], strict=True))
            ),
        )


@dataclasses.dataclass(frozen=True)
class Delay:
    """A link. Seconds, but for the delay; `embedding` is a step of staleness 0 without its dense work, and `product` a
    matrix product of the dense work."""

    milliseconds: float
    round_trip: float
    exposed: float
    embedding: float
    product: float


@dataclasses.dataclass(frozen=True)
class Line:
    """Both schedules on one workload."""

    kind: str
    split: str
    milliseconds: float
    ratio: float  # asked for
    exact: Measured
    stale: Measured

    @property
    def measured_ratio(self) -> float | None:
        return None if self.is_mixed else self.stale.dense / self.exact.not_dense

    @property
    def hidden(self) -> float | None:
        """Of the time that a step of staleness 0 spends beside its dense work, the share that staleness 1 saves."""
        return None if self.is_mixed else 1 - self.stale.not_dense / self.exact.not_dense

    @property
    def hidden_by_counter(self) -> float:
        """The same of the exposed wait that `stats()` counts."""
        return 1 - self.stale.exposed / self.exact.exposed

    @property
    def is_mixed(self) -> bool:
        """XLA's own messages lie in the dense work, so that it cannot be told from waiting."""
        return self.kind == "data parallel"


def bound(ratio: float, forward_share: float) -> float:
    """What can be hidden at most where updates take half of the embedding time, from the begin of the dense work on,
    and lookups the other half, from the end of the forward or of the update on, whichever is later. `ratio`: of dense
    work to embedding time."""
    lookup_ends = max(0.5, ratio * forward_share) + 0.5
    return 1 - max(0.0, lookup_ends - ratio)


HEADERS = (
    "dense work",
    "fwd:bwd",
    "delay",
    "dense / emb.",
    "step, st. 0 (p90)",
    "step, st. 1 (p90)",
    "exposed, st. 0",
    "exposed, st. 1",
    "hidden",
    "by stats()",
)


def cells(line: Line) -> list[str]:
    def step(measured: Measured) -> str:
        return f"{_ms(measured.step)} ({_ms(measured.step_p90)})"

    ratio = "" if line.measured_ratio is None else f" ({line.measured_ratio:.2f})"
    return [
        line.kind,
        line.split,
        f"{line.milliseconds:g}",
        f"{line.ratio:g}{ratio}",
        step(line.exact),
        step(line.stale),
        _ms(line.exact.exposed),
        _ms(line.stale.exposed),
        "–" if line.hidden is None else f"{100 * line.hidden:.0f} %",
        f"{100 * line.hidden_by_counter:.0f} %",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def as_text(record: Mapping[str, Any], delays: Sequence[Delay], lines: Sequence[Line]) -> str:
    """The tables as Markdown. Times in ms."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    before, after = record["load_before"][0], record["load_after"][0]
    links = ["| delay | round trip | embedding |", "|---:|---:|---:|"]
    links += [f"| {d.milliseconds:g} | {_ms(d.round_trip)} | {_ms(d.embedding)} |" for d in delays]
    table = [f"| {' | '.join(HEADERS)} |", f"|---|---|{'---:|' * (len(HEADERS) - 2)}"]
    table += [f"| {' | '.join(cells(line))} |" for line in lines]
    head = (
        f"{record['date']}: {versions}; {record['cores']} cores, load average {before:.1f} before and {after:.1f} "
        f"after; link: {record['link']}; {record['steps']} steps each; {record['seconds']:.0f} s in all"
    )
    return "\n".join([head, "", *links, "", *table])


def as_json(found: Delay | Line) -> dict[str, Any]:
    written = dataclasses.asdict(found)
    if isinstance(found, Line):
        written |= {
            "measured_ratio": found.measured_ratio,
            "hidden": found.hidden,
            "hidden_by_counter": found.hidden_by_counter,
        }
    return written


def plot(lines: Sequence[Line], path: Path) -> None:
    """Draws what is hidden over the length of the dense work, a panel for each split, as a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    splits = list(dict.fromkeys(line.split for line in lines if not line.is_mixed))
    figure = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axes, split in zip(panels, splits, strict=True):
        _plot_split(axes, [line for line in lines if line.split == split and not line.is_mixed], split)
    panels[0].set_ylabel("communication hidden by staleness 1, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _plot_split(axes: Axes, lines: Sequence[Line], split: str) -> None:
    for milliseconds in dict.fromkeys(line.milliseconds for line in lines):
        of_delay = [line for line in lines if line.milliseconds == milliseconds]
        points = sorted((line.measured_ratio or 0, 100 * (line.hidden or 0)) for line in of_delay)
        ratios, hidden = zip(*points, strict=True)
        axes.plot(ratios, hidden, "o-", label=f"{milliseconds:g} ms one way")
    forward, backward = (int(part) for part in split.split(":"))
    grid = [i / 100 for i in range(241)]
    bounds = [100 * bound(ratio, forward / (forward + backward)) for ratio in grid]
    axes.plot(grid, bounds, color="0.4", linewidth=0.8, linestyle=":", label="bound")
    axes.axhline(100 * GOAL, color="0.6", linewidth=0.8, linestyle="--")
    axes.axvline(1, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_title(f"forward : backward = {forward} : {backward}", fontsize=10)
    axes.set_xlabel("dense work / embedding time of staleness 0")
    axes.set_xlim(0, 2.4)
    axes.set_ylim(0, 105)
    axes.grid(True, color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
