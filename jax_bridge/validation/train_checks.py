"""What ``train_step`` asks of its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from torch_ext.common.table_rules import is_integer

from ..embedding import AsyncEmbedding
from ..errors import PipelineError, Problem, raise_problems, show
from .table_checks import staleness_problem


def check_arguments(
    tables: Mapping[str, AsyncEmbedding],
    loss_fn: Any,
    optimizer: Any,
    ids_of: Any,
    staleness: int,
    microbatches: int,
    donate: bool,
) -> None:
    """Raises ContextError for a configuration that cannot work, with every problem of it."""
    of_tables = list(_not_tables(tables))
    problems = [*of_tables, *_wrong_options(loss_fn, optimizer, ids_of, staleness, microbatches, donate)]
    if not of_tables:
        problems += _tables_apart(tables)
    if problems:
        raise_problems(problems)


def _not_tables(tables: Any) -> Iterator[Problem]:
    example = 'It is a dictionary by the names that rows and ids_of use: {"users": AsyncEmbedding(mesh, ...)}.'
    if not isinstance(tables, Mapping):
        message = f"async_emb train_step: tables must be a mapping of names to tables, not {type(tables).__name__}"
        yield Problem(f"{message}: {show(tables)}", (example,), wrong_type=True)
    elif not tables:
        yield Problem("async_emb train_step: tables is empty; give at least one AsyncEmbedding", (example,))
    elif wrong := {n: type(table).__name__ for n, table in tables.items() if not isinstance(table, AsyncEmbedding)}:
        message = f"async_emb train_step: tables must be AsyncEmbedding, but are {wrong}"
        yield Problem(message, (example,), wrong_type=True)
    elif wrong_names := [name for name in tables if not isinstance(name, str)]:
        message = f"async_emb train_step: the names of tables must be strings, but some are {show(wrong_names)}"
        yield Problem(message, (example,), wrong_type=True)


def _wrong_options(
    loss_fn: Any, optimizer: Any, ids_of: Any, staleness: Any, microbatches: Any, donate: Any
) -> Iterator[Problem]:
    signatures = {"loss_fn": "loss_fn(params, rows, batch) -> loss", "ids_of": "ids_of(batch) -> {name: token ids}"}
    functions = {"loss_fn": loss_fn, "ids_of": ids_of}
    if wrong := {name: function for name, function in functions.items() if not callable(function)}:
        given = ", ".join(f"{name}={show(value)}" for name, value in wrong.items())
        advice = f"They are called as {' and '.join(signatures[name] for name in wrong)}."
        message = f"async_emb train_step: loss_fn and ids_of must be functions, but {given}"
        yield Problem(message, (advice,), wrong_type=True)
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "update", None)):
        message = (
            f"async_emb train_step: optimizer={show(optimizer)} has no update: give an optax optimizer, for the dense "
            "parameters (a table's own optimizer is given to its AsyncEmbedding)"
        )
        yield Problem(message, wrong_type=True)
    if problem := staleness_problem(staleness):
        yield problem
    elif staleness == 1 and not donate:
        message = "async_emb train_step: staleness=1 needs donate=True (donate_argnums of jax.jit)"
        advice = (
            "Lookup and update of a step work on one buffer over two calls; without donation XLA would put a copy of "
            "the table between them. staleness=0 works without."
        )
        yield Problem(message, (advice,))
    if not is_integer(microbatches) or microbatches < 1:
        message = f"async_emb train_step: microbatches={show(microbatches)} must be an integer of at least 1"
        advice = "It is the number of pieces in which the dense part goes over a batch; 1 for the whole batch at once."
        yield Problem(message, (advice,), wrong_type=not is_integer(microbatches))


def _tables_apart(tables: Mapping[str, AsyncEmbedding]) -> Iterator[Problem]:
    """What keeps tables from being trained by one step."""
    if len({table.mesh for table in tables.values()}) > 1:
        meshes = {name: str(table.mesh) for name, table in tables.items()}
        message = f"async_emb train_step: the tables {sorted(tables)} are on different meshes; use one"
        yield Problem(message, (f"They are on {meshes}.",))
    handles = {name: table.smallest_handle() for name, table in tables.items()}
    if len({(handle.table_axis, handle.data_axis) for handle in handles.values()}) > 1:
        axes = {name: (handle.table_axis, handle.data_axis) for name, handle in handles.items()}
        yield Problem(
            f"async_emb train_step: the tables lie on different axes (table_axis, data_axis): {axes}; use the same"
        )
    names = [table.name for table in tables.values()]
    if len(set(names)) < len(names):
        message = f"async_emb train_step: table names {names} repeat; contexts are told apart by name"
        yield Problem(message, ("Give each AsyncEmbedding a name of its own.",))


def require_last(state: Any, last: Any) -> None:
    """Refuses a state that is not the one that what is under way (the pins ``last``, None where nothing is) belongs
    to."""
    if last is None or state.pins is last:
        return
    if not all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, state.pins, last))):
        raise PipelineError(
            "async_emb: this is not the state that the last call returned. With staleness 1 gradients and a lookup "
            "are under way that belong to that state alone: go on from it, or flush it, or restore a snapshot, or "
            "begin anew with init"
        )


def lost_update(tables: Mapping[str, AsyncEmbedding], step: Any) -> str | None:
    """What to warn of where nobody applies the gradients that the call before ``step`` has staged; None where that
    call has failed, which closing says."""
    with contextlib.suppress(Exception):
        return (
            f"async_emb train_step: the block was left while gradients of the call with state.step={int(step) - 1} "
            f"were staged for the tables {sorted(tables)}: that update is lost. End the block with "
            "state = step.flush(state), or take a snapshot, which keeps them"
        )
    return None


def require_usable(state: Any, *batches: Any, staleness: int) -> None:
    """Refuses a state that a step has taken already, and a step with staleness 1 inside of another program."""
    leaves = jax.tree.leaves(state)
    if any(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in leaves):
        raise PipelineError(
            "async_emb: this state was given to a step before, which has taken its buffers (donate=True). Go on from "
            "the state that the last call returned, or, where that call was interrupted, from a snapshot or init"
        )
    if len({id(x) for x in leaves}) < len(leaves):
        names = [jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(state)]
        first, again = next(
            (names[i], names[j]) for j in range(len(leaves)) for i in range(j) if leaves[i] is leaves[j]
        )
        raise PipelineError(
            f"async_emb: state{first} and state{again} are one array, but a step works on each in place. Copy one of "
            "them with jnp.copy"
        )
    if staleness and any(isinstance(x, jax.core.Tracer) for x in [*leaves, *jax.tree.leaves(batches)]):
        raise PipelineError(
            "async_emb: a step with staleness 1 was called inside of jax.jit, jax.lax.scan or another transformation. "
            "It is compiled already, and keeps on the host what is under way between two calls: call it directly. For "
            "a compiled loop use step.program, whose parts are pure"
        )
