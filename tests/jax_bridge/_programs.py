"""Programs that run ids and gradient rows through the per-shard operations on any number of ranks; the oracle's run.

The gradient rows come from the caller, not from a model, so a program's results can be compared with the oracle's to
the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_bridge import ops, order, placing, reference, runtime
from jax_bridge.context import AsyncEmbContextHandle, make_context_handle
from jax_bridge.errors import AsyncEmbError


class Rule(NamedTuple):
    """One optimizer rule, for both sides. `state_decay` and `weight_decay` are factors, or rates a step where lazy."""

    lazy: bool = False
    state_decay: float = 1.0
    weight_decay: float = 1.0
    learning_rate: float = 0.1
    eps: float = 1e-8
    max_grad_norm: float | None = None
    rounding: str = "nearest"
    seed: int = 0

    def for_oracle(self) -> dict[str, Any]:
        first, second = (
            ("accum_decay_rate", "weight_decay_rate") if self.lazy else ("decay_factor", "weight_decay_factor")
        )
        options = {first: self.state_decay, second: self.weight_decay}
        options |= {"learning_rate": self.learning_rate, "eps": self.eps, "max_grad_norm": self.max_grad_norm}
        return options | {"rounding": self.rounding, "seed": self.seed}


class Batch(NamedTuple):
    """One step's input: ids [N] as the user gives them, gradient rows [N, width], and whether they shall be applied."""

    ids: np.ndarray[Any, Any]
    grads: np.ndarray[Any, Any]
    pending: bool | int = True
    segment_ids: np.ndarray[Any, Any] | None = None
    unique_tokens: np.ndarray[Any, Any] | None = None


class Start(NamedTuple):
    """The arrays of a table before a run. `last_step` is used by lazy rules only."""

    table: np.ndarray[Any, Any]
    row_state: np.ndarray[Any, Any]
    last_step: np.ndarray[Any, Any]


class Run(NamedTuple):
    """All that a run gives: the arrays after it, each step's rows, and each update's norm, valid and pending."""

    table: np.ndarray[Any, Any]
    row_state: np.ndarray[Any, Any]
    last_step: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    norms: np.ndarray[Any, Any]
    valids: np.ndarray[Any, Any]
    pendings: np.ndarray[Any, Any]

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, values in zip(self._fields, self, strict=True):
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


def bits(values: Any) -> np.ndarray[Any, Any]:
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}")


