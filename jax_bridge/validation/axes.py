"""Reading mesh and axis arguments: what they may be, what is wrong with them, and which axes would do.

A mesh is read as its `shape`, an ordered mapping from axis name to size; JAX lets names be any hashable value.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from ..errors import Problem, show
from .mesh_outline import MeshOutline

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

AxisName: TypeAlias = Hashable
AxisNames: TypeAlias = AxisName | Sequence[AxisName]
MeshShape: TypeAlias = Mapping[AxisName, int]

_MAKE_A_MESH = "Build one with jax.make_mesh((4, 2), ('data', 'table')) or jax.sharding.Mesh(devices, axis_names)."


@dataclasses.dataclass(frozen=True)
class AxisReading:
    """An axis argument as read.

    Attributes:
        names: the axes as a tuple, in the mesh's own spelling where it knows them. Empty if the type was wrong.
        problems: what is wrong with the argument taken alone, other than unknown names.
        unknown: the names that the mesh does not have.
        guess: known names that were probably meant, unique, in order; may be empty.
    """

    names: tuple[AxisName, ...]
    problems: tuple[Problem, ...]
    unknown: tuple[Problem, ...]
    guess: tuple[AxisName, ...]

    @property
    def usable(self) -> bool:
        return not self.problems and not self.unknown


def is_mesh(value: object) -> TypeGuard[Mesh | MeshOutline]:
    """Whether ``value`` has axes and devices: a mesh of JAX's, or the outline of one."""
    return isinstance(value, MeshOutline) or _is_of_jax(value, "Mesh")


def _is_abstract(value: object) -> TypeGuard[AbstractMesh]:
    return _is_of_jax(value, "AbstractMesh")


def _is_of_jax(value: object, name: str) -> bool:
    # Whoever has a mesh of JAX's has imported it; nobody else should wait a second for that.
    sharding = sys.modules.get("jax.sharding")
    return sharding is not None and isinstance(value, getattr(sharding, name))


def mesh_problems(mesh: object) -> tuple[Problem, ...]:
    """What keeps `mesh` from carrying a table: not a mesh, no devices, a device twice, names that XLA cannot read."""
    if _is_abstract(mesh):
        message = f"async_emb mesh {mesh} is an AbstractMesh, which has no devices"
        return (
            Problem(
                message,
                ("Give a concrete mesh: the jax.sharding.Mesh, made of devices, that the program will run on.",),
                wrong_type=True,
                arguments=("mesh",),
            ),
        )
    if not is_mesh(mesh):
        message = f"async_emb mesh must be a jax.sharding.Mesh, not {type(mesh).__name__}: {show(mesh)}"
        return (Problem(message, (_MAKE_A_MESH,), wrong_type=True, arguments=("mesh",)),)
    if mesh.devices.size == 0:
        sizes = ", ".join(f"axis {name!r} has size {size}" for name, size in mesh.shape.items() if size == 0)
        return (Problem(f"async_emb mesh has no devices: {sizes}", (_MAKE_A_MESH,), arguments=("mesh",)),)
    counts = Counter(int(device.id) for device in mesh.devices.flat)
    if repeated := sorted(device_id for device_id, count in counts.items() if count > 1):
        message = f"async_emb mesh holds devices more than once: ids {show(repeated)} of {mesh}"
        advice = "Every device may hold one shard of the table; list each device once."
        return (Problem(message, (advice,), arguments=("mesh",)),)
    unreadable = [name for name in mesh.shape if isinstance(name, str) and (not name.isascii() or "\\" in name)]
    return tuple(
        Problem(
            f"async_emb mesh axis {name!r} must be named in ASCII, without a backslash",
            ("XLA ends the process when it compiles for any other mesh (jax 0.10.2). Rename the axis.",),
            arguments=("mesh",),
        )
        for name in unreadable
    )


def mesh_shape(mesh: object) -> MeshShape | None:
    """Axis sizes, or None if there are none to speak of."""
    return mesh.shape if is_mesh(mesh) or _is_abstract(mesh) else None


def axes_of(shape: MeshShape) -> str:
    """`'data' (size 4), 'table' (size 2)`, for messages."""
    return ", ".join(f"{name!r} (size {size})" for name, size in shape.items()) or "none"


