"""``train_step``: a training step over several tables, with the host's side of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from . import global_ops, runtime, snapshots
from .context import AsyncEmbContextHandle
from .embedding import AsyncEmbedding
from .errors import ContextError, PipelineError
from .snapshots import Snapshot
from .step_program import LossFunction, StepProgram, StepState

Batch = TypeVar("Batch")
IdsOf = Callable[[Any], Mapping[str, Any]]


def train_step(
    tables: Mapping[str, AsyncEmbedding],
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    ids_of: IdsOf,
    staleness: int = 1,
    microbatches: int = 1,
    has_aux: bool = False,
    sync_errors: bool = False,
    donate: bool = True,
) -> TrainStep:
    """Builds a training step.

    Args:
        tables: by the name under which ``rows`` and ``ids_of`` have them; all on one mesh.
        loss_fn: (params, rows, batch) -> scalar loss. ``rows[name]`` is [*ids.shape, width]. All arrays are global: a
            mean over the batch is the mean over all devices.
        optimizer: optax optimizer of ``params``.
        ids_of: batch -> {name: token ids}, integers of any shape whose first dimension the number of ranks divides.
        staleness: 1 hides lookups and updates behind the dense part, and looks up rows that miss the last update; 0
            misses none.
        microbatches: go over a batch in this many pieces: one lookup, one update.
        has_aux: ``loss_fn`` returns (loss, aux); aux is in the metrics.
        sync_errors: wait for every step and check it, instead of raising at the next call.
        donate: take the state's buffers. False (staleness 0 only) leaves the old state usable, for a copy of each table
            a step.

    Raises:
        ContextError: a configuration that cannot work.
    """
    return TrainStep(
        tables,
        loss_fn,
        optimizer,
        ids_of=ids_of,
        staleness=staleness,
        microbatches=microbatches,
        has_aux=has_aux,
        sync_errors=sync_errors,
        donate=donate,
    )


def with_next(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Pairs of each batch and the one after it; the last has None."""
    iterator = iter(batches)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for upcoming in iterator:
        yield current, upcoming
        current = upcoming
    yield current, None


