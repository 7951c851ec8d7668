"""What the logical form of a table must be before a table takes it: shapes, dtypes, and contents that can have been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ext.common.errors import Problem, show
from torch_ext.table import Table

STAGED = ("staged_ids", "staged_grads", "staged_apply")
_MOST_STEPS = 2**31 - 1  # a step is an int32 in the kernels
_FLUSH = "Flush before saving: nothing is staged then, and any schedule and number of ranks goes on from it."


def state_problems(table: Table, found: Mapping[str, Any], *, may_stage: bool) -> list[Problem]:
    """All that is wrong with a logical form, for this table.

    Args:
        may_stage: whether the schedule can go on from staged gradients.
    """
    where = f"async_emb {table.name!r}:"
    problems = list(_not_tensors(where, found)) or list(_misfits(where, table, found))
    if problems:  # contents of another shape say nothing
        return problems
    problems += _impossible_steps(where, found)
    staged = [key for key in STAGED if key in found]
    if staged and len(staged) < len(STAGED):
        missing = ", ".join(key for key in STAGED if key not in found)
        problems.append(Problem(f"{where} the state has {', '.join(staged)}, but no {missing}", (_FLUSH,)))
    elif staged:
        problems += _impossible_staged(where, table, found, may_stage)
    return problems


def _not_tensors(where: str, found: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in found.items():
        if not isinstance(value, Tensor):
            advice = (
                "load_arrays takes NumPy arrays, as to_arrays gives them; torch.from_numpy makes tensors of others."
            )
            yield Problem(f"{where} {key} is a {type(value).__name__}, but must be a torch.Tensor", (advice,), True)


def _misfits(where: str, table: Table, found: Mapping[str, Tensor]) -> Iterator[Problem]:
    wanted: dict[str, tuple[list[int], torch.dtype | None]] = {"weight": ([table.rows, table.width], None)}
    for key, array in table.optimizer.init(table.rows).items():
        wanted[key] = (list(array.shape), getattr(torch, array.dtype.name))
    wanted |= {"step": ([], None), "staged_apply": ([], torch.bool)}
    if "staged_ids" in found:
        tokens = found["staged_ids"].numel()
        wanted |= {"staged_ids": ([tokens], None), "staged_grads": ([tokens, table.width], table.dtype)}
    for key, (shape, dtype) in wanted.items():
        if (tensor := found.get(key)) is None:
            continue
        if list(tensor.shape) != shape or dtype not in (None, tensor.dtype):
            needed = f"{'' if dtype is None else _name_of(dtype)}{shape}"
            message = f"{where} {key} is {_name_of(tensor.dtype)}{list(tensor.shape)}, but the table needs {needed}"
            yield Problem(message)
        elif key in ("step", "staged_ids") and not _is_integer(tensor):
            yield Problem(f"{where} {key} is {_name_of(tensor.dtype)}, but must be of an integer dtype")
        elif key == "weight" and not tensor.is_floating_point():
            yield Problem(f"{where} weight is {_name_of(tensor.dtype)}, but must be of a floating-point dtype")


def _impossible_steps(where: str, found: Mapping[str, Tensor]) -> Iterator[Problem]:
    steps = int(found["step"]) if "step" in found else 0
    if not 0 <= steps <= _MOST_STEPS:
        yield Problem(f"{where} step={show(steps)} must be in [0, 2^31)", ("It is the number of steps taken.",))
        return
    last = found.get("last_step")
    if last is None or not last.numel():
        return
    # An update of step k writes k + 1, and of staged gradients there was none.
    most = steps - 1 if "staged_ids" in found else steps
    wrong = torch.nonzero((last < 0) | (last > most)).reshape(-1)
    if len(wrong):
        row = int(wrong[0])
        message = f"{where} last_step of row {row} is {int(last[row])}, outside of the {most} updates that were made"
        advice = f"So it is in {len(wrong)} rows: load step and last_step of one moment, or leave both out."
        yield Problem(message, (advice,))


def _impossible_staged(where: str, table: Table, found: Mapping[str, Tensor], may_stage: bool) -> Iterator[Problem]:
    ids = found["staged_ids"].to(torch.int64)
    tokens = len(ids)
    if not may_stage:
        message = f"{where} the state has gradients of {tokens} ids staged, which staleness=0 never applies"
        yield Problem(message, (f"Load it into a table with staleness=1. {_FLUSH}",))
    if "step" not in found or int(found["step"]) == 0:
        yield Problem(f"{where} the state has gradients staged before the first step", ("Load step, too.",))
    if not tokens or tokens % table.ranks.size:
        message = f"{where} staged gradients are of {tokens} ids, which {table.ranks.size} ranks cannot share evenly"
        yield Problem(message, (f"Staged gradients keep their batch size. {_FLUSH}",))
    outside = torch.nonzero((ids < -1) | (ids >= table.rows)).reshape(-1)
    if len(outside):
        position = int(outside[0])
        message = (
            f"{where} staged_ids has {len(outside)} ids outside of the table's rows [0, {table.rows}): "
            f"{int(ids[position])} at position {position} is the first"
        )
        yield Problem(message, ("-1 is a token that trains nothing; no other id is outside of the table.",))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
