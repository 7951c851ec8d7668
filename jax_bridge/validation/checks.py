"""The checks behind `make_context_handle`, in their fixed order.

First each argument alone (types, signs, lists of what is supported), then the five checks of the contract (arguments
against the mesh and each other), then limits. A check runs whenever what it needs is known, so that one call reports
everything; the first problem in this order is the one raised.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_ext.common.batches import pad_width
from torch_ext.common.table_rules import (
    MAX_TOKENS,
    MAX_WIDTH,
    as_number,
    is_integer,
    option_problems,
    read_dtype,
)

from ..errors import Problem, show
from .axes import (
    AxisReading,
    communicator_problems,
    mesh_problems,
    mesh_shape,
    read_axes,
)
from .nodes import node_sizes, processes_in_order, split_process

_LIMITS = {"tokens_per_batch": MAX_TOKENS, "emb_width": MAX_WIDTH, "num_unique": MAX_TOKENS}
_MEANINGS = {
    "tokens_per_batch": "the global number of tokens in a batch, over all ranks",
    "emb_width": "the global width of a row in columns, over all ranks",
    "num_unique": "the global number of unique ids that a batch may hold, over all ranks",
    "num_devices_per_node": "how many devices of the mesh one node (machine) holds",
    "logical_width": "the global number of columns that are not padding",
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What `make_context_handle` was called with, unchecked."""

    mesh: Any
    table_axis: Any
    data_axis: Any
    tokens_per_batch: Any
    emb_width: Any
    num_unique: Any
    num_devices_per_node: Any
    name: Any
    purpose: Any
    dtype: Any
    logical_width: Any
    id_policy: Any
    padding_id: Any


@dataclasses.dataclass(frozen=True)
class Checked:
    """The arguments in one form. Entries whose own check failed are None or missing."""

    problems: tuple[Problem, ...]
    table: AxisReading | None
    data: AxisReading | None
    group_size: int | None
    integers: dict[str, int]
    dtype: np.dtype[Any] | None
    padding_id: int | None


def check(arguments: Arguments) -> Checked:
    """Runs every check that can run."""
    of_mesh = mesh_problems(arguments.mesh)
    shape = mesh_shape(arguments.mesh)
    mesh = None if of_mesh else arguments.mesh
    alone: list[Problem] = [*of_mesh]
    table = data = group_size = None
    if shape is not None:
        table = read_axes(arguments.mesh, "table_axis", arguments.table_axis)
        data = read_axes(arguments.mesh, "data_axis", arguments.data_axis)
        alone += [*table.problems, *data.problems]
        if table.usable:
            # None for an axis of size 0: nothing shards over no ranks.
            group_size = math.prod(shape[name] for name in table.names) or None

    integers: dict[str, int] = {}
    for argument in _MEANINGS:
        value = getattr(arguments, argument)
        if argument == "logical_width" and value is None:
            continue
        if problem := _not_a_positive_integer(argument, value, group_size, mesh):
            alone.append(problem)
        else:
            integers[argument] = int(value)
    integers.setdefault("logical_width", integers.get("emb_width", 0))
    dtype = read_dtype(arguments.dtype)
    padding_id = int(arguments.padding_id) if is_integer(arguments.padding_id) else None
    alone += option_problems(arguments, dtype)

    contract: list[Problem] = []
    if shape is not None and table is not None and data is not None:
        contract += _once([*table.unknown, *data.unknown])
        if table.usable and data.usable and math.prod(shape.values()) > 0:
            contract += communicator_problems(shape, table.names, data.names)
        if group_size is not None:
            ranks = f"table_axis {table.names} of sizes {tuple(shape[name] for name in table.names)}"
            contract += _uneven("tokens_per_batch", integers, group_size, ranks)
            contract += _uneven("emb_width", integers, group_size, ranks)

    of_nodes = [] if mesh is None else _node_problems(integers, mesh)
    problems = (*alone, *contract, *_limit_problems(integers), *of_nodes)
    return Checked(problems, table, data, group_size, integers, dtype, padding_id)


def _not_a_positive_integer(argument: str, value: object, group_size: int | None, mesh: Any) -> Problem | None:
    meaning = f"{argument} is {_MEANINGS[argument]}."
    if is_integer(value):
        if value > 0:
            return None
        return Problem(f"async_emb {argument}={show(int(value))} must be positive", (meaning,), arguments=(argument,))
    message = f"async_emb {argument}={show(value)} must be an integer, not {type(value).__name__}"
    number = as_number(value)
    if number is None or number <= 0:
        return Problem(message, (meaning,), wrong_type=True, arguments=(argument,))
    nearest: tuple[int, int] | None = None
    if argument in ("tokens_per_batch", "emb_width") and group_size is not None:
        nearest = nearest_multiples(number, group_size, _LIMITS[argument])
    elif argument == "num_devices_per_node" and mesh is not None:
        nearest = nearest_of(number, node_sizes(mesh))
    elif argument in ("num_unique", "logical_width"):
        nearest = nearest_multiples(number, 1, MAX_TOKENS)
    advice = f" Write {' or '.join(map(str, sorted(set(nearest))))}." if nearest else ""
    return Problem(message, (meaning + advice,), wrong_type=True, arguments=(argument,))


