"""What one native call costs and what a start/done pair costs, with tiny shapes, and how much of a lookup hides."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bridge as ae
from benchmarks.ids import make_ids
from benchmarks.timing import Times, alternately
from jax_bridge import global_ops as ops
from jax_bridge import runtime

from .row import Options, Row, at_most, within

TINY = {"rows": 64, "width": 8, "tokens": 8}
LARGE = {"rows": 1_000_000, "width": 64, "tokens": 65_536}
# Dense work beside a lookup takes about this many times as long as the lookup.
DENSE_TO_LOOKUP = 2.0


def rows(options: Options) -> Iterator[Row]:
    yield from _tiny(options)
    yield from _exposed(options)


class Table:
    """A table on one device, its ids, and the programs that look them up."""

    def __init__(self, name: str, kind: str, *, rows: int, width: int, tokens: int) -> None:
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("table",))
        make = functools.partial(
            ae.make_context_handle,
            mesh,
            "table",
            data_axis="table",
            tokens_per_batch=tokens,
            emb_width=width,
            num_unique=tokens,
            num_devices_per_node=1,
            dtype=jnp.float32,
        )
        reading, taking = make(name=f"{name}, read"), make(name=name)
        self.ids = jnp.asarray(make_ids(kind, rows, tokens, np.random.default_rng(0)))
        self.weights = jax.random.normal(jax.random.key(0), (rows, width), jnp.float32)
        self._lent = jnp.array(self.weights)
        self._handles = (reading, taking)
        self._now = jax.jit(ae.fast_dispatch(lambda ids, table: ops.lookup_now(ids, table, reading)))
        self.taking = taking

    def look_up(self) -> Any:
        return self._now(self.ids, self.weights).block_until_ready()

    def pair(self, between: Callable[[Any], Any] = lambda x: x) -> Callable[[Any], Any]:
        """A start, `between` on an argument, a done: a function of that argument, which waits."""

        def program(table: Any, ids: Any, x: Any) -> Any:
            table, pin = ops.lookup_start(ids, table, jnp.zeros(1), self.taking)
            x = between(ae.depend(x, pin))
            return table, ops.lookup_done(ae.depend(pin, x), self.taking, token_ids=ids), x

        jitted = jax.jit(ae.fast_dispatch(program), donate_argnums=0)

        def run(x: Any) -> Any:
            self._lent, rows, x = jitted(self._lent, self.ids, x)
            return jax.block_until_ready((rows, x, self._lent))

        return run

    def require_rows(self, rows: Any) -> None:
        """Bit for bit those of the table, and no call was refused."""
        wanted = np.asarray(self.weights).view(np.uint32)[np.asarray(self.ids)]
        assert (np.asarray(rows).view(np.uint32) == wanted).all(), "the rows are not the table's"
        for handle in filter(runtime.is_open, self._handles):
            ae.check(handle)

    def close(self) -> None:
        for handle in filter(runtime.is_open, self._handles):
            ae.close_context(handle)


def _tiny(options: Options) -> Iterator[Row]:
    table = Table("tiny", "uniform", **TINY)
    x = jnp.ones((TINY["tokens"], TINY["width"]))
    pair, add = table.pair(), jax.jit(lambda x: x + 1)
    has_peer = importlib.util.find_spec("wrap_torch2jax") is not None
    if not has_peer:
        print("  without wrap-torch2jax, which is not installed", file=sys.stderr)
    torch_gather = _torch_gather(table) if has_peer else table.look_up
    table.require_rows(table.look_up())
    table.require_rows(pair(x)[0])
    table.require_rows(torch_gather())
    times = alternately(
        {
            "call": table.look_up,
            "pair": lambda: pair(x),
            "add": lambda: add(x).block_until_ready(),
            "torch2jax": torch_gather,
        },
        100 if options.quick else 2000,
        warm_up=20,
    )
    table.close()
    setting = "{tokens} ids, {rows} × {width} fp32".format(**TINY)
    same = "rows bit for bit"
    yield Row("one native call", setting, "a jnp add", times["call"], times["add"], same, within(8.0))
    if has_peer:
        yield Row(
            "one native call", setting, "wrap-torch2jax, the same gather", times["call"], times["torch2jax"], same
        )
    yield Row("a start/done pair", setting, "a jnp add", times["pair"], times["add"], same, within(40.0))


def _torch_gather(table: Table) -> Callable[[], Any]:
    import torch
    from wrap_torch2jax import torch2jax

    rows = torch.empty(TINY["rows"], TINY["width"])
    gather = torch2jax(
        lambda rows, ids: torch.nn.functional.embedding(ids, rows), rows, torch.zeros(TINY["tokens"], dtype=torch.int32)
    )
    jitted = jax.jit(gather)
    return lambda: jitted(table.weights, table.ids).block_until_ready()


def _exposed(options: Options) -> Iterator[Row]:
    table = Table("exposed", "zipf 1.05", **LARGE)
    lookup = alternately({"lookup": table.look_up}, 10)["lookup"]
    for cores, step in (("one core", _on_one_core), ("every core", _on_every_core)):
        x = jnp.eye(128) if step is _on_one_core else jnp.eye(1024)
        count = _count_for(step, x, DENSE_TO_LOOKUP * lookup.p50)
        dense_work = functools.partial(_repeat, step, count)
        pair, alone = table.pair(dense_work), jax.jit(dense_work)
        table.require_rows(pair(x)[0])
        times = alternately(
            {
                "pair": functools.partial(pair, x),
                "dense": lambda alone=alone, x=x: alone(x).block_until_ready(),
                "lookup": table.look_up,
            },
            options.repetitions,
        )
        yield Row(
            "a start/done lookup with dense work between, exposed time",
            "{tokens:,} ids, {rows:,} × {width} fp32, zipf 1.05; ".format(**LARGE) + f"dense work on {cores}",
            "the same gather, synchronously",
            _difference(times["pair"], times["dense"]),
            times["lookup"],
            "rows bit for bit",
            at_most(0.25) if step is _on_one_core else None,
            note="the program's time with the lookup, less that of its dense work alone"
            + ("" if step is _on_one_core else ": no core is free for the lookup"),
        )
    table.close()


def _on_one_core(x: Any) -> Any:
    """A product so small that XLA gives it to one thread."""
    return jnp.tanh(x @ x)


def _on_every_core(x: Any) -> Any:
    return jnp.tanh(x @ x)


def _repeat(step: Callable[[Any], Any], count: int, x: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda _, x: step(x), x)


def _count_for(step: Callable[[Any], Any], x: Any, microseconds: float) -> int:
    """Repetitions that take about so long."""
    some = 16
    run = jax.jit(functools.partial(_repeat, step, some))
    once = alternately({"dense": lambda: run(x).block_until_ready()}, 10)["dense"].p50 / some
    return max(1, round(microseconds / once))


def _difference(longer: Times, shorter: Times) -> Times:
    return Times(max(0.0, longer.p50 - shorter.p50), max(0.0, longer.p90 - shorter.p90), longer.count)
