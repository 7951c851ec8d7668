"""The training steps whose waits are measured, and their dense work. Every process of a job makes the same calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as ae
from jax_bridge import placing

ROWS, WIDTH, TOKENS_PER_RANK = 20_000, 64, 256
SIDE = 128  # a rank's rows as a square matrix, which the dense work multiplies
BATCHES = 8
TABLE = {"dtype": jnp.float32}


# ---- Dense work of any length


@jax.custom_vjp
def dense(rows: Any, counts: Any, mixer: Any) -> Any:
    """A scalar of a rank's rows after `counts[0]` matrix products; its gradient takes `counts[1]` more."""
    return _multiply(rows.reshape(SIDE, SIDE), counts[0], mixer).mean()


def _multiply(square: Any, count: Any, mixer: Any) -> Any:
    return lax.fori_loop(0, count, lambda _, x: jnp.dot(x, mixer), square)


def _dense_forward(rows: Any, counts: Any, mixer: Any) -> tuple[Any, Any]:
    activations = _multiply(ae.mark(rows, "forward").reshape(SIDE, SIDE), counts[0], mixer)
    activations = ae.mark(activations, "forward ends")
    return activations.mean(), (activations, counts, mixer)


def _dense_backward(saved: Any, cotangent: Any) -> tuple[Any, None, None]:
    activations, counts, mixer = saved
    begun = ae.mark(activations * cotangent, "backward")
    gradient = _multiply(begun, counts[1], mixer).reshape(TOKENS_PER_RANK, WIDTH)
    return ae.mark(gradient, "backward ends"), None, None


dense.defvjp(_dense_forward, _dense_backward)


