"""Reads a job file: which keys it has, and what they are in the words of `make_context_handle` and `AsyncEmbedding`.

Only what the format itself asks for is judged here: names of keys, tables where tables belong, what must be given. The
values are for `checking`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch_ext.common.table_rules import is_integer

from ..errors import Problem, show
from ..optimizers import RowwiseAdagrad
from ..validation.checks import nearest_of
from ..validation.mesh_outline import MeshOutline
from .document import Document
from .toml_positions import Path

MAX_DEVICES = 2**16
OPTIMIZERS = {"rowwise_adagrad": RowwiseAdagrad}

_JOB_KEYS = {
    "mesh": 'the sizes of the mesh axes: [mesh] with lines such as "table = 4"',
    "table_axis": 'the mesh axes that shard the columns: "table", ["data", "table"] or "data, table"',
    "data_axis": "the mesh axes that shard the tokens; those of table_axis if left out",
    "tokens_per_batch": "the tokens of a batch, over all ranks; a table may have its own",
    "processes": "how many processes share the devices of the mesh, as many each; 1 if left out",
    "num_devices_per_node": "devices on a node (machine); all if left out",
    "staleness": "1 or 0; 1 if left out",
    "tables": "a table of tables: [tables.NAME] for each",
}
_TABLE_KEYS = {
    "rows": "how many rows the table has",
    "width": "columns of a row, over all ranks, padding included",
    "logical_width": "columns that are not padding; all if left out",
    "dtype": "float32, bfloat16 or float16; float32 if left out",
    "tokens_per_batch": "the tokens of a batch for this table, over all ranks",
    "num_unique": "most distinct ids in a batch; tokens_per_batch if left out",
    "id_policy": '"error", "drop" or "clamp"; "error" if left out',
    "padding_id": "the id that reads zeros and is never trained; none if left out",
    "optimizer": 'how gradients change it: { type = "rowwise_adagrad", learning_rate = 0.05 }',
}
_SETTINGS = tuple(field.name for field in dataclasses.fields(RowwiseAdagrad))


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem, and the key that it is about: its value, or where that is missing whatever is nearest to it.

    `of_key` is set where the key itself is wrong, and `rename` is the one that was probably meant.
    """

    path: Path
    problem: Problem
    of_key: bool = False
    rename: str | None = None


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """One `[tables.NAME]`, unchecked. `optimizer` is None where its settings are wrong."""

    name: str
    rows: Any
    width: Any
    logical_width: Any
    dtype: Any
    tokens_per_batch: Any
    num_unique: Any
    id_policy: Any
    padding_id: Any
    optimizer: RowwiseAdagrad | None


@dataclasses.dataclass(frozen=True)
class Job:
    """A job file as read, its values unchecked; `mesh` is None where there is none to speak of."""

    mesh: MeshOutline | None
    table_axis: Any
    data_axis: Any
    num_devices_per_node: Any
    processes: int
    staleness: Any
    tables: dict[str, TableSettings]


def read_job(document: Document) -> tuple[Job, list[Finding]]:
    """The job, and what is wrong with the form of the file."""
    reader = _Reader(document.data)
    job = reader.job()
    return job, reader.findings


def misplaced(data: dict[str, Any]) -> dict[str, Any]:
    """Keys of the job that stand below [mesh], which takes all that follows it, and are missing where they belong."""
    mesh = data.get("mesh")
    below = mesh.items() if isinstance(mesh, dict) else ()
    named = f"{data.get('table_axis')} {data.get('data_axis')}"  # an axis may bear such a name
    return {
        name: value
        for name, value in below
        if name in _JOB_KEYS and name not in (*data, "tables") and name not in named
    }


