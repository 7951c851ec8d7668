"""``train_step``: a training step over several tables, with the host's side of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from .. import loans, runtime
from ..context import AsyncEmbContextHandle
from ..embedding import AsyncEmbedding, TableState
from ..errors import AsyncEmbError, ContextWarning, FailedContextError, IdError, PipelineError
from ..token_ids import as_int32
from ..validation.train_checks import check_arguments, lost_update, require_last, require_usable
from . import batches, ownership, snapshots
from .fresh_states import FreshStates
from .snapshot_checks import validate
from .snapshots import Snapshot
from .step_failures import StepFailures
from .step_program import Compiled, LossFunction, Programs, StepProgram, StepState
from .steps_in_flight import StepsInFlight

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
        microbatches: go over a batch in this many pieces, with one lookup and one update. The loss is the mean of the
            pieces' losses.
        has_aux: ``loss_fn`` returns (loss, aux); aux is in the metrics, of microbatches stacked.
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
        check_arguments(tables, loss_fn, optimizer, ids_of, staleness, microbatches, donate)
        self.tables = dict(tables)
        self.staleness = staleness
        self._optimizer = optimizer
        self._ids_of = ids_of
        self._sync_errors = sync_errors
        self._donates = donate
        self._programs = Programs(self.tables, loss_fn, optimizer, staleness, microbatches, has_aux, donate)
        self._fresh = FreshStates(self.tables)
        self._current: Compiled | None = None
        self._idle = batches.IdleIds(self.tables)
        self._owned: set[int] = set()  # contexts that were begun here
        # With staleness 1, what is under way between two calls:
        self._last: Any = None  # pins of the state that it belongs to; None where nothing is
        self._armed: batches.Ids | None = None  # ids of the batch that was announced, whose lookup is armed
        self._failures = StepFailures(self.tables)
        self._in_flight = StepsInFlight(self.tables, self._programs, self._failures)
        self._unwanted = False  # a lookup is armed though no batch was announced
        self._unsaved: Any = None  # state.step where gradients are staged that neither a flush nor a snapshot has

    # ---- the loop ----

    def init(self, params: Any, key: Any) -> StepState:
        """A fresh state: tables from their initializers, dense parameters as given.

        Drops what an earlier state had under way.
        """
        self._restart()
        keys = jax.random.split(key, len(self.tables))
        tables = {name: self.tables[name].init(k) for name, k in zip(sorted(self.tables), keys, strict=True)}
        return self._begin(params, self._optimizer.init(params), tables, 0)

    def __call__(self, state: StepState, batch: Any, upcoming: Any = None) -> tuple[StepState, dict[str, Any]]:
        """One step on ``batch``.

        Args:
            state: the one that the last call returned.
            batch: a tree of arrays whose first dimension is the batch.
            upcoming: the next call's batch (staleness 1 starts to look it up), or None where there is none.

        Returns:
            ``(state, metrics)``: "loss", "finite" (whether loss and gradients were; if not, nothing is learned from the
            batch), and by table "norm", "valid" (an update was applied) and "pending" (one was there). With staleness 1
            these three are about the step before.

        Raises:
            PipelineError, IdError: what an earlier step had to say, or a state that is not the last one. Nothing of
                this call has run: call again with the same state. Only with ``sync_errors`` it is about this step,
                which has run: go on from the exception's attribute ``state``.
        """
        self.check()
        self._require_usable(state, batch, upcoming)
        ids = self._ids(batch)
        placed = batches.place(self.tables, ids)
        compiled = self._compiled(batches.sizes_of(ids))
        if self.staleness == 0:
            self._use(compiled)
            with self._failures.named(f"step {self._in_flight.next}"):
                state, metrics = compiled.step(state, batch, placed)
        else:
            next_ids = None if upcoming is None else self._ids(upcoming)
            next_placed = self._idle.like(placed) if next_ids is None else batches.place(self.tables, next_ids)
            batches.require_same_sizes(self.tables, compiled.sizes, batches.sizes_of(next_placed))
            batches.require_announced(self.tables, self._armed or {}, ids, state.step)
            self._use(compiled)
            with self._failures.named(f"step {self._in_flight.next}"):
                if self._armed is None:
                    jax.block_until_ready(state)
                    # Arming takes the tables, so an error of the model comes before it.
                    compiled.step.eval_shape(state, batch, placed, next_placed)
                    state = self._arm(state, placed, compiled)
                state, metrics = compiled.step(state, batch, placed, next_placed)
            self._last, self._armed, self._unwanted = state.pins, next_ids, next_ids is None
            self._unsaved = state.step
        self._in_flight.add(metrics["loss"])
        if self._sync_errors:
            self._check_and_hand_over(state)
        return state, metrics

    def flush(self, state: StepState) -> StepState:
        """Applies what the last step has staged, and returns the contexts to their first-step state. Waits."""
        self.check(wait=True)
        self._require_usable(state)
        if self._last is not None:
            assert self._current is not None
            self._use(self._current)
            with self._failures.named(f"flush after {self._in_flight.next} steps"):
                tables, reports = (self._current.flush if self._looks_up() else self._current.apply)(state)
                state = state._replace(tables=tables, pins=self._fresh.pins())
                jax.block_until_ready(reports)
            for handle in self._current.program.handles.values():
                runtime.native().return_to_first_step(handle.context_id)
            self._give_up()
        jax.block_until_ready(state)
        self._check_and_hand_over(state)
        return state

    def check(self, *, wait: bool = False) -> None:
        """Raises what the contexts have to say about the steps that have finished; with ``wait``, about all.

        Raises:
            PipelineError: a call was refused, and so was everything after it; tables and parameters are as before.
                Staged gradients are kept where every rank still had them: go on from the last state with any batch.
            IdError: ids outside of a table, which were dropped.
            FailedContextError: a context has failed. ``init`` and ``restore`` begin anew.
        """
        try:
            self._in_flight.check(wait=wait)
        except FailedContextError:
            self._failures.note()
            raise
        except PipelineError:
            self._recover()
            raise

    def stats(self) -> dict[str, dict[str, float]]:
        """Each table's counters (``AsyncEmbedding.stats``)."""
        self.check()
        return {name: table.stats() for name, table in self.tables.items()}

    def close(self) -> None:
        """Waits for the steps that were dispatched, closes every context, and raises what was still to be said.

        Drops gradients that are staged: ``flush`` first to keep them. The step can be used again.
        """
        told = self._failures.told
        try:
            self.check(wait=True)
        except FailedContextError:
            if not told:
                raise
        finally:
            for table in self.tables.values():
                table.close()
            self._owned.clear()
            self._give_up()

    def __enter__(self) -> TrainStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            self._in_flight.interrupt(error)
        lost = self._unflushed() if error is None and not self._failures.told else None
        try:
            self.close()
        except Exception as another:
            if error is None:
                raise
            if isinstance(another, AsyncEmbError):
                error.add_note(f"And on closing: {another}")
        if lost is not None:
            warnings.warn(ContextWarning(lost), stacklevel=2)

    # ---- snapshots ----

    def snapshot(self, state: StepState) -> Snapshot:
        """Everything that a resume needs, as host arrays; training goes on from ``state`` undisturbed.

        Over several processes all of them call it, and every one gets all of it: whole tables. Where a table does not
        fit into the memory of one host, use ``Checkpoints``, whose files each process writes and reads in parts.
        """
        with self._failures.named(f"snapshot after {self._in_flight.next} steps"):
            handles = self._at_rest(state)
            taken = snapshots.take(self.tables, handles, state, self._armed)
        self._unsaved = None
        return taken

    def restore(self, snapshot: Snapshot) -> StepState:
        """The state of a snapshot, on this step's mesh. Drops what an earlier state had under way.

        The next call continues bit for bit on the same number of devices. On another number the tables still hold the
        same bits, and XLA's dense products differ in rounding. Staged gradients keep their batch size, which the number
        of devices must divide: for any other number, flush before the snapshot.

        Raises:
            ContextError: what the snapshot holds does not fit: keys that are missing, other tables, dtypes or shapes,
                another schedule. Every problem is listed, and nothing has been dropped.
        """
        validate(self.tables, snapshot, staleness=self.staleness, optimizer=self._optimizer)
        return self._go_on_from(snapshot, snapshots.tables_of(self.tables, snapshot))

    def _at_rest(self, state: StepState) -> dict[str, AsyncEmbContextHandle]:
        """Waits until nothing runs; the handles of the contexts that may have gradients staged for ``state``."""
        self.check(wait=True)
        require_last(state, self._last)
        require_usable(state, staleness=self.staleness)
        jax.block_until_ready(state)
        return {} if self._current is None else dict(self._current.program.handles)

    def _go_on_from(self, saved: Mapping[str, Any], tables: dict[str, TableState]) -> StepState:
        """The state of a snapshot that fits, given its tables on the mesh."""
        self._restart()
        state = self._begin(saved["params"], saved["opt_state"], tables, saved["step"])
        if saved["staged"]:
            compiled = self._compiled(tuple(len(saved["staged"][name]["ids"]) for name in sorted(self.tables)))
            self._use(compiled)
            snapshots.restore_staged(compiled.program.handles, saved["staged"])
            self._last = state.pins
            if saved["armed"] is not None:
                ids = {name: as_int32(np.array(x)) for name, x in saved["armed"].items()}
                state = self._arm(state, batches.place(self.tables, ids), compiled)
                self._armed, self._unwanted = ids, False
                jax.block_until_ready(state)
                with contextlib.suppress(IdError):  # raised before the snapshot was taken
                    self.check(wait=True)
        return state

    # ---- for those who jit or scan steps themselves ----

    @property
    def program(self) -> StepProgram:
        """The traced parts, for the batch size of the last call."""
        if self._current is None:
            raise PipelineError("async_emb: no batch has been seen yet; call the step once, or use program_for(batch)")
        return self._current.program

    def program_for(self, batch: Any) -> StepProgram:
        """The traced parts for batches of this one's size."""
        return self._programs[batches.sizes_of(self._ids(batch))].program

    # ---- states ----

    def _begin(self, params: Any, opt_state: Any, tables: dict[str, TableState], step: Any) -> StepState:
        self._in_flight.next = int(step)
        return self._fresh.make(params, opt_state, tables, step)

    def _require_usable(self, state: StepState, *given: Any) -> None:
        """Of the whole state, before the first program takes a part of it."""
        require_last(state, self._last)
        require_usable(state, *given, staleness=self.staleness)
        if self._donates:
            loans.require_donatable(state)

    # ---- programs and contexts ----

    def _compiled(self, sizes: tuple[int, ...]) -> Compiled:
        compiled = self._programs[sizes]
        if self._last is not None and self._current is not None:
            batches.require_same_sizes(self.tables, self._current.sizes, sizes)
        self._current = compiled
        return compiled

    def _use(self, compiled: Compiled) -> None:
        """Sees to it that the contexts are open, and that nobody else's work is under way in them."""
        ownership.take(self, compiled.program.handles.values(), self._owned, under_way=self._last is not None)
        self._failures.met_again()

    def _restart(self) -> None:
        with contextlib.suppress(Exception):
            self._in_flight.wait()
        self._give_up()
        for table in self.tables.values():
            table.close_failed()
        for compiled in self._programs.values():
            for handle in compiled.program.handles.values():
                if handle.context_id in self._owned and runtime.is_open(handle):
                    runtime.close_context(handle)
                    runtime.open_context(handle)  # programs that were traced before find it

    def _recover(self) -> None:
        """After a refusal the ranks may stand at different calls. Keeps what is staged, drops what is armed."""
        handles = {} if self._current is None else self._current.program.handles
        staged = snapshots.staged_of(handles)
        for table in self.tables.values():
            table.close()
        snapshots.restore_staged(handles, staged)
        self._armed, self._unwanted = None, False

    def _give_up(self) -> None:
        self._in_flight.forget()
        self._failures.told = False
        self._last, self._armed, self._unwanted, self._unsaved = None, None, False, None

    def _unflushed(self) -> str | None:
        """What to warn of where a block is left now, without an exception: gradients that nobody would ever apply."""
        return None if self._unsaved is None else lost_update(self.tables, self._unsaved)

    # ---- ids and lookups ----

    def _ids(self, batch: Any) -> batches.Ids:
        return batches.checked_ids(self.tables, self._ids_of(batch))

    def _looks_up(self) -> bool:
        return self._armed is not None or self._unwanted

    def _arm(self, state: StepState, ids: Mapping[str, Any], compiled: Compiled) -> StepState:
        """Starts the lookup of ``ids``, in place of one that nobody wants."""
        tables, pins = (compiled.rearm if self._looks_up() else compiled.arm)(state, ids)
        self._last, self._armed, self._unwanted = pins, None, True
        return state._replace(tables=tables, pins=pins)

    def _check_and_hand_over(self, state: StepState) -> None:
        """Waits and checks. The state that the call was to return goes with the exception."""
        try:
            self.check(wait=True)
        except AsyncEmbError as error:
            error.state = state  # type: ignore[attr-defined]
            error.add_note("The step has run: go on from the state that this exception carries as `state`.")
            raise
