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

from torch_ext.common.errors import ContextError
from torch_ext.table import Table

STAGED = ("staged_ids", "staged_grads", "staged_apply")


def gather(table: Table) -> dict[str, Tensor]:
    """The logical form, on every rank; all of them call it."""
    table.finish()
    ranks = table.ranks
    shards = ranks.gather("gather a table", table.shard)
    whole = {"weight": torch.cat(shards, dim=1)[:, : table.width].contiguous()}
    whole |= {key: tensor.clone() for key, tensor in table.state.items()}
    whole["step"] = torch.tensor(table.steps)
    if (staged := table.staged()) is not None:
        ids, grads, apply = staged
        whole["staged_ids"] = torch.cat(ranks.gather("gather staged ids", ids))
        whole["staged_grads"] = torch.cat(ranks.gather("gather staged gradients", grads))[:, : table.width].contiguous()
        whole["staged_apply"] = torch.stack(ranks.gather("gather staged flags", torch.tensor(apply))).all()
    return whole


def fits(table: Table, found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Keys of the logical form that ``found`` lacks, and those of ``found`` that are none."""
    needed = ["weight", *table.optimizer.init(1), "step"]
    staged = STAGED if any(key in found for key in STAGED) else ()
    return [key for key in (*needed, *staged) if key not in found], [
        key for key in found if key not in (*needed, *STAGED)
    ]


def load(table: Table, found: Mapping[str, Any]) -> None:
    """Takes a logical form, on any number of ranks, into the table's own storage; all ranks call it.

    Drops what is under way. Optimizer tensors that are missing start fresh.

    Raises:
        ContextError: a shape or dtype does not fit; nothing has changed.
    """
    fresh = {key: torch.from_numpy(array) for key, array in table.optimizer.init(table.rows).items()}
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {"weight": ((table.rows, table.width), None)}
    wanted |= {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in fresh.items()}
    for key, (shape, dtype) in wanted.items():
        tensor = found.get(key)
        if tensor is None or (tuple(tensor.shape) == shape and dtype in (None, tensor.dtype)):
            continue
        shown = "" if dtype is None else f"{str(dtype).removeprefix('torch.')}"
        raise ContextError(
            f"async_emb {table.name!r}: {key} is {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, but "
            f"the table needs {shown}{list(shape)}"
        )
    staged = [found[key] for key in STAGED] if all(key in found for key in STAGED) else None
    if staged is not None:
        _require_staged(table, *staged)

    table.finish()
    table.drop()
    table.ranks.exchange("load a table", None)  # nobody reads this rank's shard any more
    shard, columns = table.shard, table.columns()
    with torch.no_grad():
        if "weight" in found:
            shard.zero_()
            shard[:, : columns.stop - columns.start] = found["weight"][:, columns].to(table.dtype)
        for key, tensor in table.state.items():
            tensor.copy_(found.get(key, fresh[key]))
    table.steps = int(found["step"]) if "step" in found else 0
    if staged is not None:
        ids, grads, apply = staged
        padded = torch.zeros((len(grads), table.padded_width), dtype=table.dtype)
        padded[:, : table.width] = grads
        table.restore_staged(ids.to(torch.int32), padded, bool(apply))


def to_arrays(table: Table) -> dict[str, np.ndarray[Any, Any]]:
    """``gather`` as NumPy arrays; bfloat16 is that of ml_dtypes."""
    return {key: to_numpy(tensor) for key, tensor in gather(table).items()}


def load_arrays(table: Table, arrays: Mapping[str, Any]) -> None:
    """``load`` of NumPy arrays; every key but ``weight`` may be missing."""
    missing, unexpected = fits(table, arrays)
    if unexpected or "weight" in missing:
        raise ContextError(
            f"async_emb {table.name!r}: the arrays are {sorted(arrays)}, but the table has "
            f"{['weight', *table.optimizer.init(1), 'step', *STAGED]}"
        )
    load(table, {key: from_numpy(array) for key, array in arrays.items()})


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


def _require_staged(table: Table, ids: Tensor, grads: Tensor, apply: Tensor) -> None:
    tokens = len(ids)
    if tuple(grads.shape) == (tokens, table.width) and tokens > 0 and tokens % table.ranks.size == 0:
        return
    error = ContextError(
        f"async_emb {table.name!r}: staged gradients of {tokens} ids are {list(grads.shape)}, but must be [{tokens}, "
        f"{table.width}] over {table.ranks.size} ranks"
    )
    error.add_note(
        "Staged gradients keep their batch size, which the number of ranks must divide: flush before saving."
    )
    raise error