class _Reader:
    def __init__(self, data: dict[str, Any]) -> None:
        self.findings: list[Finding] = []
        moved = misplaced(data)
        for name in moved:
            message = f"{name!r} is a key of the job, but stands below [mesh], where it is an axis"
            self._add(("mesh", name), message, "Write it above [mesh]: all keys of the job come before its tables.")
        if moved:
            data = {**data, **moved, "mesh": {n: size for n, size in data["mesh"].items() if n not in moved}}
        self._data = data

    def job(self) -> Job:
        data = self._data
        renamed = self._unknown((), data, _JOB_KEYS)
        mesh, processes = self._mesh(renamed)
        if "table_axis" not in data and "table_axis" not in renamed:
            self._missing((), "table_axis", _JOB_KEYS)
        table_axis = _axes(data.get("table_axis"), mesh)
        devices = 1 if mesh is None else int(mesh.devices.size)
        return Job(
            mesh=mesh,
            table_axis=table_axis,
            data_axis=_axes(data["data_axis"], mesh) if "data_axis" in data else table_axis,
            num_devices_per_node=data.get("num_devices_per_node", devices or 1),
            processes=processes,
            staleness=data.get("staleness", 1),
            tables=self._tables(renamed),
        )

    # ---- mesh and processes

    def _mesh(self, renamed: Sequence[str]) -> tuple[MeshOutline | None, int]:
        sizes = self._data.get("mesh")
        if sizes is None:
            if "mesh" not in renamed:
                self._missing((), "mesh", _JOB_KEYS)
            return None, 1
        if not isinstance(sizes, dict):
            self._add(
                ("mesh",),
                f"mesh={show(sizes)} must be a table of axis sizes",
                "Write [mesh], and below it a line for each axis, such as table = 4.",
            )
            return None, 1
        if not sizes:
            self._add(("mesh",), "mesh has no axes", "Write a line for each axis below [mesh], such as table = 4.")
            return None, 1
        wrong = {name: size for name, size in sizes.items() if not is_integer(size) or size < 0}
        for name, size in wrong.items():
            advice = "It is how many devices lie along the axis."
            self._add(("mesh", name), f"mesh axis {name!r}={show(size)} must be a positive integer", advice)
        if wrong:
            return None, 1
        count = math.prod(sizes.values())
        if count > MAX_DEVICES:
            self._add(("mesh",), f"mesh has {count} devices, more than {MAX_DEVICES}", f"Its axes are {show(sizes)}.")
            return None, 1
        processes = self._processes(count)
        return MeshOutline(sizes, processes), processes

    def _processes(self, devices: int) -> int:
        processes = self._data.get("processes", 1)
        if not is_integer(processes) or processes < 1:
            self._add(
                ("processes",), f"processes={show(processes)} must be a positive integer", "1 for a job of one process."
            )
            return 1
        if devices % processes:
            divisors = [number for number in range(1, devices + 1) if devices % number == 0]
            nearest = " or ".join(map(str, sorted(set(nearest_of(processes, divisors)))))
            message = f"processes={processes} does not divide the {devices} devices of the mesh"
            self._add(
                ("processes",), message, f"Every process has as many devices. The nearest that fits is {nearest}."
            )
            return 1
        return int(processes)

    # ---- tables

    def _tables(self, renamed: Sequence[str]) -> dict[str, TableSettings]:
        tables = self._data.get("tables")
        if tables is None:
            if "tables" not in renamed:
                self._missing((), "tables", _JOB_KEYS)
            return {}
        if isinstance(tables, list) or not isinstance(tables, dict):
            form = "an array of tables" if isinstance(tables, list) else show(tables)
            self._add(
                ("tables",), f"tables is {form}, but must be a table of tables", "Write [tables.NAME] for each table."
            )
            return {}
        if not tables:
            self._add(("tables",), "tables is empty", "Write [tables.NAME] for each table; give at least one.")
        if "tokens_per_batch" not in renamed and "tokens_per_batch" not in self._data:
            without = [n for n, t in tables.items() if isinstance(t, dict) and "tokens_per_batch" not in t]
            if without:
                self._missing((), "tokens_per_batch", _JOB_KEYS)
        read = {}
        for name, values in tables.items():
            if isinstance(values, dict):
                read[name] = self._table(name, values)
            else:
                advice = f"Write [tables.{name}], and below it its rows, width and optimizer."
                self._add(("tables", name), f"tables.{name}={show(values)} must be a table", advice)
        return read

    def _table(self, name: str, values: dict[str, Any]) -> TableSettings:
        path = ("tables", name)
        renamed = self._unknown(path, values, _TABLE_KEYS)
        for key in ("rows", "width", "optimizer"):
            if key not in values and key not in renamed:
                self._missing(path, key, _TABLE_KEYS)
        tokens = values.get("tokens_per_batch", self._data.get("tokens_per_batch"))
        return TableSettings(
            name=name,
            rows=values.get("rows"),
            width=values.get("width"),
            logical_width=values.get("logical_width"),
            dtype=values.get("dtype", "float32"),
            tokens_per_batch=tokens,
            num_unique=values.get("num_unique", tokens),
            id_policy=values.get("id_policy", "error"),
            padding_id=values.get("padding_id"),
            optimizer=self._optimizer((*path, "optimizer"), values["optimizer"]) if "optimizer" in values else None,
        )

    def _optimizer(self, path: Path, settings: Any) -> RowwiseAdagrad | None:
        where = ".".join(map(str, path))
        if not isinstance(settings, dict):
            advice = f"Write it as {_TABLE_KEYS['optimizer'].split(': ')[1]}."
            self._add(path, f"{where}={show(settings)} must be a table of settings", advice)
            return None
        kind = settings.get("type", "rowwise_adagrad")
        if not isinstance(kind, str) or kind not in OPTIMIZERS:
            advice = (
                f"It is one of {', '.join(map(repr, OPTIMIZERS))}; the optimizer of the dense part is not in this file."
            )
            self._add((*path, "type"), f"{where}.type={show(kind)} is no optimizer of rows", advice)
            return None
        renamed = self._unknown(path, settings, dict.fromkeys(("type", *_SETTINGS), ""))
        if "learning_rate" not in settings and "learning_rate" not in renamed:
            self._missing(path, "learning_rate", {"learning_rate": "a number"})
        if renamed or "learning_rate" not in settings:
            settings = {"learning_rate": 1.0} | settings  # said already
        known = {key: value for key, value in settings.items() if key in _SETTINGS}
        # Past __init__, which raises: here is where each setting stands.
        optimizer = object.__new__(RowwiseAdagrad)
        for field in dataclasses.fields(RowwiseAdagrad):
            object.__setattr__(optimizer, field.name, known.get(field.name, field.default))
        problems = list(optimizer.problems())
        self.findings += [Finding((*path, *problem.arguments), problem) for problem in problems]
        return None if problems else RowwiseAdagrad(**known)

    # ---- keys

    def _unknown(self, path: Path, values: dict[str, Any], known: dict[str, str]) -> list[str]:
        """Reports keys that are not `known`. Returns those that were probably meant, if they are not there."""
        meant = []
        for key in values:
            if key in known:
                continue
            closest = [name for name in _closest(key, known) if name not in values and name not in meant]
            where = ".".join(map(str, path)) if path else "the job"
            advice = f"The closest is {closest[0]!r}." if closest else f"The keys of {where} are {', '.join(known)}."
            problem = Problem(f"async_emb job: {key!r} is no key of {where}", (advice,))
            self.findings.append(Finding((*path, key), problem, of_key=True, rename=closest[0] if closest else None))
            meant += closest[:1]
        return meant

    def _missing(self, path: Path, key: str, meanings: dict[str, str]) -> None:
        where = ".".join(map(str, path)) if path else "the job"
        problem = Problem(f"async_emb job: {where} has no {key}", (f"{key} is {meanings[key]}.",))
        self.findings.append(Finding((*path, key), problem))

    def _add(self, path: Path, message: str, *advice: str) -> None:
        self.findings.append(Finding(path, Problem(f"async_emb job: {message}", advice)))


def _axes(value: Any, mesh: MeshOutline | None) -> Any:
    """Axes as people write them; "data, table" is two, unless the mesh has an axis of that very name."""
    if isinstance(value, str) and "," in value and (mesh is None or value not in mesh.shape):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value


def _closest(key: str, known: dict[str, str]) -> Iterator[str]:
    by_text = {name.replace("_", ""): name for name in known}
    text = key.casefold().replace("-", "").replace("_", "")
    return (by_text[match] for match in difflib.get_close_matches(text, by_text, n=3, cutoff=0.6))