def make_mixer() -> np.ndarray[Any, Any]:
    """An orthogonal matrix: any number of products neither overflows nor becomes denormal."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=(SIDE, SIDE)))[0].astype(np.float32)


class Workload:
    """What both steps work on."""

    def __init__(self) -> None:
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("table",))
        self.tokens = TOKENS_PER_RANK * jax.device_count()
        rng = np.random.default_rng(0)
        self.host_ids = [rng.integers(0, ROWS, self.tokens, np.int32) for _ in range(BATCHES)]
        self.ids = [self.put(ids, P("table")) for ids in self.host_ids]
        self.mixer = self.put(make_mixer(), P())

    def put(self, x: Any, spec: Any) -> Any:
        return placing.put(x, NamedSharding(self.mesh, spec))

    def counts(self, forward: int, backward: int) -> Any:
        return self.put(np.array([forward, backward], np.int32), P())


# ---- A step of one's own: the per-shard operations, and no other traffic between the processes


class OwnStep:
    """Every rank's dense work is its own, so nothing but the embedding's messages goes over the link."""

    def __init__(self, work: Workload, staleness: int) -> None:
        self.work, self.staleness = work, staleness
        self.handle = ae.make_context_handle(
            work.mesh,
            "table",
            data_axis="table",
            tokens_per_batch=work.tokens,
            emb_width=WIDTH,
            num_unique=work.tokens,
            num_devices_per_node=jax.local_device_count(),
            name=f"own{staleness}",
            **TABLE,
        )
        self.context_id = self.handle.context_id
        columns, tokens, everywhere = P(None, "table"), P("table"), P()
        shard = functools.partial(jax.shard_map, mesh=work.mesh)
        state = (columns, everywhere, tokens)
        arguments = (state, tokens, tokens, everywhere, everywhere)
        function = self._stale if staleness else self._exact
        self._step = jax.jit(shard(function, in_specs=arguments, out_specs=(state, tokens)), donate_argnums=0)
        self._arm = jax.jit(shard(self._lookup, in_specs=(state, tokens), out_specs=state), donate_argnums=0)
        self._drop = jax.jit(shard(self._consume, in_specs=(state,), out_specs=state), donate_argnums=0)

    def run(self, steps: int, counts: Any) -> Iterator[Any]:
        """Yields the loss of each step when the next one has been dispatched."""
        work = self.work
        state = (
            work.put(np.zeros((ROWS, WIDTH), np.float32), P(None, "table")),
            work.put(np.zeros(ROWS, np.float32), P()),
            work.put(np.zeros(self.handle.group_size, np.float32), P("table")),
        )
        if self.staleness:
            state = self._arm(state, work.ids[0])
        losses = []
        for k in range(steps):
            ids, upcoming = work.ids[k % BATCHES], work.ids[(k + 1) % BATCHES]
            state, loss = self._step(state, ids, upcoming, counts, work.mixer)
            losses.append(loss)
            if k:
                yield losses[k - 1]
        yield losses[-1]
        if self.staleness:
            state = self._drop(state)
        jax.block_until_ready(state)
        ae.check(self.handle)

    def close(self) -> None:
        ae.close_context(self.handle)

    def _update(self, table: Any, accumulator: Any, gate: Any) -> Any:
        return ae.rowwise_adagrad_update_start(
            table, accumulator, gate, self.handle, learning_rate=0.01, eps=1e-8, decay_factor=1.0
        )

    def _rows(self, ids: Any, pin: Any) -> tuple[Any, Any]:
        rows = ae.lookup_done(pin, self.handle, token_ids=ids)
        return rows, ae.depend(pin, rows[0, :1])

    def _lookup(self, state: Any, ids: Any) -> Any:
        table, accumulator, gate = state
        table, pin = ae.lookup_start(ids, table, gate, self.handle)
        return ae.settle(table, pin, self.handle), accumulator, pin

    def _consume(self, state: Any) -> Any:
        table, accumulator, pin = state
        rows = ae.lookup_done(pin, self.handle)
        return ae.depend(table, rows), accumulator, ae.depend(pin, rows)

    def _exact(self, state: Any, ids: Any, upcoming: Any, counts: Any, mixer: Any) -> Any:
        table, accumulator, gate = state
        table, pin = ae.lookup_start(ids, table, gate, self.handle)
        rows, gate = self._rows(ids, pin)
        loss, gradient = jax.value_and_grad(dense)(rows, counts, mixer)
        gate = ae.stage_update(gradient, None, None, True, gate, self.handle)
        table, accumulator, gate = self._update(table, accumulator, gate)
        *_, gate = ae.rowwise_adagrad_update_done(gate, self.handle)
        return (table, accumulator, gate), loss[None]

    def _stale(self, state: Any, ids: Any, upcoming: Any, counts: Any, mixer: Any) -> Any:
        table, accumulator, pin = state
        rows, gate = self._rows(ids, pin)
        table, accumulator, gate = self._update(table, accumulator, gate)
        loss, pull_back = jax.vjp(lambda rows: dense(rows, counts, mixer), ae.depend(rows, gate))
        table, pin, issued = ae.lookup_start_beside_update(upcoming, table, ae.depend(gate, loss), self.handle)
        (gradient,) = pull_back(ae.depend(jnp.ones_like(loss), issued))
        *_, gate = ae.rowwise_adagrad_update_done(ae.depend(issued, gradient), self.handle)
        staged = ae.stage_update(gradient, None, None, True, gate, self.handle)
        return (ae.settle(table, staged, self.handle), accumulator, pin), loss[None]


# ---- A data-parallel training step: XLA sums the loss and the dense gradients over the same link


class DataParallelStep:
    """`train_step`: the mean of the loss, the dense gradients and the finite check are all-reduced by XLA."""

    def __init__(self, work: Workload, staleness: int) -> None:
        self.work, self.staleness = work, staleness
        self.words = ae.AsyncEmbedding(
            work.mesh,
            table_axis="table",
            rows=ROWS,
            width=WIDTH,
            name=f"dp{staleness}",
            optimizer=ae.RowwiseAdagrad(learning_rate=0.01),
            **TABLE,
        )
        self.handle = self.words.handle(work.tokens)
        self.context_id = self.handle.context_id
        mapped = jax.shard_map(
            lambda rows, counts, mixer: dense(rows, counts, mixer)[None],
            mesh=work.mesh,
            in_specs=(P("table"), P(), P()),
            out_specs=P("table"),
        )

        def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
            head = jnp.mean((rows["words"] @ params) ** 2)
            return head + mapped(rows["words"], batch["counts"][0], work.mixer).mean()

        self.step = ae.train_step(
            {"words": self.words}, loss_fn, optax.sgd(0.01), ids_of=lambda b: {"words": b["ids"]}, staleness=staleness
        )

    def run(self, steps: int, counts: Any) -> Iterator[Any]:
        batches = [{"ids": ids, "counts": counts[None]} for ids in self.work.ids]
        state = self.step.init(np.full((WIDTH, 256), 0.1, np.float32), jax.random.key(0))
        for k in range(steps):
            state, metrics = self.step(state, batches[k % BATCHES], batches[(k + 1) % BATCHES])
            yield metrics["loss"]
        self.step.flush(state)

    def close(self) -> None:
        self.step.close()


STEPS = {"independent": OwnStep, "data parallel": DataParallelStep}