def read_axes(mesh: Mesh | AbstractMesh | MeshOutline, argument: str, value: object) -> AxisReading:
    """Reads an axis argument: one axis name, or a tuple or list of axis names."""
    shape = mesh.shape
    wrong_type = _wrong_type(shape, argument, value)
    if wrong_type is not None:
        meant = [known for element in value for known in _in_mesh(shape, element)] if _is_set(value) else []
        return AxisReading((), (wrong_type,), (), tuple(name for name in shape if name in meant))

    names: list[AxisName] = []
    unknown: list[Problem] = []
    guess_list: list[AxisName] = []
    for element in value if isinstance(value, (tuple, list)) else (value,):
        known = _in_mesh(shape, element)
        names.append(known[0] if known else _plain(element))
        closest = known or _closest(shape, element)
        guess_list.extend(closest)
        if not known:
            unknown.append(_unknown_axis(mesh, argument, names[-1], closest))
    problems: list[Problem] = []
    if not names:
        message = f"async_emb {argument}={show(value)} names no axis; the mesh has axes {tuple(shape)}"
        problems.append(Problem(message, (f"Name at least one axis: {axes_of(shape)}.",), arguments=(argument,)))
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        message = f"async_emb {argument}={show(tuple(names))} repeats {show(repeated)}"
        problems.append(Problem(message, (f"Name every axis of {argument} once.",), arguments=(argument,)))
    return AxisReading(tuple(names), tuple(problems), tuple(unknown), tuple(dict.fromkeys(guess_list)))


def communicator_problems(
    shape: MeshShape, table_axis: Sequence[AxisName], data_axis: Sequence[AxisName]
) -> tuple[Problem, ...]:
    """What keeps ranks and token shards from matching one to one. All names must be known to the mesh."""
    table_axis, data_axis = tuple(table_axis), tuple(data_axis)
    missing_axes = [name for name in table_axis if name not in data_axis]
    outside = [name for name in data_axis if name not in table_axis and shape[name] > 1]
    off_communicator_shards = math.prod(shape[name] for name in outside)
    ways_out = "; or ".join(
        _change(table_axis, data_axis, choice) for choice in axis_choices(shape, table_axis, data_axis)
    )
    where = f"The mesh has axes {axes_of(shape)}"
    problems = []
    if missing_axes:
        reason = f"{where}: table_axis {table_axis}, data_axis {data_axis}."
        if outside:
            reason += (
                f" Adding {missing_axes} to data_axis would not be enough:"
                f" {axes_of({name: shape[name] for name in outside})} would stay outside table_axis."
            )
        message = (
            "async_emb requires token shards to vary across the communicator: "
            f"table_axis {missing_axes} missing from data_axis {data_axis}"
        )
        problems.append(Problem(message, (reason, f"Write {ways_out}."), arguments=("data_axis",)))
    if off_communicator_shards > 1:
        message = (
            "async_emb requires exactly one token shard per communicator rank: "
            f"data_axis {data_axis} shards tokens over {off_communicator_shards} positions "
            f"outside table_axis {table_axis}"
        )
        reason = f"{where}; of data_axis, {axes_of({name: shape[name] for name in outside})} lies outside table_axis."
        advice = f"Write {ways_out}, or reshape the mesh to one axis for both."
        problems.append(Problem(message, (reason, advice), arguments=("data_axis",)))
    return tuple(problems)


def axis_choices(
    shape: MeshShape, table_axis: Sequence[AxisName], data_axis: Sequence[AxisName], limit: int = 3
) -> list[tuple[tuple[AxisName, ...], tuple[AxisName, ...]]]:
    """Pairs `(table_axis, data_axis)` that match one to one, nearest to the given ones first.

    The given names must be known and unique; both lists may be empty. If the given pair matches, it is the only one.
    """
    table, data = tuple(table_axis), tuple(data_axis)
    choices: dict[tuple[tuple[AxisName, ...], tuple[AxisName, ...]], None] = {}
    for choice in _candidates(shape, table, data):
        if _match_one_to_one(shape, *choice):
            if choice == (table, data):
                return [choice]
            choices.setdefault(choice)
    return list(choices)[:limit]


def _candidates(
    shape: MeshShape, table: tuple[AxisName, ...], data: tuple[AxisName, ...]
) -> Iterator[tuple[tuple[AxisName, ...], tuple[AxisName, ...]]]:
    missing = tuple(name for name in table if name not in data)
    yield table, data
    yield table, data + missing
    yield table, tuple(name for name in data if name in table or shape[name] == 1) + missing
    yield table, table
    yield data, data  # The table over every axis that shards the tokens.
    yield data + missing, data + missing
    yield tuple(shape), tuple(shape)


