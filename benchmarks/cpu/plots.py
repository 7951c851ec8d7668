"""The rows as a picture: how many times faster than its peer each one is, and where its goal lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .row import Row

OURS, MISSED, PLAIN = "#2a6f97", "#c8553d", "#8d99ae"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG: a bar for each row whose comparison is a ratio of times, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.comparison.kind != "difference"]
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.24 * len(shown)))
    for place, row in enumerate(shown):
        colour = {True: OURS, False: MISSED, None: PLAIN}[row.is_met]
        axes.barh(place, row.theirs.p50 / row.ours.p50, color=colour, height=0.7)
        if row.goal is not None:
            wanted = row.goal.bound if row.goal.kind == "speedup" else 1 / row.goal.bound
            axes.plot([wanted, wanted], [place - 0.45, place + 0.45], color="black", linewidth=1.5)
    axes.set_yticks(range(len(shown)), [f"{row.work}, {row.setting}: {row.peer}" for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("peer's time / ours (black: the goal; grey bars have none)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
