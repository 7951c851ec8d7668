"""The logical form of a table: one table [rows, width] and what goes with it, whatever number of ranks holds it.

| key | shape | dtype | |
|---|---|---|---|
| weight | [rows, width] | the table's | padding removed |
| accumulator | [rows] | float32 | |
| last_step | [rows] | int32 | of the lazy rule |
| step | [] | int64 | updates that were staged so far |
| staged_ids | [tokens] | int32 | only where gradients are staged; -1 trains nothing |
| staged_grads | [tokens, width] | the table's | |
| staged_apply | [] | bool | |

A lookup that was started in advance is not in it: whoever goes on looks its ids up again, and gets the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from torch_ext.common.errors import ContextError, Problem, raise_problems
from torch_ext.state_checks import STAGED, state_problems
from torch_ext.table import Table


def gather(table: Table) -> dict[str, Tensor]:
    """The logical form, on every rank; all of them call it."""
    table.finish()
    ranks = table.ranks
    shards = ranks.gather(f"gather table {table.name!r}", table.shard)
    whole = {"weight": torch.cat(shards, dim=1)[:, : table.width].contiguous()}
    whole |= {key: tensor.clone() for key, tensor in table.state.items()}
    whole["step"] = torch.tensor(table.steps)
    if (staged := table.staged()) is not None:
        table.saved_step = table.staged_step
        ids, grads, apply = staged
        what = f"gather what is staged in table {table.name!r}"
        whole["staged_ids"] = torch.cat(ranks.gather(what, ids))
        whole["staged_grads"] = torch.cat(ranks.gather(what, grads))[:, : table.width].contiguous()
        whole["staged_apply"] = torch.stack(ranks.gather(what, torch.tensor(apply))).all()
    return whole


def fits(table: Table, found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Keys of the logical form that ``found`` lacks, and those of ``found`` that are none."""
    needed = ["weight", *table.optimizer.init(1), "step"]
    staged = STAGED if any(key in found for key in STAGED) else ()
    return [key for key in (*needed, *staged) if key not in found], [
        key for key in found if key not in (*needed, *STAGED)
    ]


def load(table: Table, found: Mapping[str, Any], *, may_stage: bool = True, why_not: str | None = None) -> None:
    """Takes a logical form, on any number of ranks, into the table's own storage; all ranks call it.

    Drops what is under way. Optimizer tensors that are missing start fresh. The ranks meet before anything changes.

    Args:
        may_stage: whether the schedule can go on from staged gradients.
        why_not: a reason of the caller's to change nothing, on any rank.

    Raises:
        ContextError: something does not fit, on any rank, all of it listed; nothing has changed, on any.
    """
    problems = [*([] if why_not is None else [Problem(why_not)]), *state_problems(table, found, may_stage=may_stage)]
    table.finish()
    said = table.ranks.exchange(f"load table {table.name!r}", problems[0].message if problems else None)
    if problems:
        raise_problems(problems)
    if refusing := [rank for rank, message in enumerate(said) if message is not None]:
        error = ContextError(f"async_emb {table.name!r}: rank {refusing[0]} cannot load its state: {said[refusing[0]]}")
        error.add_note("Nothing has changed, on any rank.")
        raise error

    table.drop()
    table.ranks.exchange(f"load table {table.name!r}, second part", None)  # nobody reads this rank's shard any more
    shard, columns = table.shard, table.columns()
    fresh = {key: torch.from_numpy(array) for key, array in table.optimizer.init(table.rows).items()}
    with torch.no_grad():
        if "weight" in found:
            shard.zero_()
            shard[:, : columns.stop - columns.start] = found["weight"][:, columns].to(table.dtype)
        for key, tensor in table.state.items():
            tensor.copy_(found.get(key, fresh[key]))
    table.steps = int(found["step"]) if "step" in found else 0
    if all(key in found for key in STAGED):
        ids, grads, apply = (found[key] for key in STAGED)
        padded = torch.zeros((len(grads), table.padded_width), dtype=table.dtype)
        padded[:, : table.width] = grads
        table.restore_staged(ids.reshape(-1).to(torch.int32), padded, bool(apply))


def to_arrays(table: Table) -> dict[str, np.ndarray[Any, Any]]:
    """``gather`` as NumPy arrays; bfloat16 is that of ml_dtypes."""
    return {key: to_numpy(tensor) for key, tensor in gather(table).items()}


def load_arrays(table: Table, arrays: Mapping[str, Any], *, may_stage: bool = True) -> None:
    """``load`` of NumPy arrays; every key but ``weight`` may be missing."""
    missing, unexpected = fits(table, arrays)
    if unexpected or "weight" in missing:
        raise ContextError(
            f"async_emb {table.name!r}: the arrays are {sorted(arrays)}, but the table has "
            f"{['weight', *table.optimizer.init(1), 'step', *STAGED]}"
        )
    load(table, {key: from_numpy(array) for key, array in arrays.items()}, may_stage=may_stage)


def from_numpy(array: Any) -> Tensor:
    """A tensor of a copy of an array, bfloat16 too."""
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The same elements, bfloat16 too."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
