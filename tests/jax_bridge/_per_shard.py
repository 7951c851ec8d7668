"""Steps of one table, written with the per-shard operations as a user would, and what the oracle makes of them.

Gradient rows come with the batch, so that results can be compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_bridge import global_ops, ops, order, runtime
from jax_bridge.context import AsyncEmbContextHandle

from . import _programs as programs

ROWS, WIDTH, TOKENS = 61, 8, 16  # unless a test says otherwise
RULE = programs.Rule(learning_rate=0.1, eps=1e-8, state_decay=0.9)
_NUMBERS = {"learning_rate": RULE.learning_rate, "eps": RULE.eps, "decay_factor": RULE.state_decay}

Hook = Callable[[str, Any], Any]


class Arrays(NamedTuple):
    """A table and its optimizer state, on the host or on the mesh."""

    table: Any
    row_state: Any


class Batch(NamedTuple):
    """ids [TOKENS] and gradient rows [TOKENS, WIDTH]."""

    ids: Any
    grads: Any


def make_handle(
    ranks: int | Mesh, name: str = "table", *, tokens: int = TOKENS, width: int = WIDTH, **options: Any
) -> AsyncEmbContextHandle:
    mesh = programs.mesh_of(ranks) if isinstance(ranks, int) else ranks
    return programs.handle_on(mesh, tokens=tokens, width=width, name=name, **options)


def make_start(seed: int = 3, *, rows: int = ROWS, width: int = WIDTH) -> Arrays:
    rng = np.random.default_rng(seed)
    return Arrays(rng.normal(size=(rows, width)).astype(np.float32), rng.uniform(size=rows).astype(np.float32))


def make_batches(
    count: int, seed: int = 4, *, rows: int = ROWS, width: int = WIDTH, tokens: int = TOKENS
) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [
        Batch(rng.integers(0, rows, tokens).astype(np.int32), rng.normal(size=(tokens, width)).astype(np.float32))
        for _ in range(count)
    ]


def shard_shape(ranks: int) -> str:
    """A table's shard as a compiled program prints it."""
    return f"f32[{ROWS},{WIDTH // ranks}]"


def place(handle: AsyncEmbContextHandle, start: Arrays) -> tuple[Arrays, Any]:
    """The arrays on the mesh, in buffers that XLA owns, and a first gate."""
    return _placement(handle)(start), global_ops.first_gate(handle)


@functools.cache
def _placement(handle: AsyncEmbContextHandle) -> Any:
    shardings = Arrays(NamedSharding(handle.mesh, P(None, handle.table_axis)), NamedSharding(handle.mesh, P()))
    return jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=shardings)


def with_batch(handle: AsyncEmbContextHandle, start: Arrays, batch: Batch) -> tuple[Arrays, Batch, Any]:
    """Arguments of an exact step."""
    arrays, gate = place(handle, start)
    return arrays, batch, gate


def _pass(point: str, pin: Any) -> Any:
    return pin


def rows_gate(gate: Any, rows: Any) -> Any:
    """A gate that also waits for the rows."""
    return order.depend(gate, rows)


def update(arrays: Arrays, gate: Any, handle: AsyncEmbContextHandle, hook: Hook = _pass) -> tuple[Arrays, Any, Any]:
    """Start and done of an update. Returns (arrays, (norm, valid, pending), pin)."""
    table, state, pin = ops.rowwise_adagrad_update_start(*arrays, gate, handle, **_NUMBERS)
    *results, pin = ops.rowwise_adagrad_update_done(hook("update", pin), handle)
    return Arrays(table, state), tuple(results), pin


def _jit(
    handle: AsyncEmbContextHandle, function: Any, in_specs: Any, out_specs: Any, *, donate: bool, check_vma: bool
) -> Any:
    shard = functools.partial(jax.shard_map, mesh=handle.mesh, check_vma=check_vma)
    return jax.jit(shard(function, in_specs=in_specs, out_specs=out_specs), donate_argnums=(0,) if donate else ())


