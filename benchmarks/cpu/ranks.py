"""Lookup and update of one table over four host devices, beside what a JAX user writes in ``shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as ae
from benchmarks.ids import make_ids
from benchmarks.timing import alternately
from jax_bridge import global_ops as ops

from .row import Options, Row, faster

ROWS, WIDTH, TOKENS, RANKS = 500_000, 128, 16_384, 4
LEARNING_RATE, EPS = 0.1, 1e-8
COLUMNS, BATCH, EVERYWHERE = P(None, "table"), P("table"), P()


def rows(options: Options) -> Iterator[Row]:
    for kind in ("zipf 1.05",) if options.quick else ("uniform", "zipf 1.05"):
        yield from _lookups(kind, options)
        yield _update(kind, options)


@functools.cache
def _mesh() -> Any:
    return jax.sharding.Mesh(jax.devices()[:RANKS], ("table",))


def _on_mesh(spec: P) -> NamedSharding:
    return NamedSharding(_mesh(), spec)


def _handle(name: str) -> ae.AsyncEmbContextHandle:
    return ae.make_context_handle(
        _mesh(),
        "table",
        data_axis="table",
        tokens_per_batch=TOKENS,
        emb_width=WIDTH,
        num_unique=TOKENS,
        num_devices_per_node=RANKS,
        name=name,
    )


def _table() -> Any:
    make = jax.jit(lambda key: jax.random.normal(key, (ROWS, WIDTH), jnp.bfloat16), out_shardings=_on_mesh(COLUMNS))
    return jax.block_until_ready(make(jax.random.key(0)))


def _state() -> Any:
    return jax.device_put(np.zeros(ROWS, np.float32), _on_mesh(EVERYWHERE))


def _ids(kind: str) -> Any:
    return jax.device_put(make_ids(kind, ROWS, TOKENS, np.random.default_rng(0)), _on_mesh(BATCH))


def _setting(kind: str) -> str:
    return f"{TOKENS:,} ids, {ROWS:,} × {WIDTH} bf16 over {RANKS} devices, {kind}"


# ---- lookup ----


def _lookups(kind: str, options: Options) -> Iterator[Row]:
    table, ids = _table(), _ids(kind)
    reading, taking = _handle("read"), _handle("taken")
    now = jax.jit(ae.fast_dispatch(lambda ids, table: ops.lookup_now(ids, table, reading)))

    def start_and_done(table: Any, ids: Any) -> Any:
        table, pin = ops.lookup_start(ids, table, jnp.zeros(RANKS), taking)
        return table, ops.lookup_done(pin, taking, token_ids=ids)

    pair = jax.jit(ae.fast_dispatch(start_and_done), donate_argnums=0)
    theirs = jax.jit(_mapped(_their_lookup, (COLUMNS, BATCH), BATCH))
    lent = [_table()]

    def run_pair() -> Any:
        lent[0], rows = pair(lent[0], ids)
        return jax.block_until_ready((rows, lent[0]))

    wanted = _bits(theirs(table, ids))
    assert (_bits(now(ids, table)) == wanted).all(), "the rows differ"
    assert (_bits(run_pair()[0]) == wanted).all(), "the rows differ"
    times = alternately(
        {
            "one call": lambda: now(ids, table).block_until_ready(),
            "start and done": run_pair,
            "theirs": lambda: theirs(table, ids).block_until_ready(),
        },
        options.repetitions,
    )
    for handle in (reading, taking):
        ae.check(handle)
        ae.close_context(handle)
    for what in ("one call", "start and done"):
        yield Row(
            "lookup, 4 host devices",
            f"{_setting(kind)}; {what}",
            "JAX all_gather + take + all_to_all",
            times[what],
            times["theirs"],
            "rows bit for bit",
            faster(5.0),
        )


def _their_lookup(table: Any, ids: Any) -> Any:
    everybodys = jax.lax.all_gather(ids, "table", tiled=True)
    columns = jnp.take(table, everybodys, axis=0, mode="clip")
    return jax.lax.all_to_all(columns, "table", split_axis=0, concat_axis=1, tiled=True)


# ---- update ----


def _update(kind: str, options: Options) -> Row:
    ids = _ids(kind)
    rng = np.random.default_rng(1)
    grads = jax.device_put(rng.standard_normal((TOKENS, WIDTH)).astype(jnp.bfloat16), _on_mesh(BATCH))
    handle = _handle("updated")

    def look_up(table: Any, ids: Any) -> Any:
        table, pin = ops.lookup_start(ids, table, jnp.zeros(RANKS), handle)
        rows = ops.lookup_done(pin, handle, token_ids=ids)
        return table, ops.wait_for(pin, rows, BATCH, handle)

    def update(table: Any, state: Any, grads: Any, gate: Any) -> Any:
        gate = ops.stage_update(grads, True, gate, handle)
        table, state, gate = ops.rowwise_adagrad_update_start(
            table, state, gate, handle, learning_rate=LEARNING_RATE, eps=EPS, decay_factor=1.0
        )
        norm, _, _, _ = ops.rowwise_adagrad_update_done(gate, handle)
        return table, state, norm

    first, second = (
        jax.jit(ae.fast_dispatch(look_up), donate_argnums=0),
        jax.jit(ae.fast_dispatch(update), donate_argnums=(0, 1)),
    )
    theirs = jax.jit(
        _mapped(_their_update, (COLUMNS, EVERYWHERE, BATCH, BATCH), (COLUMNS, EVERYWHERE, EVERYWHERE)),
        donate_argnums=(0, 1),
    )
    ours: dict[str, Any] = {"table": _table(), "state": _state(), "gate": None}
    other: dict[str, Any] = {"table": _table(), "state": _state()}

    def prepare() -> None:  # an update belongs to a lookup
        ours["table"], ours["gate"] = jax.block_until_ready(first(ours["table"], ids))

    def run_ours() -> None:
        ours["table"], ours["state"], ours["norm"] = second(ours["table"], ours["state"], grads, ours["gate"])
        jax.block_until_ready(ours)

    def run_theirs() -> None:
        other["table"], other["state"], other["norm"] = theirs(other["table"], other["state"], ids, grads)
        jax.block_until_ready(other)

    prepare()
    run_ours()
    run_theirs()
    for key, tolerance in (("table", 2**-6), ("state", 1e-5), ("norm", 1e-5)):
        a, b = (np.asarray(x[key]).astype(np.float32) for x in (ours, other))
        assert np.allclose(a, b, rtol=tolerance, atol=tolerance), f"{key} differs by up to {np.abs(a - b).max()}"
    times = alternately(
        {"ours": run_ours, "theirs": run_theirs}, 3 if options.quick else 50, warm_up=1, before={"ours": prepare}
    )
    ae.check(handle)
    ae.close_context(handle)
    return Row(
        "update, 4 host devices",
        _setting(kind),
        "JAX unique + segment_sum + scatter",
        times["ours"],
        times["theirs"],
        "table to a bf16 step, state and norm to 1e-5",
        faster(40.0),
        note="ours takes the gradient rows over, too: stage, start and done",
    )


def _their_update(table: Any, state: Any, ids: Any, grads: Any) -> Any:
    everybodys = jax.lax.all_gather(ids, "table", tiled=True)
    columns = jax.lax.all_to_all(grads, "table", split_axis=1, concat_axis=0, tiled=True).astype(jnp.float32)
    unique, segments = jnp.unique(everybodys, return_inverse=True, size=TOKENS, fill_value=ROWS)
    sums = jax.ops.segment_sum(columns, segments, num_segments=TOKENS)
    squares = jax.lax.psum(jnp.sum(sums * sums, axis=1), "table")
    accumulated = state.at[unique].get(mode="fill", fill_value=0.0) + squares / WIDTH
    scale = LEARNING_RATE / (jnp.sqrt(accumulated) + EPS)
    weights = table.at[unique].get(mode="fill", fill_value=0.0).astype(jnp.float32)
    stepped = (weights - scale[:, None] * sums).astype(table.dtype)
    return (
        table.at[unique].set(stepped, mode="drop", unique_indices=True),
        state.at[unique].set(accumulated, mode="drop", unique_indices=True),
        jnp.sqrt(squares.sum()),
    )


def _mapped(function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(function, mesh=_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint16)
