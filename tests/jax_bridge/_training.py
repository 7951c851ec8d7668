"""A training step over two tables whose gradient rows do not depend on XLA's order of summation, and NumPy's run of it.

Each row is pulled towards a target: the gradient of a token's row is ``row - target + shift``, and the dense parameter
``shift`` goes down a slope that the batch gives. So every bit can be predicted, for any number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jax_bridge import AsyncEmbedding, RowwiseAdagrad, TrainStep, reference, train_step, with_next
from jax_bridge.runtime import native

from ._programs import assert_same_bits, mesh_of

NAMES = ("items", "users")
ROWS = {"items": 19, "users": 31}
WIDTH = {"items": 6, "users": 10}  # padded on 3 and on 4 ranks
IDS_SHAPE = {"items": (24, 3), "users": (24,)}
TOKENS = {name: int(np.prod(shape)) for name, shape in IDS_SHAPE.items()}
DENSE_RATE = 0.125  # a power of two, so that no fused multiply-add changes a bit

Batch = dict[str, Any]


def default_optimizer() -> RowwiseAdagrad:
    return RowwiseAdagrad(learning_rate=0.1, half_life=20)


def default_options() -> dict[str, Any]:
    """The same for the oracle."""
    return {"learning_rate": 0.1, "eps": 1e-8, "decay_factor": 0.5 ** (1 / 20)}


def loss_fn(params: Any, rows: Mapping[str, Any], batch: Batch) -> Any:
    shift = jax.lax.stop_gradient(params["shift"])
    pulls = [((rows[name].astype(jnp.float32) - batch["target"][name]) + shift) ** 2 for name in NAMES]
    return sum(0.5 * x.sum() for x in pulls) + params["shift"] * batch["slope"]


def ids_of(batch: Batch) -> dict[str, Any]:
    return batch["ids"]


def quick_init(key: Any, shape: tuple[int, int]) -> Any:
    """Random numbers that nothing has to be compiled for."""
    return np.random.default_rng(shape).normal(scale=0.3, size=shape)


def make_tables(mesh: Mesh, *, optimizer: Any = None, **options: Any) -> dict[str, AsyncEmbedding]:
    return {
        name: AsyncEmbedding(
            mesh,
            table_axis=mesh.axis_names,
            rows=ROWS[name],
            width=WIDTH[name],
            name=name,
            optimizer=optimizer or default_optimizer(),
            **{"init": quick_init} | options,
        )
        for name in NAMES
    }


def make_step(mesh: Mesh | int, staleness: int, *, tables: Mapping[str, Any] = {}, **options: Any) -> TrainStep:
    mesh = mesh_of(mesh) if isinstance(mesh, int) else mesh
    options = {"loss_fn": loss_fn, "optimizer": optax.sgd(DENSE_RATE)} | options
    return train_step(make_tables(mesh, **tables), ids_of=ids_of, staleness=staleness, **options)


@functools.cache
def _step_of(ranks: int, staleness: int) -> TrainStep:
    return make_step(ranks, staleness)


@contextlib.contextmanager
def shared_step(ranks: int, staleness: int) -> Iterator[TrainStep]:
    """The default step, compiled once for all tests of a process; fresh contexts for each."""
    step = _step_of(ranks, staleness)
    with step:
        yield step


def start(step: TrainStep) -> Any:
    return step.init({"shift": np.float32(0)}, jax.random.key(0))


def make_batch(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]] = IDS_SHAPE) -> Batch:
    return {
        # Few rows, so that ids come several times in a batch and in the next.
        "ids": {name: rng.integers(0, ROWS[name], shape).astype(np.int32) for name, shape in shapes.items()},
        "target": {name: rng.normal(size=(*shape, WIDTH[name])).astype(np.float32) for name, shape in shapes.items()},
        "slope": np.float32(rng.normal()),
    }


def make_batches(count: int, seed: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [make_batch(rng) for _ in range(count)]


def train(
    step: TrainStep, state: Any, pairs: Iterable[tuple[Batch, Batch | None]], *, announce: bool = True
) -> tuple[Any, list[Any]]:
    """(state, metrics of each step), with host values."""
    history = []
    for batch, upcoming in pairs:
        state, metrics = step(state, batch, upcoming if announce else None)
        history.append(metrics)
    return state, jax.device_get(history)


def run(step: TrainStep, state: Any, batches: list[Batch]) -> tuple[Any, list[Any]]:
    return train(step, state, with_next(batches))


def arrays_of(step: TrainStep, state: Any) -> dict[str, Any]:
    """All that a state holds, as host arrays that do not know the layout."""
    tables = {}
    for name, table in step.tables.items():
        weights, optimizer = table.to_arrays(state.tables[name])
        tables[name] = {"weights": weights, **optimizer}
    return {"params": jax.device_get(state.params), "opt_state": jax.device_get(state.opt_state), "tables": tables}


def assert_same_arrays(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    leaves = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, g), w in leaves:
        assert_same_bits(g, w, jax.tree_util.keystr(path))


class Rehearsal:
    """The same training, one operation after the other, by the oracle."""

    def __init__(self, arrays: Any, staleness: int, *, options: Any = None, **rules: Any) -> None:
        self.simulations = {
            name: reference.Simulation(
                arrays["tables"][name]["weights"],
                arrays["tables"][name]["accumulator"],
                staleness=staleness,
                options=default_options() if options is None else options,
                last_step=arrays["tables"][name].get("last_step"),
                **rules,
            )
            for name in NAMES
        }
        self.shift = np.asarray(arrays["params"]["shift"])

    def step(self, batch: Batch) -> dict[str, reference.StepResult]:
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves((batch["target"], batch["slope"])))

        def grads_of(name: str) -> Any:
            def grads(rows: Any, ids: Any, number: int) -> Any:
                target = batch["target"][name].reshape(rows.shape)
                return ((rows.astype(np.float32) - target) + self.shift).astype(rows.dtype), finite

            return grads

        results = {name: self.simulations[name].step(batch["ids"][name], grads_of(name)) for name in NAMES}
        if finite:
            self.shift = np.float32(self.shift - np.float32(DENSE_RATE) * batch["slope"])
        return results

    def flush(self) -> None:
        for simulation in self.simulations.values():
            simulation.flush()

    def assert_state(self, step: TrainStep, state: Any) -> None:
        arrays = arrays_of(step, state)
        assert_same_bits(arrays["params"]["shift"], self.shift, "shift")
        for name, simulation in self.simulations.items():
            table = arrays["tables"][name]
            assert_same_bits(table["weights"], simulation.table, f"{name} weights")
            assert_same_bits(table["accumulator"], simulation.row_state, f"{name} accumulator")
            if simulation.last_step is not None:
                assert_same_bits(table["last_step"], simulation.last_step, f"{name} last_step")


def on_device(batch: Any) -> Any:
    """The batch with its ids where only the devices can look at them."""
    return batch | {"ids": jax.tree.map(jnp.asarray, batch["ids"])}


def with_id(batch: Any, name: str, position: int, value: int) -> Any:
    ids = {key: x.copy() for key, x in batch["ids"].items()}
    ids[name].reshape(-1)[position] = value
    return batch | {"ids": ids}


def assert_goes_on(step: Any, state: Any, rehearsal: Rehearsal, batches: list[Any]) -> None:
    """From ``state``, training on gives what the rehearsal, trained on, says."""
    state, _ = run(step, state, batches)
    state = step.flush(state)
    for batch in batches:
        rehearsal.step(batch)
    rehearsal.flush()
    rehearsal.assert_state(step, state)


def close_everything() -> None:
    """For tests that count open contexts: others may have left some."""
    for context_id in native().open_contexts():
        native().close_context(context_id)


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """A list that gets an entry for every program that XLA compiles inside of the block."""
    compiled: list[str] = []
    active = True

    def listen(event: str, duration: float, **_: Any) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        active = False
