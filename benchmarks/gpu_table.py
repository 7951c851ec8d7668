"""The benchmark's one table, as text. Pure; needs no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .gpu_cases import LOOKUP_GOAL, UPDATE_GOAL, Config, lookup_bytes, update_bytes
from .timing import Times

HEADERS = (
    "D",
    "dtype",
    "ids",
    "distinct",
    "gather us",
    "of copy",
    "pair us (p90)",
    "of copy",
    "update us (p90)",
    "of copy",
    "torch",
    "jax",
    "fbgemm",
)


@dataclasses.dataclass
class Line:
    """Everything measured for one config. None: not measured; `notes` says why.

    Attributes:
        gather: the gather kernel alone, on the side stream.
        pair: a lookup's start and done on the caller's stream, from one event to another.
        update: start and done of an update.
        stage: handing gradient rows over.
        peers: by name, times of (lookup, update).
        kernels: of one update, microseconds by kernel.
    """

    config: Config
    tokens: int
    distinct: int = 0
    gather: Times | None = None
    pair: Times | None = None
    update: Times | None = None
    stage: Times | None = None
    peers: dict[str, tuple[Times | None, Times | None]] = dataclasses.field(default_factory=dict)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def gather_share(self, bandwidth: float) -> float | None:
        moved = lookup_bytes(self.tokens, self.config.row_bytes)
        return None if self.gather is None else self.gather.share(moved, bandwidth)

    def pair_share(self, bandwidth: float) -> float | None:
        moved = lookup_bytes(self.tokens, self.config.row_bytes)
        return None if self.pair is None else self.pair.share(moved, bandwidth)

    def update_share(self, bandwidth: float) -> float | None:
        moved = update_bytes(self.tokens, self.distinct, self.config.row_bytes)
        return None if self.update is None else self.update.share(moved, bandwidth)


def cells(line: Line, bandwidth: float) -> list[str]:
    config = line.config
    lookup_goal = LOOKUP_GOAL if config.has_lookup_goal else None
    return [
        str(config.width),
        config.dtype,
        config.ids,
        f"{line.distinct:,}",
        _time(line.gather),
        _share(line.gather_share(bandwidth), lookup_goal),
        _time(line.pair, with_p90=True),
        _share(line.pair_share(bandwidth), None),
        _time(line.update, with_p90=True),
        _share(line.update_share(bandwidth), UPDATE_GOAL),
        *(" / ".join(_time(times) for times in line.peers.get(peer, (None, None))) for peer in HEADERS[-3:]),
    ]


def _time(times: Times | None, *, with_p90: bool = False) -> str:
    if times is None:
        return "-"
    return f"{times.p50:,.0f} ({times.p90:,.0f})" if with_p90 else f"{times.p50:,.0f}"


def _share(share: float | None, goal: float | None) -> str:
    if share is None:
        return "-"
    mark = "" if goal is None else " ok" if share >= goal else f" <{100 * goal:.0f}"
    return f"{100 * share:.0f} %{mark}"


def caption(bandwidth: float, card: str, tokens: int, rows: int) -> list[str]:
    return [
        f"{card}: copies {bandwidth / 1e12:.2f} TB/s in this run, read and written. {tokens:,} ids, {rows:,} rows.",
        "gather: the kernel on the side stream. pair: start and done of a lookup, with the copy to the output.",
        "of copy: share of that bandwidth. Lookup: 4N + 2NDe bytes (N ids, D columns of e bytes). Update, the least it",
        "moves: 4N + NDe + U(2De + 8) for U distinct rows. Peers: lookup / update, p50 in us.",
        f"Goals on an H200: gather {100 * LOOKUP_GOAL:.0f} % for D >= 64 and uniform ids, update "
        f"{100 * UPDATE_GOAL:.0f} %; `ok` where reached, `<` where not.",
    ]


def as_text(lines: Sequence[Line], bandwidth: float) -> str:
    """Columns of equal width, the first three to the left."""
    table = [list(HEADERS), *(cells(line, bandwidth) for line in lines)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
    out = []
    for row in table:
        parts = [
            cell.ljust(w) if i in (1, 2) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        out.append("  ".join(parts).rstrip())
    out.insert(1, "-" * max(map(len, out)))
    return "\n".join(out)


def as_json(line: Line, bandwidth: float) -> dict[str, Any]:
    found = dataclasses.asdict(line)
    found["peers"] = {
        name: {"lookup": lookup and dataclasses.asdict(lookup), "update": update and dataclasses.asdict(update)}
        for name, (lookup, update) in line.peers.items()
    }
    found["shares_of_copy"] = {
        "gather": line.gather_share(bandwidth),
        "pair": line.pair_share(bandwidth),
        "update": line.update_share(bandwidth),
    }
    return found
