"""The rows as Markdown, which a terminal shows as well as a page does: all of them, and in short."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from .row import Row

SHORT_HEADERS = ("work", "beside", "result", "goal", "reached")
HEADERS = ("work", "setting", "ours (p90)", "peer", "peer's (p90)", "result", "goal", "of a copy")
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def as_markdown(rows: Iterable[Row]) -> str:
    return _markdown(HEADERS, map(_cells, rows))


def in_short(rows: Sequence[Row]) -> str:
    """One line for each work, peer and goal, over all settings: the worst and the best result."""
    kinds = sorted((row for row in rows if row.goal), key=_kind)
    order = {_kind(row): place for place, row in reversed(list(enumerate(rows)))}
    groups = [list(group) for _, group in itertools.groupby(kinds, key=_kind)]
    return _markdown(SHORT_HEADERS, map(_short_cells, sorted(groups, key=lambda group: order[_kind(group[0])])))


def _kind(row: Row) -> tuple[str, ...]:
    return row.work, row.peer, row.unit, row.goal.text(row.unit) if row.goal else ""


def _short_cells(group: Sequence[Row]) -> tuple[str, ...]:
    first = group[0]
    assert first.goal is not None
    values = sorted((row.value for row in group), reverse=first.goal.kind != "speedup")
    shown = list(dict.fromkeys(first.goal.format(value, first.unit) for value in (values[0], values[-1])))
    reached = sum(row.is_met is True for row in group)
    return (
        first.work,
        first.peer,
        " to ".join(shown),
        first.goal.text(first.unit),
        f"{reached} of {len(group)}" if len(group) > 1 else "yes" if reached else "**no**",
    )


def _markdown(headers: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [headers, ("---",) * len(headers), *lines])


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
