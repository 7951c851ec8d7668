"""The rows as Markdown, which a terminal shows as well as the README does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .row import Row

HEADERS = ("work", "setting", "ours (p90)", "peer", "peer's (p90)", "result", "goal", "of a copy")
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def as_markdown(rows: Iterable[Row]) -> str:
    lines = [HEADERS, ("---",) * len(HEADERS), *(_cells(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    share = row.share_of_copy
    result = row.comparison.format(row.value, row.unit)
    return (
        row.work,
        row.setting,
        _times(row.ours.p50, row.ours.p90, row.unit),
        row.peer,
        _times(row.theirs.p50, row.theirs.p90, row.unit),
        f"**{result}**" if row.is_met is False else result,
        row.goal.text(row.unit) if row.goal else "–",
        f"{share:.0%}" if share is not None else "–",
    )


def _times(p50: float, p90: float, unit: str) -> str:
    """In milliseconds, where microseconds would be long."""
    if unit == "µs" and max(p50, p90) >= 1000:
        p50, p90, unit = p50 / 1000, p90 / 1000, "ms"
    low, high = f"{p50:.3g}" if p50 < 100 else f"{p50:.0f}", f"{p90:.3g}" if p90 < 100 else f"{p90:.0f}"
    return f"{low} {unit} ({high})" if low != high else f"{low} {unit}"


def write_into(path: Path, text: str) -> None:
    """Puts `text` between the marks of a file."""
    whole = path.read_text()
    if whole.count(BEGIN) != 1 or whole.count(END) != 1 or whole.index(END) < whole.index(BEGIN):
        raise ValueError(f"{path} needs one line {BEGIN} and after it one line {END}")
    head, _, rest = whole.partition(BEGIN)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{BEGIN}\n{text}{END}{tail}")


def summary(rows: Sequence[Row]) -> str:
    """One line: how many goals were reached."""
    wanted = [row for row in rows if row.goal]
    missed = [row for row in wanted if not row.is_met]
    names = "".join(f"\n  not reached: {row.work}, {row.setting}, beside {row.peer}" for row in missed)
    return f"{len(wanted) - len(missed)} of {len(wanted)} rows with a goal reach it{names}"
