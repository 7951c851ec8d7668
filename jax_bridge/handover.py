"""A table from one framework to the other, and back: the logical form, and an ordinary ``torch.nn.Embedding``.

The logical form is one flat mapping of arrays that knows no layout. ``torch_ext.AsyncEmbedding`` has the same as its
``state_dict``, and ``jax_bridge.table_files`` writes it to safetensors:

| key | shape | dtype | |
|---|---|---|---|
| weight | [rows, width] | the table's | padding removed |
| accumulator, ... | [rows] | the optimizer's | the optimizer's arrays, by name |
| last_step | [rows] | int32 | of the lazy rule |
| step | [] | int64 | steps taken; not every holder knows it |
| staged_ids | [tokens] | int32 | only where gradients are staged; -1 trains nothing |
| staged_grads | [tokens, width] | the table's | |
| staged_apply | [] | bool | |

A lookup that was armed is not in it: whoever goes on looks the batch up again, and gets the same rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .embedding import AsyncEmbedding, TableState
from .errors import ContextError, Problem, raise_problems, show
from .steps.snapshots import Snapshot

if TYPE_CHECKING:
    from torch_ext.plain_embedding import Embedding  # torch comes in with the first call that needs it

Logical = Mapping[str, np.ndarray[Any, Any]]
STAGED = ("staged_ids", "staged_grads", "staged_apply")


# ---- the logical form


def logical_table(table: AsyncEmbedding, state: TableState, *, step: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    """The logical form of a table: host arrays, a copy. Over several processes all of them call it.

    Args:
        table: the table.
        state: its state, with nothing staged: of the exact schedule, or after ``flush``.
        step: ``state.step`` of the training step, to be kept too.
    """
    weight, optimizer = table.to_arrays(state)
    steps = {} if step is None else {"step": np.array(step, np.int64)}
    return {"weight": weight, **optimizer, **steps}


def from_snapshot(snapshot: Snapshot, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The logical form of one table of a snapshot, staged gradients included. Copies nothing."""
    saved = snapshot["tables"][name]
    whole = {"weight": saved["weights"], **saved["optimizer"], "step": np.array(snapshot["step"], np.int64)}
    if snapshot["staged"]:
        staged = snapshot["staged"][name]
        parts = (staged["ids"], staged["grads"], np.asarray(staged["pending"]))
        whole |= dict(zip(STAGED, parts, strict=True))
    return whole


def to_snapshot(logical: Mapping[str, Logical], *, params: Any, opt_state: Any) -> Snapshot:
    """A snapshot for ``TrainStep.restore``, which checks it: the opposite of ``from_snapshot``, for all tables at once.

    Args:
        logical: by table; each has ``step``, the same everywhere, and either all or none have gradients staged.
        params, opt_state: of the dense part.
    """
    steps = {name: int(arrays["step"]) if "step" in arrays else None for name, arrays in logical.items()}
    staged = sorted(name for name, arrays in logical.items() if any(key in arrays for key in STAGED))
    if len(set(steps.values())) != 1 or None in steps.values() or staged not in ([], sorted(logical)):
        raise ContextError(
            "async_emb to_snapshot: the tables are not of one moment: each needs the same step, and gradients staged "
            f"in all or in none; steps are {steps}, and gradients are staged in {staged}"
        )
    optimizer = lambda arrays: {  # noqa: E731
        key: np.asarray(x) for key, x in arrays.items() if key not in ("weight", "step", *STAGED)
    }
    return {
        "params": params,
        "opt_state": opt_state,
        "step": np.array(next(iter(steps.values())), np.int32),
        "tables": {name: {"weights": x["weight"], "optimizer": optimizer(x)} for name, x in logical.items()},
        "staged": {
            name: {"ids": x["staged_ids"], "grads": x["staged_grads"], "pending": x["staged_apply"]}
            for name, x in logical.items()
            if staged
        },
        "armed": None,
    }


def table_state(table: AsyncEmbedding, arrays: Logical) -> TableState:
    """A state from the logical form, on any mesh: in the place of ``AsyncEmbedding.init``. Copies once, into memory
    that XLA owns and a step may take.

    Without any of the optimizer's arrays these start fresh. Nothing is converted.

    Raises:
        ContextError: arrays are missing, unknown, or of another shape or dtype; every problem is listed.
    """
    require_fit(table, {key: (tuple(np.shape(x)), np.asarray(x).dtype.name) for key, x in arrays.items()})
    optimizer = {key: np.asarray(arrays[key]) for key in table.optimizer.init(1) if key in arrays}
    return table.from_arrays(arrays["weight"], optimizer or None)


def require_fit(
    table: AsyncEmbedding, found: Mapping[str, tuple[tuple[int, ...], str]], where: str = "the logical table"
) -> None:
    """Raises ContextError unless arrays of these shapes and dtypes are the table's logical form, nothing staged."""
    problems = list(_misfits(table, found, f"async_emb {table.name!r}: {where}"))
    if problems:
        raise_problems(problems)


