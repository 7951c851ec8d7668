"""One training step over several tables, as traced code: which call waits for what.

Every table's calls are chained on one gate, in the order of the tables' names. Order comes from data alone, so dense
compute is placed between calls by making values wait: the rows for the update starts (forward after them), the gate for
the loss (lookup starts after the forward), the loss's cotangent for the lookup starts (backward after them), the gate
for the gradients (update_done after the backward).

Staleness 1::

    lookup_done(k) -> update_start(k-1) -> forward -> lookup_start(k+1) -> backward -> update_done(k-1)
                 -> stage_update(k) -> settle

Staleness 0::

    lookup_start(k) -> lookup_done(k) -> forward -> backward -> stage_update(k) -> update_start(k) -> update_done(k)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from .. import global_ops as ops
from ..context import AsyncEmbContextHandle
from ..embedding import AsyncEmbedding, TableState
from ..errors import ContextError

Rows = dict[str, Any]
LossFunction = Callable[[Any, Rows, Any], Any]


class StepState(NamedTuple):
    """Everything that a training step carries. With staleness 1 it is donated: use each state once.

    Attributes:
        params: of the dense part.
        opt_state: of the dense optimizer.
        tables: by name.
        pins: by name, of the lookups that are armed.
        step: int32, steps taken.
    """

    params: Any
    opt_state: Any
    tables: dict[str, TableState]
    pins: dict[str, Any]
    step: Any


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The traced parts of a training step. Pure: use them inside of ``jax.jit`` or ``jax.lax.scan`` as they are.

    Attributes:
        tables: by name.
        handles: by name, for one batch size.
        loss_fn: (params, rows, batch) -> scalar loss, or (loss, aux) with ``has_aux``. Its arrays are global.
        optimizer: of the dense part.
        has_aux: whether ``loss_fn`` returns something beside the loss.
        microbatches: pieces in which the dense part goes over a batch.
    """

    tables: Mapping[str, AsyncEmbedding]
    handles: Mapping[str, AsyncEmbContextHandle]
    loss_fn: LossFunction
    optimizer: optax.GradientTransformation
    has_aux: bool = False
    microbatches: int = 1

    # ---- whole steps ----

    def exact(self, state: StepState, batch: Any, ids: Mapping[str, Any]) -> tuple[StepState, dict[str, Any]]:
        """One step of staleness 0."""
        tables, gate = dict(state.tables), self._gate()
        pins = {}
        for name in self._names():
            weights, gate = ops.lookup_start(ids[name], tables[name].weights, gate, self.handles[name])
            pins[name] = gate
            tables[name] = tables[name]._replace(weights=weights)
        rows, gate = self._consume(pins, ids, gate)
        gradients, rows_gradient, loss, aux, gate = self._dense(state.params, rows, batch, gate)
        finite = _all_finite((loss, gradients, rows_gradient))
        gate = self._stage(rows_gradient, finite, gate)
        tables, gate = self._start_updates(tables, state.step, gate)
        reports, gate = self._finish_updates(gate)
        params, opt_state = self._update_dense(state, gradients, finite)
        metrics = {"loss": loss, "finite": finite, **reports, **({"aux": aux} if self.has_aux else {})}
        return StepState(params, opt_state, tables, state.pins, state.step + 1), metrics

    def stale(
        self, state: StepState, batch: Any, ids: Mapping[str, Any], next_ids: Mapping[str, Any]
    ) -> tuple[StepState, dict[str, Any]]:
        """One step of staleness 1: trains on ``ids``, which were armed before, and arms ``next_ids``."""
        rows, gate = self._consume(state.pins, ids, self._gate())
        tables, gate = self._start_updates(dict(state.tables), state.step - 1, gate)
        pins: dict[str, Any] = {}

        def between(loss: Any, gate: Any) -> Any:
            nonlocal tables, pins
            gate = ops.wait_for(gate, loss, P(), self._first_handle())
            tables, pins, gate = self._arm_beside_updates(tables, next_ids, gate)
            return gate

        gradients, rows_gradient, loss, aux, gate = self._dense(state.params, rows, batch, gate, between)
        finite = _all_finite((loss, gradients, rows_gradient))
        reports, gate = self._finish_updates(ops.wait_for(gate, finite, P(), self._first_handle()))
        gate = self._stage(rows_gradient, finite, gate)
        # What is staged belongs to the last lookup that was consumed, also where the next step is in this program.
        pins = {
            name: ops.wait_for(pin, gate, ops.token_spec(self.handles[name]), self.handles[name])
            for name, pin in pins.items()
        }
        params, opt_state = self._update_dense(state, gradients, finite)
        metrics = {"loss": loss, "finite": finite, **reports, **({"aux": aux} if self.has_aux else {})}
        return StepState(params, opt_state, self.settle(tables, gate), pins, state.step + 1), metrics

    def arm(
        self, tables: Mapping[str, TableState], ids: Mapping[str, Any], gate: Any | None = None
    ) -> tuple[dict[str, TableState], dict[str, Any], Any]:
        """Starts the lookups of a batch. Returns (tables, pins, gate)."""
        gate = self._gate() if gate is None else gate
        armed, pins = {}, {}
        for name in self._names():
            weights, gate = ops.lookup_start(ids[name], tables[name].weights, gate, self.handles[name])
            armed[name] = tables[name]._replace(weights=weights)
            pins[name] = gate
        return armed, pins, gate

    def settle(self, tables: Mapping[str, TableState], gate: Any) -> dict[str, TableState]:
        """The tables at rest, after ``gate``: for the end of a program that leaves lookups armed."""
        return {
            name: table._replace(weights=ops.settle(table.weights, gate, self.handles[name]))
            for name, table in tables.items()
        }

    def disarm(self, pins: Mapping[str, Any]) -> Any:
        """Consumes lookups that were armed, and drops their rows. Returns a gate."""
        gate = self._gate()
        for name in self._names():
            pin = ops.wait_for(pins[name], gate, ops.token_spec(self.handles[name]), self.handles[name])
            gate = ops.lookup_discard(pin, self.handles[name])
        return gate

    def apply_staged(
        self, tables: Mapping[str, TableState], step: Any, gate: Any | None = None
    ) -> tuple[dict[str, TableState], Any]:
        """Applies the gradients that the last step has staged. Returns (tables, reports)."""
        gate = self._gate() if gate is None else gate
        updated, gate = self._start_updates(dict(tables), step, gate)
        reports, _ = self._finish_updates(gate)
        return updated, reports

    # ---- pieces ----

    def _names(self) -> list[str]:
        return sorted(self.tables)

    def _first_handle(self) -> AsyncEmbContextHandle:
        return self.handles[self._names()[0]]

    def _gate(self) -> Any:
        return jnp.zeros(self._first_handle().group_size, jnp.float32)

    def _consume(self, pins: Mapping[str, Any], ids: Mapping[str, Any], gate: Any) -> tuple[Rows, Any]:
        rows = {}
        for name in self._names():
            handle = self.handles[name]
            pin = ops.wait_for(pins[name], gate, ops.token_spec(handle), handle)
            rows[name] = ops.lookup_done(pin, handle, token_ids=ids[name])
            gate = ops.wait_for(gate, rows[name], ops.token_spec(handle), handle)
        return rows, gate

    def _start_updates(self, tables: dict[str, TableState], step: Any, gate: Any) -> tuple[dict[str, TableState], Any]:
        for name in self._names():
            weights, state, gate = self.tables[name].optimizer.update_start(
                tables[name].weights, tables[name].optimizer, step, gate, self.handles[name]
            )
            tables[name] = TableState(weights, state)
        return tables, gate

    def _arm_beside_updates(
        self, tables: dict[str, TableState], ids: Mapping[str, Any], gate: Any
    ) -> tuple[dict[str, TableState], dict[str, Any], Any]:
        armed, pins = {}, {}
        for name in self._names():
            weights, pins[name], gate = ops.lookup_start_beside_update(
                ids[name], tables[name].weights, gate, self.handles[name]
            )
            armed[name] = tables[name]._replace(weights=weights)
        return armed, pins, gate

    def _finish_updates(self, gate: Any) -> tuple[dict[str, Any], Any]:
        norms, valid, pending = {}, {}, {}
        for name in self._names():
            norms[name], valid[name], pending[name], gate = ops.rowwise_adagrad_update_done(gate, self.handles[name])
        return {"norm": norms, "valid": valid, "pending": pending}, gate

    def _stage(self, rows_gradient: Rows, finite: Any, gate: Any) -> Any:
        for name in self._names():
            gate = ops.stage_update(rows_gradient[name], finite, gate, self.handles[name])
        return gate

    def _update_dense(self, state: StepState, gradients: Any, finite: Any) -> tuple[Any, Any]:
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        return jax.tree.map(keep, params, state.params), jax.tree.map(keep, opt_state, state.opt_state)

    def _dense(
        self,
        params: Any,
        rows: Rows,
        batch: Any,
        gate: Any,
        between: Callable[[Any, Any], Any] = lambda loss, gate: gate,
    ) -> tuple[Any, Rows, Any, Any, Any]:
        """Loss and gradients. ``between`` issues calls after the forward and before the backward (with microbatches:
        in the middle of them). Returns (gradients, gradient of the rows, loss, aux, gate)."""
        if self.microbatches > 1:
            return self._dense_in_pieces(params, rows, batch, gate, between)
        rows = {
            name: ops.hold_until(x, gate, ops.token_spec(self.handles[name]), self.handles[name])
            for name, x in rows.items()
        }
        loss, pull_back, aux = self._forward(params, rows, batch)
        gate = between(loss, gate)
        cotangent = ops.hold_until(jnp.ones_like(loss), gate, P(), self._first_handle())
        gradients, rows_gradient = pull_back(cotangent)
        return gradients, rows_gradient, loss, aux, gate

    def _forward(self, params: Any, rows: Rows, batch: Any) -> tuple[Any, Callable[[Any], Any], Any]:
        def loss_of(params: Any, rows: Rows) -> Any:
            out = self.loss_fn(params, rows, batch)
            pair = isinstance(out, tuple) and len(out) == 2
            loss, aux = out if pair and self.has_aux else (out, None)
            is_loss = hasattr(loss, "dtype") and not np.shape(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
            if not is_loss or pair != self.has_aux:
                wanted = "(scalar floating-point loss, aux)" if self.has_aux else "a scalar floating-point loss"
                raise ContextError(
                    f"async_emb train_step: loss_fn must return {wanted}, but returned {jax.tree.map(jax.typeof, out)}"
                )
            return loss, aux

        loss, pull_back, aux = jax.vjp(loss_of, params, rows, has_aux=True)
        return loss, pull_back, aux

    def _dense_in_pieces(
        self, params: Any, rows: Rows, batch: Any, gate: Any, between: Callable[[Any, Any], Any]
    ) -> tuple[Any, Rows, Any, Any, Any]:
        count = self.microbatches
        ranks = self._first_handle().group_size
        _require_pieces(batch, ranks, count)
        slices = jax.tree.map(lambda x: _cut(x, ranks, count), (rows, batch))

        def piece(carry: Any, slice_: Any) -> Any:
            total_loss, total = carry
            loss, pull_back, aux = self._forward(params, *slice_)
            gradients, rows_gradient = pull_back(jnp.full_like(loss, 1 / count))
            return (total_loss + loss / count, jax.tree.map(jnp.add, total, gradients)), (rows_gradient, aux)

        def run(carry: Any, first: int, last: int, gate: Any) -> Any:
            some_rows, some_batch = jax.tree.map(lambda x: x[first:last], slices)
            some_rows = {
                name: ops.hold_until(x, gate, P(None, *ops.token_spec(self.handles[name])), self.handles[name])
                for name, x in some_rows.items()
            }
            return jax.lax.scan(piece, carry, (some_rows, some_batch))

        # Updates run from the beginning, lookups from the middle, where `between` starts them.
        one = jax.tree.map(lambda x: x[0], slices)
        loss_type = jax.eval_shape(lambda: self._forward(params, *one)[0])
        zero = (jnp.zeros((), loss_type.dtype), jax.tree.map(jnp.zeros_like, params))
        carry, first_half = run(zero, 0, count // 2, gate)
        gate = between(carry[0], gate)
        (loss, gradients), second_half = run(carry, count // 2, count, gate)
        rows_gradient, aux = jax.tree.map(lambda *x: jnp.concatenate(x), first_half, second_half)
        rows_gradient = {name: _join(x, ranks, count) for name, x in rows_gradient.items()}
        return gradients, rows_gradient, loss, aux, gate


class Compiled:
    """The jitted programs for one batch size."""

    def __init__(self, program: StepProgram, staleness: int, donate: bool) -> None:
        self.program = program
        self.sizes = tuple(program.handles[name].tokens_per_batch for name in sorted(program.handles))
        if staleness == 0:
            self.step = jax.jit(program.exact, donate_argnums=(0,) if donate else ())
            return
        self.step = jax.jit(program.stale, donate_argnums=(0,))
        take_tables = functools.partial(jax.jit, donate_argnums=(0,))

        def arm_and_settle(tables: Any, ids: Any, gate: Any = None) -> Any:
            tables, pins, gate = program.arm(tables, ids, gate)
            return program.settle(tables, gate), pins

        arm = take_tables(arm_and_settle)
        rearm = take_tables(lambda tables, pins, ids: arm_and_settle(tables, ids, program.disarm(pins)))
        apply = take_tables(lambda tables, step: program.apply_staged(tables, step - 1))
        flush = take_tables(lambda tables, pins, step: program.apply_staged(tables, step - 1, program.disarm(pins)))
        self.arm = lambda state, ids: arm(state.tables, ids)
        self.rearm = lambda state, ids: rearm(state.tables, state.pins, ids)
        self.apply = lambda state: apply(state.tables, state.step)
        self.flush = lambda state: flush(state.tables, state.pins, state.step)


class Programs(dict[tuple[int, ...], Compiled]):
    """The jitted programs by batch size (tokens of each table, in the order of their names), made on first use."""

    def __init__(
        self,
        tables: Mapping[str, AsyncEmbedding],
        loss_fn: LossFunction,
        optimizer: optax.GradientTransformation,
        staleness: int,
        microbatches: int,
        has_aux: bool,
        donate: bool,
    ) -> None:
        super().__init__()
        self._tables = tables
        self._program = functools.partial(
            StepProgram,
            tables=tables,
            loss_fn=loss_fn,
            optimizer=optimizer,
            has_aux=has_aux,
            microbatches=microbatches,
        )
        self._staleness = staleness
        self._donate = donate

    def __missing__(self, sizes: tuple[int, ...]) -> Compiled:
        names = sorted(self._tables)
        handles = {name: self._tables[name].handle(tokens) for name, tokens in zip(names, sizes, strict=True)}
        self[sizes] = Compiled(self._program(handles=handles), self._staleness, self._donate)
        return self[sizes]


def _require_pieces(batch: Any, ranks: int, count: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(leaf)
        if not shape or shape[0] % (ranks * count):
            raise ContextError(
                f"async_emb train_step: microbatches={count} over {ranks} ranks need batches whose first dimension is "
                f"a multiple of {ranks * count}, but batch{jax.tree_util.keystr(path)} has shape {list(shape)}"
            )


def _cut(x: Any, ranks: int, count: int) -> Any:
    """[ranks * count * n, ...] -> [count, ranks * n, ...], every rank's tokens cut into ``count`` pieces of their
    own."""
    n = x.shape[0] // (ranks * count)
    return x.reshape(ranks, count, n, *x.shape[1:]).swapaxes(0, 1).reshape(count, ranks * n, *x.shape[1:])


def _join(x: Any, ranks: int, count: int) -> Any:
    """The inverse of ``_cut``."""
    n = x.shape[1] // ranks
    return x.reshape(count, ranks, n, *x.shape[2:]).swapaxes(0, 1).reshape(ranks * count * n, *x.shape[2:])


def _all_finite(tree: Any) -> Any:
    checks = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(checks).all()