class TrainStep:
    """A training step; see ``train_step``. As a context manager it closes its contexts, also when the block raises."""

    def __init__(
        self,
        tables: Mapping[str, AsyncEmbedding],
        loss_fn: LossFunction,
        optimizer: optax.GradientTransformation,
        *,
        ids_of: IdsOf,
        staleness: int,
        microbatches: int,
        has_aux: bool,
        sync_errors: bool,
        donate: bool,
    ) -> None:
        _check_arguments(tables, staleness, microbatches, donate)
        self.tables = dict(tables)
        self.staleness = staleness
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._ids_of = ids_of
        self._microbatches = microbatches
        self._has_aux = has_aux
        self._sync_errors = sync_errors
        self._donate = donate
        self._programs: dict[tuple[int, ...], _Compiled] = {}
        self._current: _Compiled | None = None
        self._last: Any = None  # pins of the state that the last call returned
        self._armed: Mapping[str, Any] | None = None  # ids of the lookup that is armed for a batch to come
        self._in_flight: Any = None

    # ---- the loop ----

    def init(self, params: Any, key: Any) -> StepState:
        """A fresh state: tables from their initializers, dense parameters as given."""
        keys = jax.random.split(key, len(self.tables))
        tables = {name: self.tables[name].init(k) for name, k in zip(sorted(self.tables), keys, strict=True)}
        return self._state(params, self._optimizer.init(params), tables, 0)

    def __call__(self, state: StepState, batch: Any, upcoming: Any = None) -> tuple[StepState, dict[str, Any]]:
        """One step on ``batch``.

        Args:
            state: the one that the last call returned.
            batch: a tree of arrays whose first dimension is the batch.
            upcoming: the next call's batch (staleness 1 starts to look it up), or None where there is none.

        Returns:
            ``(state, metrics)``: "loss", "finite" (whether the step's gradients were), and by table "norm", "valid" (an
            update was applied) and "pending" (one was there). With staleness 1 these three are about the step before.

        Raises:
            PipelineError, IdError: what an earlier step had to say, or a state that is not the last one.
        """
        self.check()
        ids = self._place_ids(batch)
        next_ids = ids if upcoming is None else self._place_ids(upcoming)
        compiled = self._compiled(ids)
        if self.staleness == 0:
            state, metrics = compiled.step(state, batch, ids)
        else:
            self._require_last(state)
            state = self._arm_for(state, ids, compiled)
            state, metrics = compiled.step(state, batch, ids, next_ids)
            self._armed = None if upcoming is None else next_ids
            self._last = state.pins
        self._in_flight = metrics["loss"]
        if self._sync_errors:
            self.check(wait=True)
        return state, metrics

    def flush(self, state: StepState) -> StepState:
        """Applies what the last step has staged, and returns the contexts to their first-step state. Waits."""
        self.check(wait=True)
        compiled = self._current
        if self.staleness == 1 and compiled is not None and self._last is not None:
            self._require_last(state)
            tables, reports = compiled.flush(state)
            state = state._replace(tables=tables, pins=self._pins())
            jax.block_until_ready(reports)
            for handle in compiled.program.handles.values():
                runtime.native().return_to_first_step(handle.context_id)
        self._last = self._armed = None
        jax.block_until_ready(state.params)
        self.check(wait=True)
        return state

    def check(self, *, wait: bool = False) -> None:
        """Raises what the contexts have to say. Without ``wait`` only where the last step has finished."""
        if self._in_flight is not None:
            if not wait and not self._in_flight.is_ready():
                return
            jax.block_until_ready(self._in_flight)
        for table in self.tables.values():
            table.check()

    def stats(self) -> dict[str, dict[str, float]]:
        """Each table's counters (``AsyncEmbedding.stats``)."""
        return {name: table.stats() for name, table in self.tables.items()}

    def close(self) -> None:
        """Lets running work end and closes the contexts of every table. The step can be used again after ``flush``
        or ``init``."""
        for table in self.tables.values():
            table.close()
        self._last = self._armed = self._in_flight = None

    def __enter__(self) -> TrainStep:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- snapshots ----

    def snapshot(self, state: StepState) -> Snapshot:
        """Everything that a resume needs, as host arrays; training goes on from ``state`` undisturbed."""
        self.check(wait=True)
        jax.block_until_ready(state)
        handles = {} if self._current is None else self._current.program.handles
        return snapshots.take(self.tables, handles, state, self._armed)

    def restore(self, snapshot: Snapshot) -> StepState:
        """The state of a snapshot, on this step's mesh: any number of ranks. The next call continues bit for bit."""
        self.close()
        tables = snapshots.tables_of(self.tables, snapshot)
        state = self._state(snapshot["params"], snapshot["opt_state"], tables, snapshot["step"])
        if snapshot["staged"]:
            ids = {name: self._place(staged["ids"], name) for name, staged in snapshot["staged"].items()}
            compiled = self._compiled(ids)
            snapshots.restore_staged(compiled.program.handles, snapshot)
            armed = snapshot["armed"]
            # Where no batch was announced, any lookup will do: the next call, or flush, consumes it first.
            wanted = armed or {name: np.maximum(staged["ids"], 0) for name, staged in snapshot["staged"].items()}
            ids = {name: self._place(x, name) for name, x in wanted.items()}
            state = self._arm(state, ids, compiled)
            self._armed = ids if armed is not None else None
        return state

    # ---- inside ----

    @property
    def program(self) -> StepProgram:
        """The traced parts, for the batch size of the last call; for those who jit or scan steps themselves."""
        if self._current is None:
            raise PipelineError("async_emb: no batch has been seen yet; call the step once, or use program_for(batch)")
        return self._current.program

    def program_for(self, batch: Any) -> StepProgram:
        """The traced parts for batches of this one's size."""
        return self._compiled(self._place_ids(batch)).program

    def _state(self, params: Any, opt_state: Any, tables: Any, step: Any) -> StepState:
        # A donated state must own its buffers; the caller keeps theirs.
        replicated = NamedSharding(self._mesh(), jax.sharding.PartitionSpec())
        own = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=replicated)
        params, opt_state, step = own((params, opt_state, jnp.asarray(step, jnp.int32)))
        return StepState(params, opt_state, tables, self._pins(), step)

    def _mesh(self) -> Any:
        return next(iter(self.tables.values())).mesh

    def _pins(self) -> dict[str, Any]:
        return {name: global_ops.first_gate(self._smallest_handle(name)) for name in self.tables}

    def _smallest_handle(self, name: str) -> AsyncEmbContextHandle:
        table = self.tables[name]
        return table.handle(table._ranks())

    def _compiled(self, ids: Mapping[str, Any]) -> _Compiled:
        sizes = tuple(int(np.prod(ids[name].shape)) for name in sorted(self.tables))
        if sizes not in self._programs:
            program = StepProgram(
                tables=self.tables,
                handles={name: self.tables[name].handle(n) for name, n in zip(sorted(self.tables), sizes, strict=True)},
                loss_fn=self._loss_fn,
                optimizer=self._optimizer,
                has_aux=self._has_aux,
                microbatches=self._microbatches,
            )
            self._programs[sizes] = _Compiled(program, self.staleness, self._donate)
        if (
            self.staleness == 1
            and self._current is not None
            and self._current is not self._programs[sizes]
            and self._last
        ):
            raise PipelineError(
                f"async_emb: the batch has {sizes} tokens by table, but the lookup that is armed and the gradients "
                f"that are staged belong to batches of {self._current.sizes}: flush before the batch size changes, or "
                f"pad the batch with padding_id"
            )
        self._current = self._programs[sizes]
        return self._current

    def _place_ids(self, batch: Any) -> dict[str, Any]:
        ids = dict(self._ids_of(batch))
        if set(ids) != set(self.tables):
            raise ContextError(f"async_emb: ids_of gave {sorted(ids)}, but the tables are {sorted(self.tables)}")
        return {name: self._place(x, name) for name, x in ids.items()}

    def _place(self, ids: Any, name: str) -> Any:
        table = self.tables[name]
        table.check_ids(ids)
        if isinstance(ids, np.ndarray) and ids.dtype not in (np.int32, np.int64):
            ids = ids.astype(np.int64)
        if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and not jax.config.read("jax_enable_x64"):
            # Without x64 JAX would wrap them around. What does not fit is out of range for any table.
            ids = np.clip(ids, np.iinfo(np.int32).min, np.iinfo(np.int32).max).astype(np.int32)
        sharding = NamedSharding(table.mesh, global_ops.token_spec(self._smallest_handle(name)))
        shape = np.shape(ids)
        if not shape or shape[0] % table._ranks():
            raise ContextError(
                f"async_emb {table.name!r}: token ids have shape {list(shape)}, whose first dimension is not a "
                f"multiple of the {table._ranks()} ranks: pad the batch, with padding_id for the ids"
            )
        return jax.device_put(ids, sharding)

    def _require_last(self, state: StepState) -> None:
        if self._last is not None and state.pins is not self._last:
            same = jax.tree.map(lambda a, b: a is b, state.pins, self._last)
            if not all(jax.tree.leaves(same)):
                raise PipelineError(
                    "async_emb: this is not the state that the last call returned. With staleness 1 gradients and a "
                    "lookup are under way that belong to it alone: go on from it, flush it, or restore a snapshot"
                )

    def _arm_for(self, state: StepState, ids: Mapping[str, Any], compiled: _Compiled) -> StepState:
        """Sees to it that the lookup of ``ids`` is armed. A batch other than the one that was announced is refused
        later."""
        if self._armed is not None:
            return state
        if self._last is None:
            return self._arm(state, ids, compiled)
        tables, pins = compiled.rearm(state, ids)  # the last step had no upcoming batch, and armed something else
        return state._replace(tables=tables, pins=pins)

    def _arm(self, state: StepState, ids: Mapping[str, Any], compiled: _Compiled) -> StepState:
        tables, pins = compiled.arm(state, ids)
        state = state._replace(tables=tables, pins=pins)
        self._last = state.pins
        return state