def specs_of(handle: AsyncEmbContextHandle) -> tuple[Arrays, Batch, Any, Any]:
    """Specs of arrays, batch, gate, and (norm, valid, pending)."""
    tokens = P(handle.data_axis)
    return Arrays(P(None, handle.table_axis), P()), Batch(tokens, P(handle.data_axis, None)), tokens, (P(),) * 3


def exact_body(handle: AsyncEmbContextHandle, hook: Hook = _pass) -> Any:
    """Staleness 0, on a shard: (arrays, batch, gate) -> (arrays, rows, (norm, valid, pending)).

    `hook` gets and gives a pin at the points "lookup" and "update", between a start and its done, "stage", between
    staging and the update, and "begin", before all.
    """

    def step(arrays: Arrays, batch: Batch, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch.ids, arrays.table, hook("begin", gate), handle)
        rows = ops.lookup_done(hook("lookup", pin), handle, token_ids=batch.ids)
        pin = ops.stage_update(batch.grads, None, None, True, rows_gate(pin, rows), handle)
        arrays, results, _ = update(Arrays(table, arrays.row_state), hook("stage", pin), handle, hook)
        return arrays, rows, results

    return step


def exact_step(
    handle: AsyncEmbContextHandle, *, donate: bool = True, check_vma: bool = True, hook: Hook = _pass
) -> Any:
    """`exact_body`, jitted on the mesh."""
    arrays, batch, gate, results = specs_of(handle)
    body = exact_body(handle, hook)
    return _jit(handle, body, (arrays, batch, gate), (arrays, batch.grads, results), donate=donate, check_vma=check_vma)