def _uneven(argument: str, integers: dict[str, int], group_size: int, ranks: str) -> Iterator[Problem]:
    value = integers.get(argument)
    if value is None or value % group_size == 0:
        return
    shown = show(value)
    reason = (
        f"{argument} is {_MEANINGS[argument]}; {ranks} has {group_size} ranks: "
        f"{shown} = {show(value // group_size)} * {group_size} + {value % group_size}, remainder {value % group_size}."
    )
    message = f"async_emb {argument}={shown} does not shard evenly over the {group_size}-rank communicator"
    below, above = nearest_multiples(value, group_size, _LIMITS[argument])
    if argument == "tokens_per_batch":
        valid = f"{below} or {above}" if below != above else f"{below}"
        advice = f"Over these ranks the nearest valid tokens_per_batch is {valid}."
        yield Problem(message, (reason, advice), arguments=(argument,))
        return
    if above >= value:
        advice = (
            f"Over these ranks the next multiple is emb_width={above} (pad_width({value}, {group_size})). "
            f"Add logical_width={value} to keep the padding out of the row means, and slice the rows to their first "
            f"{value} columns after the lookup."
        )
    else:
        advice = f"Over these ranks the widest row is emb_width={below}."
    yield Problem(message, (reason, advice), arguments=(argument,))


def _limit_problems(integers: dict[str, int]) -> Iterator[Problem]:
    for argument, limit in _LIMITS.items():
        if integers.get(argument, 0) > limit:
            unit = "the width limit of the kernels" if argument == "emb_width" else "the limit"
            message = f"async_emb {argument}={show(integers[argument])} is above {unit}, {limit}"
            yield Problem(message, (f"{argument} is {_MEANINGS[argument]}.",), arguments=(argument,))
    width, logical_width = integers.get("emb_width"), integers.get("logical_width")
    if width is not None and logical_width is not None and logical_width > width:
        message = f"async_emb logical_width={show(logical_width)} is above emb_width={show(width)}"
        advice = f"logical_width is {_MEANINGS['logical_width']}; emb_width counts them all."
        yield Problem(message, (advice,), arguments=("logical_width",))


def _node_problems(integers: dict[str, int], mesh: Any) -> Iterator[Problem]:
    per_node = integers.get("num_devices_per_node")
    if per_node is None:
        return
    num_devices = mesh.devices.size
    if num_devices % per_node:
        message = (
            f"async_emb num_devices_per_node={show(per_node)} does not divide the {num_devices} devices of the mesh"
        )
        reason = (
            f"num_devices_per_node is {_MEANINGS['num_devices_per_node']}: "
            f"{num_devices} = {num_devices // per_node} * {show(per_node)} + {num_devices % per_node}, "
            f"remainder {num_devices % per_node}."
        )
        advice = _valid_node_sizes(per_node, mesh)
        yield Problem(message, (reason, advice), arguments=("num_devices_per_node",))
        return
    processes = processes_in_order(mesh)
    if (split := split_process(processes, per_node)) is not None:
        process, first, second = split
        message = (
            f"async_emb num_devices_per_node={per_node} puts devices of process {process} on two nodes, but a process "
            "runs on one"
        )
        reason = (
            f"A node has {per_node} devices that follow each other in the mesh. Positions {first} and {second} are of "
            f"process {process} and would lie on nodes {first // per_node} and {second // per_node}; the processes in "
            f"the order of the mesh are {show(processes)}."
        )
        order = "Or order the devices of the mesh by process (jax.make_mesh does)."
        valid = _valid_node_sizes(per_node, mesh)
        advices = (reason, valid, *([order] if processes != sorted(processes) else []))
        yield Problem(message, advices, arguments=("num_devices_per_node",))


def _valid_node_sizes(per_node: int, mesh: Any) -> str:
    valid = " or ".join(map(str, sorted(set(nearest_of(per_node, node_sizes(mesh))))))
    return f"The nearest valid num_devices_per_node is {valid}."


def nearest_multiples(value: int | float, step: int, limit: int) -> tuple[int, int]:
    """The multiples of `step` in [step, limit] around `value`, below and above; the same if there is but one."""
    largest = limit // step * step
    below = min(max(math.floor(value) // step * step, step), largest)
    above = min(max(pad_width(max(math.ceil(value), 1), step), step), largest)
    return below, above


def nearest_of(value: int | float, choices: Sequence[int]) -> tuple[int, int]:
    """The choices (ascending, not empty) around ``value``, below and above; the same if there is but one."""
    below = max((number for number in choices if number <= value), default=choices[0])
    above = min((number for number in choices if number >= value), default=choices[-1])
    return below, above


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """One axis name misspelled in two arguments is one line with the advice of both."""
    merged: dict[str, Problem] = {}
    for problem in problems:
        earlier = merged.get(problem.message)
        advice = (*earlier.advice, *problem.advice) if earlier else problem.advice
        about = (*earlier.arguments, *problem.arguments) if earlier else problem.arguments
        advice, about = tuple(dict.fromkeys(advice)), tuple(dict.fromkeys(about))
        merged[problem.message] = dataclasses.replace(problem, advice=advice, arguments=about)
    return list(merged.values())


def size_warning(integers: dict[str, int]) -> str | None:
    """What is allowed but odd about the sizes."""
    tokens, num_unique = integers["tokens_per_batch"], integers["num_unique"]
    if num_unique <= tokens + 1:
        return None
    return (
        f"async_emb num_unique={num_unique} is above tokens_per_batch + 1 = {tokens + 1}: a batch cannot hold "
        f"that many unique ids, so every step moves padding. num_unique={tokens} is enough."
    )
