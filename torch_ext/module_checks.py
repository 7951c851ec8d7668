"""What ``AsyncEmbedding`` asks of its arguments, all that is wrong with them at once, and of token ids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_ext.common.errors import ContextError, IdError, Problem, raise_problems, show
from torch_ext.common.row_optimizers import RowwiseAdagrad
from torch_ext.common.table_arguments import CommonTableArguments
from torch_ext.common.table_rules import (
    MAX_TOKENS,
    is_integer,
    narrow_padding_problem,
    option_problems,
    read_dtype,
    size_problem,
)
from torch_ext.ranks import Ranks, ThreadRanks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableArguments(CommonTableArguments):
    """What a table was made with; see ``AsyncEmbedding``."""

    ranks: Any
    purpose: Any = "train"


def check_table(arguments: TableArguments) -> None:
    """Raises ContextError with every problem of the arguments."""
    if problems := list(_table_problems(arguments)):
        raise_problems(problems, call="AsyncEmbedding")


def check_module(arguments: TableArguments, staleness: Any, gradient_scale: Any, sync_errors: Any, seed: Any) -> None:
    """Raises ContextError with every problem of a module's arguments, the table's and its own."""
    problems = [*_table_problems(arguments)]
    where = f"async_emb {show(arguments.name)}"
    if not is_integer(staleness) or staleness not in (0, 1):
        message = f"{where}: staleness={show(staleness)} must be 0 or 1"
        advice = "1 hides updates behind the dense part, but reads rows that miss one update; 0 is exact."
        problems.append(Problem(message, (advice,), wrong_type=not is_integer(staleness)))
    is_number = isinstance(gradient_scale, (int, float)) and not isinstance(gradient_scale, bool)
    if not is_number or not math.isfinite(gradient_scale):
        message = f"{where}: gradient_scale={show(gradient_scale)} must be a finite number"
        problems.append(Problem(message, ("Gradient rows are multiplied by it.",), wrong_type=not is_number))
    if not isinstance(sync_errors, bool):
        message = f"{where}: sync_errors={show(sync_errors)} must be True or False"
        problems.append(Problem(message, ("True lets step() wait, and raise what it has to say.",), wrong_type=True))
    if not is_integer(seed) or not 0 <= seed < 2**63:
        message = f"{where}: seed={show(seed)} must be an integer in [0, 2^63)"
        problems.append(Problem(message, ("It makes the initial weights.",), wrong_type=not is_integer(seed)))
    if problems:
        raise_problems(problems, call="AsyncEmbedding")


def _table_problems(arguments: TableArguments) -> Iterator[Problem]:
    where = f"async_emb {show(arguments.name)}"
    for argument in ("rows", "width"):
        if problem := size_problem(where, argument, getattr(arguments, argument)):
            yield problem
    if isinstance(arguments.optimizer, type) or not isinstance(arguments.optimizer, RowwiseAdagrad):
        message = (
            f"{where}: optimizer={show(arguments.optimizer)} is a {type(arguments.optimizer).__name__}, but must be a "
            "row optimizer, such as RowwiseAdagrad(learning_rate=0.05). One of torch.optim is for the dense parameters"
        )
        yield Problem(message, wrong_type=True)
    if arguments.init is not None and not callable(arguments.init):
        message = f"{where}: init={show(arguments.init)} is a {type(arguments.init).__name__}, but must be a function"
        advice = "It is called as init(generator, (rows, width)); None for a default. load_state_dict takes a tensor."
        yield Problem(message, (advice,), wrong_type=True)
    dtype = (
        read_dtype(str(arguments.dtype).removeprefix("torch.")) if isinstance(arguments.dtype, torch.dtype) else None
    )
    yield from option_problems(arguments, dtype)
    if narrow := narrow_padding_problem(where, arguments.padding_id):
        yield narrow
    number = arguments.num_unique
    if number is not None and (not is_integer(number) or not 1 <= number <= MAX_TOKENS):
        message = f"{where}: num_unique={show(number)} must be an integer in [1, 2^31), or None"
        advice = "It is the most distinct ids that a batch of all ranks may hold; None for as many as tokens."
        yield Problem(message, (advice,), wrong_type=not is_integer(number))
    if isinstance(arguments.ranks, ThreadRanks):
        message = f"{where}: ranks={show(arguments.ranks)} is all of them; give the one that this thread is"
        yield Problem(message, ("ThreadRanks(4).run(f) calls f once for each rank.",), wrong_type=True)
    elif not isinstance(arguments.ranks, Ranks):
        message = f"{where}: ranks={show(arguments.ranks)} must be ProcessRanks() or a rank of ThreadRanks"
        yield Problem(message, wrong_type=True)


def flat_ids(name: str, token_ids: Any) -> Tensor:
    """Token ids of any shape as the native calls take them: int32 or int64, [tokens], contiguous.

    Raises:
        IdError: they are not integers on the CPU.
    """
    ids = torch.as_tensor(token_ids)
    if ids.numel() == 0 and not isinstance(token_ids, Tensor):
        ids = ids.to(torch.int32)  # of an empty list
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        dtype = str(ids.dtype).removeprefix("torch.")
        raise IdError(f"async_emb {name!r}: token ids are {dtype}, but must be integers")
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):
        raise IdError(
            f"async_emb {name!r}: AsyncEmbedding was called inside of torch.func.vmap, grad or another transformation; "
            "call it outside, on ids of any shape at once, and transform what is done with its rows"
        )
    if ids.device.type != "cpu":
        raise IdError(f"async_emb {name!r}: token ids are on {ids.device}, but the table is on the CPU: use ids.cpu()")
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.to(torch.int64)
    return ids.reshape(-1).contiguous()


def require_cpu_module(name: str, dtype: torch.dtype, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuses what ``module.to(...)`` and the like would do to the table."""
    probe = torch.empty(0, dtype=dtype)
    moved = fn(probe)
    if moved.dtype == probe.dtype and moved.device == probe.device:
        return
    raise ContextError(
        f"async_emb {name!r}: a table is made on the CPU in its dtype and stays there, but the module was to become "
        f"{str(moved.dtype).removeprefix('torch.')} on {moved.device}: make it with dtype=..., or move only the other "
        "modules, and its rows"
    )