def stale_steps(
    handle: AsyncEmbContextHandle, *, donate: bool = True, check_vma: bool = True, hook: Hook = _pass
) -> tuple[Any, Any, Any]:
    """Staleness 1, as three programs.

    (arrays, ids, gate) -> (arrays, pin);  (arrays, batch, next_ids, pin) -> (arrays, pin, rows, results);
    (arrays, pin) -> (arrays, results).
    """

    def arm(arrays: Arrays, ids: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(ids, arrays.table, gate, handle)
        return arrays._replace(table=table), pin

    def step(arrays: Arrays, batch: Batch, next_ids: Any, pin: Any) -> Any:
        rows = ops.lookup_done(pin, handle, token_ids=batch.ids)
        arrays, results, pin = update(arrays, rows_gate(pin, rows), handle, hook)
        arrays, pin = arm(arrays, next_ids, pin)
        staged = ops.stage_update(batch.grads, None, None, True, hook("lookup", pin), handle)
        return arrays, order.depend(pin, hook("stage", staged)), rows, results

    def flush(arrays: Arrays, pin: Any) -> Any:
        rows = ops.lookup_done(pin, handle)
        arrays, results, _ = update(arrays, rows_gate(pin, rows), handle)
        return arrays, results

    arrays, batch, gate, results = specs_of(handle)
    jit = functools.partial(_jit, handle, donate=donate, check_vma=check_vma)
    return (
        jit(arm, (arrays, batch.ids, gate), (arrays, gate)),
        jit(step, (arrays, batch, batch.ids, gate), (arrays, gate, batch.grads, results)),
        jit(flush, (arrays, gate), (arrays, results)),
    )


def global_exact_step(
    handle: AsyncEmbContextHandle, arrays: Arrays, batch: Batch, gate: Any
) -> tuple[Arrays, Any, Any]:
    """An exact step by the operations on global arrays, for a jitted function. Returns (arrays, rows, gate)."""
    table, gate = global_ops.lookup_start(batch.ids, arrays.table, gate, handle)
    rows = global_ops.lookup_done(gate, handle, token_ids=batch.ids)
    gate = global_ops.wait_for(gate, rows, P(handle.data_axis), handle)
    gate = global_ops.stage_update(batch.grads, True, gate, handle)
    table, state, gate = global_ops.rowwise_adagrad_update_start(table, arrays.row_state, gate, handle, **_NUMBERS)
    *_, gate = global_ops.rowwise_adagrad_update_done(gate, handle)
    return Arrays(table, state), rows, gate


def oracle(start: Arrays, batches: Sequence[Batch], staleness: int = 0) -> programs.Run:
    begin = programs.Start(*start, np.zeros(len(start.table), np.int32))
    return programs.expected(begin, [programs.Batch(*batch) for batch in batches], RULE, staleness=staleness)


def run_exact(step: Any, handle: AsyncEmbContextHandle, start: Arrays, batches: Sequence[Batch]) -> programs.Run:
    """Steps of staleness 0 one after the other, as the oracle gives them."""
    arrays, gate = place(handle, start)
    outcomes = []
    for batch in batches:
        arrays, *outcome = step(arrays, batch, gate)
        outcomes.append(outcome)
    rows = [rows for rows, _ in outcomes]
    return _as_run(arrays, rows, [results for _, results in outcomes])


def run_stale(steps: Any, handle: AsyncEmbContextHandle, start: Arrays, batches: Sequence[Batch]) -> programs.Run:
    """Overlapping steps of staleness 1, and the last update, as the oracle gives them."""
    arm, step, flush = steps
    arrays, gate = place(handle, start)
    arrays, pin = arm(arrays, batches[0].ids, gate)
    all_rows, reports = [], []
    for k, batch in enumerate(batches):
        next_ids = batches[min(k + 1, len(batches) - 1)].ids
        arrays, pin, rows, results = step(arrays, batch, next_ids, pin)
        all_rows.append(rows)
        reports.append(results)
    arrays, results = flush(arrays, pin)
    return _as_run(arrays, all_rows, [*reports[1:], results])  # the first update had nothing staged


def _as_run(arrays: Arrays, rows: list[Any], results: list[Any]) -> programs.Run:
    norms, valids, pendings = (np.array([np.asarray(x) for x in column]) for column in zip(*results, strict=True))
    return programs.Run(
        np.asarray(arrays.table),
        np.asarray(arrays.row_state),
        np.zeros(len(arrays.table), np.int32),
        np.stack([np.asarray(x) for x in rows]),
        norms,
        valids,
        pendings,
    )


def assert_trains_like_the_oracle(handle: AsyncEmbContextHandle) -> None:
    """Both schedules, from a context in its first-step state, bit for bit."""
    start, batches = make_start(), make_batches(4)
    programs.assert_same_run(run_exact(exact_step(handle), handle, start, batches), oracle(start, batches))
    runtime.native().return_to_first_step(handle.context_id)
    programs.assert_same_run(run_stale(stale_steps(handle), handle, start, batches), oracle(start, batches, 1))
    runtime.check(handle)


def tokens_on(handle: AsyncEmbContextHandle) -> NamedSharding:
    """Where arrays with one entry for each token lie."""
    return NamedSharding(handle.mesh, P(handle.data_axis))


class Calls:
    """Each operation as a program of its own, on one table."""

    def __init__(self, handle: Any, mesh: Any = None) -> None:
        arrays, batch, gate, results = specs_of(handle)
        mesh = handle.mesh if mesh is None else mesh

        def program(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
            donated = (0,) if in_specs[0] is arrays else ()
            sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
            return jax.jit(sharded, donate_argnums=donated)

        def lookup_start(arrays: Arrays, ids: Any, gate: Any) -> Any:
            table, pin = ops.lookup_start(ids, arrays.table, gate, handle)
            return arrays._replace(table=table), pin

        def update_start(arrays: Arrays, gate: Any) -> Any:
            rule = RULE
            table, state, pin = ops.rowwise_adagrad_update_start(
                *arrays, gate, handle, learning_rate=rule.learning_rate, eps=rule.eps, decay_factor=rule.state_decay
            )
            return Arrays(table, state), pin

        self.lookup_start = program(lookup_start, (arrays, batch.ids, gate), (arrays, gate))
        self.lookup_done = program(
            lambda pin, ids: ops.lookup_done(pin, handle, token_ids=ids), (gate, batch.ids), batch.grads
        )
        self.stage_update = program(
            lambda grads, gate: ops.stage_update(grads, None, None, True, gate, handle), (batch.grads, gate), gate
        )
        self.update_start = program(update_start, (arrays, gate), (arrays, gate))
        self.update_done = program(lambda gate: ops.rowwise_adagrad_update_done(gate, handle)[:3], (gate,), results)
