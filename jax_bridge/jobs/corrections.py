"""Looks for a job file that passes: changes by the rules' own corrections until nothing is left to say, or to try."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch_ext.common.table_rules import as_number, is_integer

from ..validation.checks import Arguments, check, nearest_of
from ..validation.corrections import find_corrections
from ..validation.table_checks import own_problems
from .checking import CheckedJob, check_job, handle_arguments, path_of, table_arguments
from .document import Document
from .edits import Edit, apply, as_toml
from .job_file import Finding, Job, misplaced
from .toml_positions import Path

_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Correction:
    """A changed job file.

    Attributes:
        checked: what is left to say of it; nothing, if it passes.
        uncovered: what could be seen only when names and axes were right, in places of the file as it was.
        changes: (key, old value or None, new value or None), as TOML.
        notes: what the changes cost.
    """

    checked: CheckedJob
    uncovered: tuple[Finding, ...]
    changes: tuple[tuple[str, str | None, str | None], ...]
    notes: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return not self.checked.findings


def correct(checked: CheckedJob) -> Correction | None:
    """The file with as few problems as the rules know how to leave; None where they know nothing to change."""
    current = named = checked
    said = {(finding.path, finding.problem.message) for finding in checked.findings}
    uncovered: list[Finding] = []
    written: dict[Path, Path] = {}  # as the file has it
    for _ in range(_ROUNDS):
        edits = _edits(current)
        if not edits:
            break
        changed = check_job(Document(apply(current.document, edits), current.document.name))
        if changed.document.text == current.document.text:
            break
        written |= {(*edit.path[:-1], edit.rename): edit.path for edit in edits if edit.rename}
        current = changed
        if edits[0].rename:
            named = changed  # what was meant, before any value was changed
        for finding in current.findings:
            if (finding.path, finding.problem.message) not in said:
                said.add((finding.path, finding.problem.message))
                uncovered.append(dataclasses.replace(finding, path=_as_written(finding.path, written)))
        if not current.findings:
            break
    changes = tuple(_changes(checked.document, current.document, written))
    costs = tuple(_costs(named.job, current.job))
    return Correction(current, tuple(uncovered), changes, costs) if changes else None


def _as_written(path: Path, written: dict[Path, Path]) -> Path:
    for length in range(len(path), 0, -1):
        if path[:length] in written:
            return (*written[path[:length]], *path[length:])
    return path


def _edits(checked: CheckedJob) -> list[Edit]:
    """What to change next. Names of keys come first, then axes and processes: sizes are judged by them."""
    renames = [Edit(finding.path, rename=finding.rename) for finding in checked.findings if finding.rename]
    if renames:
        return renames
    if moved := misplaced(checked.document.data):
        return [edit for name, value in moved.items() for edit in (Edit(("mesh", name)), Edit((name,), value))]
    found = {edit.path: edit for edit in (*_processes(checked), *_of_tables(checked))}
    of_mesh = [edit for path, edit in found.items() if path[0] in ("table_axis", "data_axis", "processes")]
    return of_mesh or list(found.values())


def _of_tables(checked: CheckedJob) -> Iterator[Edit]:
    """The rules' own corrections. All tables of a job have the same axes."""
    document, job = checked.document, checked.job
    axes: dict[str, Any] = {}
    for settings in job.tables.values():
        own = table_arguments(job, settings)
        _, fixes = own_problems(own)
        if fixes is None:  # nobody can guess the rows: the rest is judged without them
            _, fixes = own_problems(dataclasses.replace(own, rows=1))
        for argument, value in (fixes or {}).items():
            yield Edit(path_of(document, argument, settings.name), value)
        arguments = dataclasses.replace(handle_arguments(job, settings), **axes)
        unknown = _stand_ins(arguments)
        arguments = dataclasses.replace(arguments, **unknown)
        found = check(arguments)
        for changes in find_corrections(arguments, found)[:1] if found.problems else ():
            axes |= {name: value for name, value in changes.items() if name in ("table_axis", "data_axis")}
            for argument, value in (axes | changes).items():
                if argument in unknown:
                    continue
                if edit := _edit(document, argument, settings.name, value):
                    yield edit


def _stand_ins(arguments: Arguments) -> dict[str, int]:
    """Numbers that pass, for those that nobody can guess: what else is wrong is corrected without them."""
    devices = 1 if arguments.mesh is None else int(arguments.mesh.devices.size)
    names = ("tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node")
    return {name: devices for name in names if as_number(getattr(arguments, name)) is None}


def _processes(checked: CheckedJob) -> Iterator[Edit]:
    mesh, processes = checked.job.mesh, checked.document.data.get("processes")
    if mesh is None or not is_integer(processes) or processes < 1 or mesh.devices.size % processes == 0:
        return
    divisors = [number for number in range(1, mesh.devices.size + 1) if mesh.devices.size % number == 0]
    yield Edit(("processes",), nearest_of(processes, divisors)[0])


def _edit(document: Document, argument: str, table: str, value: Any) -> Edit | None:
    path = path_of(document, argument, table)
    if argument == "name":
        return None
    if argument == "data_axis" and path != ("data_axis",):
        # Written down only where it is not what is meant without it.
        return None
    if argument == "num_unique" and path[-1] != "num_unique":
        return None  # it follows tokens_per_batch
    if document.has(path):
        return Edit(path, value)
    if value is None:
        return None
    if argument == "logical_width":
        return Edit(path, value, after="width") if document.has((*path[:-1], "width")) else None
    return Edit(path, value) if len(path) == 1 else None


def _changes(
    before: Document, after: Document, written: dict[Path, Path]
) -> Iterator[tuple[str, str | None, str | None]]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    seen = set()
    for path, value in new.items():
        source = _as_written(path, written)
        seen.add(source)
        was = old.get(source)
        if source != path:
            yield ".".join(map(str, path)), f"{'.'.join(map(str, source))} = {was}", value
        elif was != value:
            yield ".".join(map(str, path)), was, value
    for path in old:
        if path not in seen:
            yield ".".join(map(str, path)), old[path], None


def _leaves(document: Document) -> Iterator[tuple[Path, str]]:
    def walk(path: Path, value: Any) -> Iterator[tuple[Path, str]]:
        if isinstance(value, dict):
            for name, inside in value.items():
                yield from walk((*path, name), inside)
        elif path:
            entry = document.entries.get(path)
            span = entry.value if entry else None
            yield path, document.text[span.start : span.end] if span else as_toml(str(value))

    yield from walk((), document.data)


def _costs(before: Job, after: Job) -> Iterator[str]:
    """What padding costs, of each table that was padded."""
    for name, new in after.tables.items():
        old = before.tables.get(name)
        if old is None or not is_integer(old.width) or not is_integer(new.width):
            continue
        if not 1 <= old.width < new.width:
            continue
        arguments = handle_arguments(after, new)
        found = check(arguments)
        if found.dtype is None or found.group_size is None or not is_integer(new.rows):
            continue
        extra = (new.width - old.width) * new.rows * found.dtype.itemsize
        share = 100 * (new.width - old.width) / old.width
        copies = 1 if after.mesh is None else math.prod(after.mesh.shape.values()) // found.group_size
        of_copies = f" in each of {copies} copies" if copies > 1 else ""
        on_each = readable_bytes(extra // found.group_size)
        yield (
            f"{name}: padding from {old.width} to {new.width} columns costs {readable_bytes(extra)} of weights"
            f"{of_copies} ({share:.1f} % more), {on_each} on each device"
        )


def readable_bytes(count: float) -> str:
    """In powers of 1024: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