class _Compiled:
    """The jitted programs for one batch size."""

    def __init__(self, program: StepProgram, staleness: int, donate: bool) -> None:
        self.program = program
        self.sizes = tuple(program.handles[name].tokens_per_batch for name in sorted(program.handles))
        if staleness == 0:
            self.step = jax.jit(program.exact, donate_argnums=(0,) if donate else ())
            return
        self.step = jax.jit(program.stale, donate_argnums=(0,))
        take_tables = functools.partial(jax.jit, donate_argnums=(0,))
        arm = take_tables(lambda tables, ids: program.arm(tables, ids)[:2])
        rearm = take_tables(lambda tables, pins, ids: program.arm(tables, ids, program.disarm(pins))[:2])
        flush = take_tables(lambda tables, pins, step: program.apply_staged(tables, step - 1, program.disarm(pins)))
        self.arm = lambda state, ids: arm(state.tables, ids)
        self.rearm = lambda state, ids: rearm(state.tables, state.pins, ids)
        self.flush = lambda state: flush(state.tables, state.pins, state.step)


def _check_arguments(tables: Mapping[str, AsyncEmbedding], staleness: int, microbatches: int, donate: bool) -> None:
    if not tables:
        raise ContextError("async_emb train_step: tables is empty; give at least one AsyncEmbedding")
    if staleness not in (0, 1) or isinstance(staleness, bool):
        raise ContextError(f"async_emb train_step: staleness={staleness!r} must be 0 or 1")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ContextError(f"async_emb train_step: microbatches={microbatches!r} must be an integer of at least 1")
    if staleness == 1 and not donate:
        raise ContextError(
            "async_emb train_step: staleness=1 needs donate=True (donate_argnums of jax.jit). Lookup and update of a "
            "step work on one buffer over two calls, and without donation XLA would put a copy of it between them"
        )
    if len({table.mesh for table in tables.values()}) > 1:
        raise ContextError(f"async_emb train_step: the tables {sorted(tables)} are on different meshes; use one")
    names = [table.name for table in tables.values()]
    if len(set(names)) < len(names):
        raise ContextError(f"async_emb train_step: table names {names} repeat; contexts are told apart by name")