def _match_one_to_one(shape: MeshShape, table: Sequence[AxisName], data: Sequence[AxisName]) -> bool:
    outside = (name for name in data if name not in table)
    return bool(table) and set(table) <= set(data) and all(shape[name] == 1 for name in outside)


def _change(
    table: tuple[AxisName, ...],
    data: tuple[AxisName, ...],
    choice: tuple[tuple[AxisName, ...], tuple[AxisName, ...]],
) -> str:
    changes = []
    if choice[0] != table:
        changes.append(f"table_axis={choice[0]!r}")
    if choice[1] != data:
        changes.append(f"data_axis={choice[1]!r}")
    outside = [name for name in data if name not in choice[1]]
    same = f" (tokens are then the same along {', '.join(map(repr, outside))})" if outside else ""
    return " with ".join(changes) + same


def _in_mesh(shape: MeshShape, element: object) -> tuple[AxisName, ...]:
    """The mesh's own spelling of an axis, as a tuple of one; empty if it has no such axis."""
    for name in shape:
        # 0, 0.0 and False are equal and hash alike, but only an integer may stand for the axis called 0.
        alike = type(name) is type(element) or _kind(name) == _kind(element) is not None
        if alike and name == element:
            return (name,)
    return ()


def _plain(element: object) -> AxisName:
    """NumPy's strings and integers as Python's, so that messages show the value and not its type."""
    kind = _kind(element)
    assert isinstance(element, Hashable)
    return kind(element) if kind else element


def _kind(element: object) -> Callable[[Any], str | int] | None:
    """`str` or `int` for values that may stand for names of that type."""
    if isinstance(element, str):
        return str
    return int if isinstance(element, (int, np.integer)) and not isinstance(element, bool) else None


def _closest(shape: MeshShape, element: object) -> tuple[AxisName, ...]:
    if isinstance(element, bytes):
        element = element.decode(errors="replace")
    if not isinstance(element, str):
        return ()
    by_text = {name.casefold(): name for name in shape if isinstance(name, str)}
    matches = difflib.get_close_matches(element.casefold(), by_text, n=1)
    return tuple(by_text[match] for match in matches)


def _unknown_axis(
    mesh: Mesh | AbstractMesh | MeshOutline, argument: str, axis: AxisName, closest: tuple[AxisName, ...]
) -> Problem:
    advice = f"{argument} names axis {show(axis)}; the mesh has axes {axes_of(mesh.shape)}."
    if closest:
        advice += f" The closest is {closest[0]!r}."
    elif not mesh.shape:
        advice += f" {_MAKE_A_MESH}"
    shown = repr(axis) if isinstance(axis, str) else show(axis)
    return Problem(f"async_emb axis {shown} is not a mesh axis of {mesh}", (advice,), arguments=(argument,))


def _is_set(value: object) -> TypeGuard[Set[object]]:
    return isinstance(value, (set, frozenset))


def _wrong_type(shape: MeshShape, argument: str, value: object) -> Problem | None:
    expected = f"Write one axis name or a tuple of several; the mesh has axes {axes_of(shape)}."
    if value is None:
        message = f"async_emb {argument}=None names no axis; the mesh has axes {tuple(shape)}"
        if argument == "data_axis":
            expected = f"data_axis names the axes that shard the tokens; there is no default. {expected}"
        return Problem(message, (expected,), wrong_type=True, arguments=(argument,))
    if _is_set(value):
        message = f"async_emb {argument}={show(value)} is a {type(value).__name__}, which has no order"
        return Problem(
            message, (f"The order of the axes numbers the ranks. {expected}",), wrong_type=True, arguments=(argument,)
        )
    for element in value if isinstance(value, (tuple, list)) else (value,):
        if not isinstance(element, (str, bytes, numbers.Number)) and not _in_mesh(shape, element):
            inside = "" if element is value else f" inside {show(value)}"
            message = (
                f"async_emb {argument} must be an axis name, or a tuple or list of axis names, "
                f"not {type(element).__name__}: {show(element)}{inside}"
            )
            return Problem(message, (expected,), wrong_type=True, arguments=(argument,))
    return None
