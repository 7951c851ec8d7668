"""What ``AsyncEmbedding`` asks of its arguments: all that is wrong with them, in the words of its own signature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_ext.common.batches import pad_width
from torch_ext.common.table_arguments import CommonTableArguments
from torch_ext.common.table_rules import (
    MAX_WIDTH,
    as_number,
    is_integer,
    largest,
    narrow_padding_problem,
    size_problem,
)

from ..errors import Problem, raise_problems, show
from ..optimizers import RowOptimizer
from .axes import is_mesh, mesh_shape, read_axes
from .checks import Arguments, check
from .corrections import find_corrections

# Arguments of make_context_handle too. The others of that are worked out from what AsyncEmbedding is given.
_SHARED = ("table_axis", "data_axis", "name", "dtype", "id_policy", "padding_id", "num_unique")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableArguments(CommonTableArguments):
    """What ``AsyncEmbedding`` was called with; ``num_unique`` may be None, ``data_axis`` may not."""

    mesh: Any
    table_axis: Any
    data_axis: Any


def check_table(arguments: TableArguments) -> np.dtype[Any]:
    """The table's dtype, if nothing is wrong.

    Raises:
        ContextError: with every problem of the configuration.
    """
    problems, fixes = own_problems(arguments)
    shared = _as_handle_arguments(arguments)
    checked = check(shared)
    problems += checked.problems
    if problems:
        corrections = [] if fixes is None else _own_corrections(arguments, fixes, shared, checked)
        raise_problems(problems, corrections, call="AsyncEmbedding")
    assert checked.dtype is not None
    return checked.dtype


def own_problems(arguments: TableArguments) -> tuple[list[Problem], dict[str, Any] | None]:
    """What is wrong with the arguments that ``make_context_handle`` does not have, and what to change; None where
    nobody can guess that."""
    where = f"async_emb {show(arguments.name)}"
    problems: list[Problem] = []
    fixes: dict[str, Any] | None = {}
    for argument in ("rows", "width"):
        value = getattr(arguments, argument)
        problem = size_problem(where, argument, value)
        if problem is None:
            continue
        problems.append(problem)
        number = as_number(value)
        if number is None or number < 1:
            fixes = None
        elif fixes is not None:
            fixes[argument] = min(round(number), largest(argument))
    if isinstance(arguments.optimizer, type) or not isinstance(arguments.optimizer, RowOptimizer):
        message = (
            f"{where}: optimizer={show(arguments.optimizer)} is a {type(arguments.optimizer).__name__}, but must be an "
            "instance with init and update_start, such as RowwiseAdagrad(learning_rate=0.05). An optax optimizer is "
            "for the dense parameters: give it to train_step"
        )
        problems.append(Problem(message, wrong_type=True, arguments=("optimizer",)))
        fixes = None
    if arguments.init is not None and not callable(arguments.init):
        message = f"{where}: init={show(arguments.init)} is a {type(arguments.init).__name__}, but must be a function"
        advice = "It is called as init(key, (rows, width)) and returns a float array of that shape; None for a default."
        problems.append(Problem(message, (advice,), wrong_type=True, arguments=("init",)))
        fixes = fixes if fixes is None else fixes | {"init": None}
    if narrow := narrow_padding_problem(where, arguments.padding_id):
        problems.append(narrow)
        fixes = fixes if fixes is None else fixes | {"padding_id": -1}
    return problems, fixes


def _as_handle_arguments(arguments: TableArguments) -> Arguments:
    """For the smallest batch there is. What ``own_problems`` has refused is replaced by something that passes."""
    mesh = arguments.mesh
    ranks = ranks_of(mesh, arguments.table_axis)
    width = arguments.width if is_integer(arguments.width) and 1 <= arguments.width <= MAX_WIDTH else ranks
    fits = narrow_padding_problem("", arguments.padding_id) is None
    devices = mesh.devices.size if is_mesh(mesh) else 1
    return Arguments(
        tokens_per_batch=ranks,
        emb_width=pad_width(width, ranks),
        logical_width=int(width),
        num_devices_per_node=devices or 1,
        purpose="train",
        mesh=mesh,
        table_axis=arguments.table_axis,
        data_axis=arguments.data_axis,
        name=arguments.name,
        dtype=arguments.dtype,
        id_policy=arguments.id_policy,
        padding_id=arguments.padding_id if fits else None,
        num_unique=ranks if arguments.num_unique is None else arguments.num_unique,
    )


def _own_corrections(
    arguments: TableArguments, fixes: dict[str, Any], shared: Arguments, checked: Any
) -> Sequence[dict[str, Any]]:
    """Arguments of ``AsyncEmbedding`` to change, each checked to pass."""
    found: list[dict[str, Any]] = []
    for correction in find_corrections(shared, checked) if checked.problems else [{}]:
        changes = {name: value for name, value in correction.items() if name in _SHARED} | fixes
        if "num_unique" in changes:  # found for the smallest batch there is; no bound suits every batch
            changes["num_unique"] = None
        if not changes or changes in found:
            continue
        changed = dataclasses.replace(arguments, **changes)
        if not own_problems(changed)[0] and not check(_as_handle_arguments(changed)).problems:
            found.append(changes)
    return found


def staleness_problem(staleness: object) -> Problem | None:
    """What is wrong with the schedule of a step over tables."""
    if is_integer(staleness) and staleness in (0, 1):
        return None
    message = f"async_emb train_step: staleness={show(staleness)} must be 0 or 1"
    advice = "1 hides lookups and updates behind the dense part, but reads rows that miss one update; 0 is exact."
    return Problem(message, (advice,), wrong_type=not is_integer(staleness), arguments=("staleness",))


def ranks_of(mesh: Any, table_axis: Any) -> int:
    """How many ranks share the table; 1 where mesh or axis are wrong, which ``check`` will say."""
    shape = mesh_shape(mesh)
    if shape is None:
        return 1
    reading = read_axes(mesh, "table_axis", table_axis)
    return (math.prod(shape[name] for name in reading.names) or 1) if reading.usable else 1