def _misfits(table: AsyncEmbedding, found: Mapping[str, tuple[tuple[int, ...], str]], where: str) -> Iterator[Problem]:
    optimizer = {key: ((table.rows,), x.dtype.name) for key, x in table.optimizer.init(1).items()}
    wanted = {"weight": ((table.rows, table.width), table.dtype.name), **optimizer}
    if unknown := sorted(found.keys() - wanted.keys() - {"step", *STAGED}):
        advice = f"It must have {', '.join(wanted)}, and may have step: rename or leave out the others."
        yield Problem(f"{where} has {show(unknown)}, which the table does not know", (advice,))
    if staged := sorted(found.keys() & set(STAGED)):
        advice = "Flush before, or go on with TrainStep.restore(to_snapshot(...)), which takes staged gradients too."
        yield Problem(
            f"{where} has gradients staged ({', '.join(staged)}), which a table's state cannot hold", (advice,)
        )
    missing = {key for key in wanted if key not in found}
    if missing != set(optimizer) and missing:
        advice = "Only the optimizer's arrays may be missing, all of them: they start fresh then."
        yield Problem(f"{where} has no {', '.join(sorted(missing))}", (advice,))
    for key in sorted(wanted.keys() & found.keys()):
        if found[key] != wanted[key]:
            (shape, dtype), (wanted_shape, wanted_dtype) = found[key], wanted[key]
            message = f"{where} has {key} {dtype}{list(shape)}, but the table needs {wanted_dtype}{list(wanted_shape)}"
            yield Problem(message, ("Nothing is converted here. AsyncEmbedding.from_arrays converts weights.",))


# ---- an ordinary embedding


@contextlib.contextmanager
def embedding_view(table: AsyncEmbedding, state: TableState) -> Iterator[Embedding]:
    """Lends a table as an ordinary ``torch.nn.Embedding``, in the memory that it has: see ``dlpack.view``.

    What torch trains in the block, the table has afterwards. The table must lie on one device.
    """
    from torch_ext.plain_embedding import plain_embedding

    from . import dlpack

    table.require_own(state)
    with dlpack.lent_as_one(state.weights, "embedding_view") as weight:
        _require_zeros(table, weight)
        yield plain_embedding(weight, table.padding_id)


def to_embedding(table: AsyncEmbedding, state: TableState, *, donate: bool = False) -> Embedding:
    """An ordinary ``torch.nn.Embedding`` [rows, width] of a table: the bits of its logical columns, padding removed.

    The row of ``padding_id``, where it is in the table, becomes zeros, which is what the table reads there.

    Args:
        table: the table.
        state: its state, on any number of devices of this process.
        donate: give the table's memory to torch instead of a copy. The table must lie on one device, and
            ``state.weights`` is deleted, as a step's would be.

    Raises:
        ContextError: the memory cannot be given, because it is on several devices or processes; or the state is not
            the table's.
    """
    from torch_ext.plain_embedding import plain_embedding

    from . import dlpack

    table.require_own(state)
    weight = dlpack.given_by(state.weights, "to_embedding") if donate else _gathered(table, state)
    if table.padding_id is not None and 0 <= table.padding_id < table.rows:
        weight[table.padding_id] = 0
    return plain_embedding(weight, table.padding_id)


def from_embedding(table: AsyncEmbedding, embedding: Embedding) -> TableState:
    """A state of the weights of a ``torch.nn.Embedding``, with a fresh optimizer: the opposite of ``to_embedding``.

    Copies once, into memory that XLA owns: a step updates in place what it takes, and cannot take torch's.

    Raises:
        ContextError: shape or dtype are not the table's.
    """
    from . import dlpack

    weight = embedding.weight.detach()
    dtype = str(weight.dtype).removeprefix("torch.")
    require_fit(table, {"weight": (tuple(weight.shape), dtype)}, "the embedding")
    return table.from_arrays(dlpack.as_numpy(weight.cpu()))


def _gathered(table: AsyncEmbedding, state: TableState) -> Any:
    from . import dlpack

    if not state.weights.is_fully_addressable:
        error = ContextError(f"async_emb {table.name!r}: the table lies over several processes, each has a part of it")
        error.add_note("logical_table(table, state), called by all of them, gives every process the whole.")
        raise error
    with dlpack.view_shards(state.weights) as shards:
        whole = shards[0].tensor.new_empty((table.rows, table.width))
        for shard in shards:
            first, last, _ = shard.index[1].indices(table.width)
            if not shard.replica:
                whole[:, first:last] = shard.tensor[:, : max(0, last - first)]
    return whole


def _require_zeros(table: AsyncEmbedding, weight: Any) -> None:
    if table.padding_id is None or not 0 <= table.padding_id < table.rows or not weight[table.padding_id].any():
        return
    error = ContextError(
        f"async_emb {table.name!r}: row {table.padding_id} is the padding_id, which the table reads as zeros, but its "
        "weights are not, and an nn.Embedding would show them"
    )
    error.add_note("to_embedding makes zeros of them; or begin with an init that does, or a padding_id such as -1.")
    raise error