def assert_same_bits(got: Any, wanted: Any, what: str = "") -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype, (what, got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    differing = np.argwhere(bits(got) != bits(wanted))
    if len(differing):
        where = tuple(differing[0])
        raise AssertionError(
            f"{what}: {len(differing)} of {got.size} elements differ, first at {where}: got {got[where]!r} "
            f"({bits(got)[where]:#x}), wanted {wanted[where]!r} ({bits(wanted)[where]:#x})"
        )


def assert_same_run(got: Run, wanted: Run) -> None:
    for name, g, w in zip(Run._fields, got, wanted, strict=True):
        assert_same_bits(g, w, name)


def mesh_of(*sizes: int, names: tuple[str, ...] = ("table",), explicit: bool = False) -> Mesh:
    """A mesh over the first devices: one axis unless more sizes and names are given."""
    devices = np.array(jax.devices("cpu")[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes))


def handle_on(mesh: Mesh, *, tokens: int, width: int, data_axis: Any = None, **options: Any) -> AsyncEmbContextHandle:
    """A handle over all axes of the mesh. The name tells apart what handles of one process differ in."""
    options = {"num_unique": tokens, "name": "table", "dtype": np.float32} | options
    return make_context_handle(
        mesh,
        mesh.axis_names,
        data_axis=mesh.axis_names if data_axis is None else data_axis,
        tokens_per_batch=tokens,
        emb_width=width,
        num_devices_per_node=mesh.devices.size,
        **options,
    )


class Numbers(NamedTuple):
    """What an update is told at run time: changing it compiles nothing."""

    floats: np.ndarray[Any, Any]  # learning rate, eps, state decay, weight decay, max_grad_norm
    step: np.ndarray[Any, Any]
    random: np.ndarray[Any, Any]  # seed, rounding step


def numbers_of(rule: Rule, step: int) -> Numbers:
    clip = 0.0 if rule.max_grad_norm is None else rule.max_grad_norm
    floats = [rule.learning_rate, rule.eps, rule.state_decay, rule.weight_decay, clip]
    return Numbers(np.array(floats, np.float32), np.int32(step), np.array([rule.seed, step & 0xFFFFFFFF], np.uint32))


class Program:
    """The jitted steps of one handle and one kind of rule.

    The table is donated throughout; with staleness 1 a lookup is in flight between two steps.
    """

    def __init__(
        self, handle: AsyncEmbContextHandle, *, lazy: bool, clips: bool, rounding: str, check_vma: bool = True
    ) -> None:
        self.handle = handle
        self.lazy, self.clips, self.rounding = lazy, clips, rounding
        table, tokens, whole = P(None, handle.table_axis), P(handle.data_axis), P()
        rows = P(handle.data_axis, None)
        self.specs = {"table": table, "tokens": tokens, "rows": rows, "whole": whole}
        arrays = (table, whole, whole)
        batch = (tokens, rows, whole, tokens, whole)
        result = (rows, whole, whole, whole)

        def jit(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
            shard = functools.partial(jax.shard_map, mesh=handle.mesh, check_vma=check_vma)
            return jax.jit(shard(function, in_specs=in_specs, out_specs=out_specs), donate_argnums=0)

        self.exact_step = jit(self._exact_step, (arrays, batch, whole, tokens), (arrays, result))
        self.begin = jit(self._begin, (arrays, tokens, tokens), (arrays, tokens))
        self.stale_step = jit(self._stale_step, (arrays, batch, tokens, whole, tokens), (arrays, result, tokens))
        self.end = jit(self._end, (arrays, whole, tokens), (arrays, result[1:]))

    def _update(self, arrays: Any, numbers: Numbers, gate: Any) -> tuple[Any, Any, Any]:
        arrays, pin = self._update_start(arrays, numbers, gate)
        *result, pin = ops.rowwise_adagrad_update_done(pin, self.handle)
        return arrays, tuple(result), pin

    def _update_start(self, arrays: Any, numbers: Numbers, gate: Any) -> tuple[Any, Any]:
        table, row_state, last_step = arrays
        learning_rate, eps, state_decay, weight_decay, clip = numbers.floats
        options = {
            "learning_rate": learning_rate,
            "eps": eps,
            "max_grad_norm": clip if self.clips else None,
            "rounding": self.rounding,
        }
        if self.rounding == "stochastic":
            options |= {"seed": numbers.random[0], "rounding_step": numbers.random[1]}
        if self.lazy:
            options |= {"accum_decay_rate": state_decay, "weight_decay_rate": weight_decay}
            table, row_state, last_step, pin = ops.rowwise_adagrad_lazy_update_start(
                table, row_state, last_step, numbers.step, gate, self.handle, **options
            )
        else:
            options |= {"decay_factor": state_decay, "weight_decay_factor": weight_decay}
            table, row_state, pin = ops.rowwise_adagrad_update_start(table, row_state, gate, self.handle, **options)
        return (table, row_state, last_step), pin

    def _lookup_done(self, pin: Any, ids: Any) -> tuple[Any, Any]:
        """The rows, and a gate that waits for them."""
        rows = ops.lookup_done(pin, self.handle, token_ids=ids)
        return rows, order.depend(pin, rows[0, :1].astype(jnp.float32))

    def _stage(self, batch: Any, gate: Any) -> Any:
        _, grads, pending, segment_ids, unique_tokens = batch
        return ops.stage_update(grads, segment_ids, unique_tokens, pending, gate, self.handle)

    def _exact_step(self, arrays: Any, batch: Any, numbers: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(batch[0], arrays[0], gate, self.handle)
        rows, gate = self._lookup_done(pin, batch[0])
        pin = self._stage(batch, gate)
        arrays, result, _ = self._update((table, *arrays[1:]), numbers, pin)
        return arrays, (rows, *result)

    def _begin(self, arrays: Any, ids: Any, gate: Any) -> Any:
        table, pin = ops.lookup_start(ids, arrays[0], gate, self.handle)
        return (table, *arrays[1:]), pin

    def _stale_step(self, arrays: Any, batch: Any, upcoming: Any, numbers: Any, pin: Any) -> Any:
        rows, gate = self._lookup_done(pin, batch[0])
        (table, *others), pin = self._update_start(arrays, numbers, gate)
        table, pin, issued = ops.lookup_start_beside_update(upcoming, table, pin, self.handle)
        *result, gate = ops.rowwise_adagrad_update_done(issued, self.handle)
        staged = self._stage(batch, gate)
        return (table, *others), (rows, *result), order.depend(pin, staged)

    def _end(self, arrays: Any, numbers: Any, pin: Any) -> Any:
        rows = ops.lookup_done(pin, self.handle)
        gate = order.depend(pin, rows[0, :1].astype(jnp.float32))
        arrays, result, _ = self._update(arrays, numbers, gate)
        return arrays, result

    def put(self, values: Any, kinds: Any) -> Any:
        """A tree of arrays on the mesh; `kinds` is a tree of the same form, of keys of `specs`."""
        shardings = {kind: NamedSharding(self.handle.mesh, spec) for kind, spec in self.specs.items()}
        return jax.tree.map(lambda kind, x: placing.put(x, shardings[kind]), kinds, values)

    def put_batches(self, batches: Sequence[Batch]) -> Any:
        kinds = ("tokens", "rows", "whole", "tokens", "whole")
        values = [tuple(batch) for batch in batches]
        return self.put(values, [_like(batch, kinds) for batch in values])

    def put_start(self, start: Start) -> Any:
        return self.put(tuple(start), ("table", "whole", "whole"))

    def gate(self) -> Any:
        return self.put(np.zeros(self.handle.group_size, np.float32), "tokens")


def _like(values: tuple[Any, ...], kinds: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(None if value is None else kind for value, kind in zip(values, kinds, strict=True))


@functools.cache
def program(handle: AsyncEmbContextHandle, lazy: bool, clips: bool, rounding: str, check_vma: bool = True) -> Program:
    """Each program is compiled once in a process."""
    return Program(handle, lazy=lazy, clips=clips, rounding=rounding, check_vma=check_vma)


@contextlib.contextmanager
def opened(handle: AsyncEmbContextHandle) -> Iterator[AsyncEmbContextHandle]:
    """A context in its first-step state with counters at zero, closed when what the test has dispatched has ended."""
    runtime.close_context(handle)
    runtime.open_context(handle)
    try:
        yield handle
        for array in jax.live_arrays():  # a step that has not begun would find its context closed
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                array.block_until_ready()
    finally:
        runtime.close_context(handle)


def _let_a_few_run(results: Sequence[Any]) -> None:
    """Waits for the step four before the next one: with 32 under way on a device, XLA:CPU may stop for ever."""
    if len(results) >= 4:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised again where the result is read
            jax.block_until_ready(results[-4])


def run(
    handle: AsyncEmbContextHandle,
    start: Start,
    batches: Sequence[Batch],
    rule: Rule,
    *,
    staleness: int = 0,
    check_vma: bool = True,
    first_step: int = 0,
) -> Run:
    """Runs the batches on an open context. Gradients of step k are applied with the rule's numbers of step k."""
    steps = program(handle, rule.lazy, rule.max_grad_norm is not None, rule.rounding, check_vma)
    arrays = steps.put_start(start)
    results = []
    put = steps.put_batches(batches)
    if staleness == 0:
        gate = steps.gate()
        for k, batch in enumerate(put):
            _let_a_few_run(results)
            arrays, result = steps.exact_step(arrays, batch, numbers_of(rule, first_step + k), gate)
            results.append(result)
        rows, *updates = (list(column) for column in zip(*results, strict=True))
    else:
        arrays, pin = steps.begin(arrays, put[0][0], steps.gate())
        for k, batch in enumerate(put):
            upcoming = put[min(k + 1, len(put) - 1)][0]
            _let_a_few_run(results)
            arrays, result, pin = steps.stale_step(
                arrays, batch, upcoming, numbers_of(rule, first_step + max(k - 1, 0)), pin
            )
            results.append(result)
        rows, *updates = (list(column) for column in zip(*results, strict=True))
        arrays, result = steps.end(arrays, numbers_of(rule, first_step + len(put) - 1), pin)
        # The first update had nothing staged; the one of the flush is the last step's.
        updates = [[*column[1:], x] for column, x in zip(updates, result, strict=True)]
    table, row_state, last_step = (placing.fetch(x) for x in arrays)
    norms, valids, pendings = (np.array([placing.fetch(x) for x in column]) for column in updates)
    return Run(table, row_state, last_step, np.stack([placing.fetch(x) for x in rows]), norms, valids, pendings)


class Outcome(NamedTuple):
    """A run, the context's counters after it, and what `runtime.check` raised, if anything."""

    run: Run
    stats: dict[str, float]
    error: AsyncEmbError | None


def observe(
    handle: AsyncEmbContextHandle, start: Start, batches: Sequence[Batch], rule: Rule, **options: Any
) -> Outcome:
    """`run` in a context of its own."""
    with opened(handle):
        result = run(handle, start, batches, rule, **options)
        try:
            runtime.check(handle)
        except AsyncEmbError as error:
            runtime.check(handle)  # raising has cleared it
            return Outcome(result, runtime.stats(handle), error)
        return Outcome(result, runtime.stats(handle), None)


def fresh(table: Any, row_state: Any = 0.0, last_step: Any = 0) -> Start:
    """A start from a table [rows, width]; state and last_step broadcast over the rows."""
    table = np.asarray(table)
    rows = len(table)
    return Start(table, np.full(rows, row_state, np.float32), np.full(rows, last_step, np.int32))


def expected(
    start: Start,
    batches: Sequence[Batch],
    rule: Rule,
    *,
    staleness: int = 0,
    id_policy: str = "error",
    padding_id: int | None = None,
    num_unique: int | None = None,
    logical_width: int | None = None,
    first_step: int = 0,
) -> Run:
    """The same run by the oracle."""

    def options(gradient_step: int, applied_step: int) -> dict[str, Any]:
        step = first_step + gradient_step
        return rule.for_oracle() | {"rounding_step": step} | ({"step": step} if rule.lazy else {})

    simulation = reference.Simulation(
        start.table,
        start.row_state,
        staleness=staleness,
        options=options,
        last_step=start.last_step if rule.lazy else None,
        id_policy=id_policy,
        padding_id=padding_id,
        num_unique=num_unique,
        logical_width=logical_width,
    )
    rows = [simulation.step(b.ids, lambda rows, ids, k, b=b: (b.grads, b.pending)).rows for b in batches]
    simulation.flush()
    return Run(
        simulation.table,
        simulation.row_state,
        start.last_step if simulation.last_step is None else simulation.last_step,
        np.stack(rows),
        np.array(simulation.norms, np.float32),
        np.array(simulation.valids).astype(np.int32),
        np.ones(len(batches), np.int32),
    )
