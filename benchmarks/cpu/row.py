"""One measured line: our time, a peer's in the same run, and what was wanted."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from benchmarks.timing import Times

Kind = Literal["ratio", "speedup", "difference"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a suite is asked for.

    Attributes:
        quick: one line of each sort, of a few iterations: shows that everything runs and that results agree.
    """

    quick: bool = False

    @property
    def repetitions(self) -> int:
        return 5 if self.quick else 50


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on our median beside the peer's.

    ``ratio``: ours / theirs, at most. ``speedup``: theirs / ours, at least. ``difference``: ours - theirs, at most, in
    the row's unit.
    """

    kind: Kind
    bound: float

    def value(self, ours: float, theirs: float) -> float:
        match self.kind:
            case "ratio":
                return ours / theirs
            case "speedup":
                return theirs / ours
            case "difference":
                return ours - theirs

    def is_met(self, ours: float, theirs: float) -> bool:
        value = self.value(ours, theirs)
        return value >= self.bound if self.kind == "speedup" else value <= self.bound

    def text(self, unit: str) -> str:
        sign = "≥" if self.kind == "speedup" else "≤"
        return f"{sign} {self.format(self.bound, unit)}"

    def format(self, value: float, unit: str) -> str:
        match self.kind:
            case "ratio":
                return f"{value:.2f} × its time"
            case "speedup":
                return f"{value:.3g} × faster"
            case "difference":
                return f"{value:.1f} {unit} more"


def at_most(ratio: float) -> Goal:
    """Ours takes at most so many times as long as theirs."""
    return Goal("ratio", ratio)


def faster(times: float) -> Goal:
    """Ours is at least so many times faster than theirs."""
    return Goal("speedup", times)


def within(more: float) -> Goal:
    """Ours takes at most so much longer than theirs, in the row's unit."""
    return Goal("difference", more)


@dataclasses.dataclass(frozen=True)
class Row:
    """Attributes:
    work: what was done, such as "gather_rows, one device". Rows of one work stand together.
    setting: sizes, dtype and ids.
    peer: what it is compared with.
    ours, theirs: in `unit`.
    checked: how both results were compared before anything was timed.
    goal: what was wanted, or None.
    moved: the least bytes that the work reads and writes, or None.
    copy: bytes a second that a plain copy of about that size moves in the same run, read and written, or None.
    unit: of the times.
    note: what a reader has to know.
    """

    work: str
    setting: str
    peer: str
    ours: Times
    theirs: Times
    checked: str
    goal: Goal | None = None
    moved: int | None = None
    copy: float | None = None
    unit: str = "µs"
    note: str = ""

    @property
    def comparison(self) -> Goal:
        """How the two are set side by side: as the goal does, or as a speedup."""
        return self.goal or Goal("speedup", 1.0)

    @property
    def value(self) -> float:
        return self.comparison.value(self.ours.p50, self.theirs.p50)

    @property
    def is_met(self) -> bool | None:
        """None where nothing was wanted."""
        return self.goal.is_met(self.ours.p50, self.theirs.p50) if self.goal else None

    @property
    def share_of_copy(self) -> float | None:
        """The bandwidth that moving no more than `moved` comes to, as a part of a copy's."""
        if self.moved is None or self.copy is None:
            return None
        return self.ours.share(self.moved, self.copy)


def as_json(row: Row) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row),
        "value": row.value,
        "met": row.is_met,
        "share_of_copy": row.share_of_copy,
    }


def from_json(record: dict[str, Any]) -> Row:
    """The inverse of ``as_json``."""
    names = {field.name for field in dataclasses.fields(Row)}
    values = {key: value for key, value in record.items() if key in names}
    values["ours"], values["theirs"] = Times(**values["ours"]), Times(**values["theirs"])
    values["goal"] = Goal(**values["goal"]) if values["goal"] else None
    return Row(**values)
