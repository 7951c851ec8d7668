"""What ``restore`` asks of a snapshot, before it drops or overwrites anything.

Nothing is converted: a snapshot is the bits of a run, and a dtype that differs says that it is another run's. The one
exception is bfloat16, whose name ``np.savez`` forgets: void elements of the right size are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..embedding import AsyncEmbedding
from ..errors import Problem, raise_problems, show
from ..optimizers import state_shape

Tables = Mapping[str, AsyncEmbedding]
_PARTS = {
    "params": "the dense parameters",
    "opt_state": "the state of their optimizer",
    "step": "an integer scalar",
    "tables": "weights and optimizer of each table",
    "staged": "gradients that wait for the next update, {} where there are none",
    "armed": "ids of the batch that was announced, or None",
}


def validate(tables: Tables, snapshot: Any, *, staleness: int, optimizer: Any) -> None:
    """Raises ContextError with everything in ``snapshot`` that a step over ``tables`` cannot go on from."""
    problems = list(problems_of(tables, snapshot, staleness=staleness, optimizer=optimizer))
    if problems:
        raise_problems(problems)


def problems_of(tables: Tables, snapshot: Any, *, staleness: int, optimizer: Any) -> Iterator[Problem]:
    """What ``validate`` raises. A ``jax.ShapeDtypeStruct`` may stand for an array, whose values are then not looked
    at."""
    if not isinstance(snapshot, Mapping):
        message = f"async_emb restore: the snapshot is a {type(snapshot).__name__}, but must be a mapping with the keys"
        advice = "Give what TrainStep.snapshot has returned, or the same tree as it was read from a file."
        yield Problem(f"{message} {', '.join(_PARTS)}", (advice,), wrong_type=True)
        return
    yield from _missing("snapshot", _PARTS, snapshot).values()
    if {"params", "opt_state"} <= set(snapshot):
        yield from _wrong_opt_state(snapshot["params"], snapshot["opt_state"], optimizer)
    if "step" in snapshot:
        yield from _wrong_step(snapshot["step"])
    if "tables" in snapshot:
        yield from _wrong_tables(tables, snapshot["tables"])
    staged = snapshot.get("staged", {})
    if staged and staleness == 0:
        yield Problem(
            "async_emb restore: the snapshot was taken with staleness 1 and holds gradients that are staged, which "
            "staleness 0 has no place for: restore it with staleness=1 and flush, or take it after a flush"
        )
        return
    yield from _wrong_staged(tables, staged)
    armed = snapshot.get("armed")
    if armed is not None:
        yield from _wrong_armed(tables, armed, staged)


def _wrong_opt_state(params: Any, opt_state: Any, optimizer: Any) -> Iterator[Problem]:
    try:
        wanted: Any = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    except jax.errors.ConcretizationTypeError:  # an init that looks at values; nobody can tell
        return
    found: Any = jax.tree.structure(opt_state)
    if found != wanted:
        message = f"async_emb restore: snapshot['opt_state'] is {show(found)}, but the step's optimizer needs"
        advice = (
            "Restore with the optimizer of the run that took the snapshot, and keep the tree of its state as it was."
        )
        yield Problem(f"{message} {show(wanted)}", (advice,))


def _wrong_step(step: Any) -> Iterator[Problem]:
    array = np.asarray(step)
    if array.shape == () and array.dtype.kind in "iu" and 0 <= int(array) < 2**31:
        return
    value = f" {show(array.item())}" if array.shape == () else ""
    message = (
        f"async_emb restore: snapshot['step'] is {_named(array)}{value}, but must be an integer scalar in [0, 2^31)"
    )
    yield Problem(message, ("It is the number of steps that were made.",))


def _wrong_tables(tables: Tables, saved: Any) -> Iterator[Problem]:
    if not isinstance(saved, Mapping) or set(saved) != set(tables):
        names = sorted(saved) if isinstance(saved, Mapping) else f"of type {type(saved).__name__}"
        message = f"async_emb restore: the snapshot has tables {names}, but the step has {sorted(tables)}"
        yield Problem(message, ("Give train_step the same tables, under the same names.",))
    for name, table in tables.items():
        if isinstance(saved, Mapping) and name in saved:
            yield from _wrong_table(f"snapshot['tables'][{name!r}]", saved[name], table)


def _wrong_table(where: str, saved: Any, table: AsyncEmbedding) -> Iterator[Problem]:
    weights = jax.ShapeDtypeStruct((table.rows, table.width), table.dtype)
    missing = _missing(where, {"weights": _named(weights), "optimizer": "the arrays of its optimizer"}, saved)
    yield from missing.values()
    if "weights" not in missing:
        yield from _wrong_array(f"{where}['weights']", saved["weights"], weights, f"the table {table.name!r}")
    if "optimizer" not in missing:
        yield from _wrong_optimizer(f"{where}['optimizer']", saved["optimizer"], table)


def _wrong_optimizer(where: str, saved: Any, table: AsyncEmbedding) -> Iterator[Problem]:
    wanted = state_shape(table.optimizer, table.rows)
    found = {key: _named(x) for key, x in saved.items()} if isinstance(saved, Mapping) else type(saved).__name__
    if not isinstance(saved, Mapping) or set(saved) != set(wanted):
        needs = {key: _named(x) for key, x in wanted.items()}
        message = f"async_emb restore: {where} is {found}, but {show(table.optimizer)} needs {needs}"
        yield Problem(message, ("Give the table the optimizer of the run that took the snapshot.",))
        return
    for key, x in wanted.items():
        yield from _wrong_array(f"{where}[{key!r}]", saved[key], x, "the optimizer")


def _wrong_staged(tables: Tables, staged: Any) -> Iterator[Problem]:
    if not isinstance(staged, Mapping):
        message = f"async_emb restore: snapshot['staged'] is a {type(staged).__name__}, but must be a mapping"
        yield Problem(message, ("It has an entry for each table, or none at all.",), wrong_type=True)
        return
    if not staged:
        return
    if set(staged) != set(tables):
        message = f"async_emb restore: gradients are staged for {sorted(staged)}, but the step has {sorted(tables)}"
        yield Problem(message, ("Gradients are staged for every table, or for none.",))
    for name, table in tables.items():
        if name in staged:
            yield from _wrong_update(f"snapshot['staged'][{name!r}]", staged[name], table)


def _wrong_update(where: str, update: Any, table: AsyncEmbedding) -> Iterator[Problem]:
    needs = {"ids": "int32[tokens]", "grads": f"{table.dtype.name}[tokens, {table.width}]", "pending": "bool[]"}
    if missing := _missing(where, needs, update):
        yield from missing.values()
        return
    ids, ranks = _as_array(update["ids"]), table.smallest_handle().group_size
    tokens = ids.size
    yield from _wrong_array(f"{where}['ids']", ids, jax.ShapeDtypeStruct((tokens,), np.int32), "the step")
    grads = jax.ShapeDtypeStruct((tokens, table.width), table.dtype)
    yield from _wrong_array(f"{where}['grads']", update["grads"], grads, f"the table {table.name!r}")
    yield from _wrong_array(f"{where}['pending']", update["pending"], jax.ShapeDtypeStruct((), np.bool_), "the step")
    has_values = isinstance(ids, np.ndarray) and ids.dtype.kind in "iu"
    flat = ids.reshape(-1) if has_values else np.zeros(0, np.int32)
    outside = np.flatnonzero((flat < -1) | (flat >= table.rows))
    if len(outside):
        position = int(outside[0])
        message = (
            f"async_emb restore: {where}['ids'] has {len(outside)} ids outside of the table's rows [0, {table.rows}): "
            f"{int(flat[position])} at position {position} is the first"
        )
        yield Problem(message, ("-1 is a token that trains nothing; no other id is outside of the table.",))
    if not tokens or tokens % ranks:
        message = f"async_emb restore: {where} is of {tokens} tokens, which {ranks} ranks cannot share evenly"
        advice = "Restore on a number of devices that divides it, or flush before the snapshot: then any number does."
        yield Problem(message, (advice,))


def _wrong_armed(tables: Tables, armed: Any, staged: Any) -> Iterator[Problem]:
    if not isinstance(armed, Mapping) or set(armed) != set(tables):
        names = sorted(armed) if isinstance(armed, Mapping) else f"of type {type(armed).__name__}"
        message = f"async_emb restore: the announced batch (snapshot['armed']) has ids for {names}, but the step has"
        yield Problem(f"{message} {sorted(tables)}", ("None stands for no batch.",))
        return
    for name, ids in armed.items():
        array = _as_array(ids)
        size = None
        if isinstance(staged, Mapping) and isinstance(staged.get(name), Mapping) and "ids" in staged[name]:
            size = _as_array(staged[name]["ids"]).size
        if array.dtype.kind not in "iu" or (size is not None and array.size != size):
            message = f"async_emb restore: snapshot['armed'][{name!r}] is {_named(array)}, but the step needs integers"
            tokens = "" if size is None else f", {size} of them as in the batch before"
            yield Problem(f"{message}{tokens}", ("These are the ids of the batch that was announced as upcoming.",))


def _wrong_array(where: str, found: Any, wanted: jax.ShapeDtypeStruct, whose: str) -> Iterator[Problem]:
    array = _as_array(found)
    nameless = array.dtype.kind == "V" and array.dtype.itemsize == wanted.dtype.itemsize
    if tuple(array.shape) == tuple(wanted.shape) and (nameless or array.dtype == wanted.dtype):
        return
    message = f"async_emb restore: {where} is {_named(array)}, but {whose} needs {_named(wanted)}"
    converts = "restore converts nothing. AsyncEmbedding.from_arrays converts weights to the table's dtype."
    yield Problem(message, (converts,) if tuple(array.shape) == tuple(wanted.shape) else ())


def _missing(where: str, needs: Mapping[str, str], holder: Any) -> dict[str, Problem]:
    """The keys of ``needs`` that ``holder`` does not have."""
    has = (
        f"a mapping with the keys {sorted(map(str, holder))}"
        if isinstance(holder, Mapping)
        else f"a {type(holder).__name__}"
    )
    return {
        key: Problem(f"async_emb restore: {where} has no {key!r}, but needs it: {meaning}", (f"It is {has}.",))
        for key, meaning in needs.items()
        if not isinstance(holder, Mapping) or key not in holder
    }


def _named(x: Any) -> str:
    x = _as_array(x)
    return f"{np.dtype(x.dtype).name}{list(x.shape)}"


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
