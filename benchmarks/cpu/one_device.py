"""Gather and update on one device: beside torch, FBGEMM, plain JAX, and a copy of the bytes that have to move."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import torch

import torch_ext  # noqa: F401  the torch operators
from benchmarks.gpu_cases import update_bytes
from benchmarks.ids import IDS, make_ids
from benchmarks.timing import alternately

from .copying import bandwidth, plain_copy
from .one_device_update import FbgemmUpdate, JaxUpdate, OperatorsUpdate, OurUpdate, TorchUpdate
from .row import Options, Row, at_most, faster

ROWS, TOKENS = 1_000_000, 65_536
WIDTHS = (16, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = 4  # that take turns, so that no batch finds its own rows in the cache
Peer = OperatorsUpdate | FbgemmUpdate | JaxUpdate | TorchUpdate
HOT_ROW, PADDING_ROW = 123_457, 0


def rows(options: Options) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    yield from _gathers(options, rng)
    yield from _updates(options, rng)
    yield from _uneven(options, rng)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_turn(batches: Sequence) -> Callable[[], object]:
    """Gives one batch after the other, again and again."""
    endless = itertools.cycle(batches)
    return lambda: next(endless)


def setting(width: int, dtype: str, kind: str) -> str:
    return f"1M × {width}, {dtype}, {TOKENS:,} ids, {kind}"


# ---- gather


def _gathers(options: Options, rng: np.random.Generator) -> Iterator[Row]:
    cases = itertools.product(WIDTHS, DTYPES, IDS)
    for width, dtype, kind in [(64, torch.float32, "zipf 1.05")] if options.quick else cases:
        yield _gather(options, rng, width, dtype, kind)


def _gather(options: Options, rng: np.random.Generator, width: int, dtype: torch.dtype, kind: str) -> Row:
    table = torch.randn(ROWS, width).to(dtype)
    batches = [torch.from_numpy(make_ids(kind, ROWS, TOKENS, rng)).long() for _ in range(BATCHES)]
    if not torch.equal(torch.ops.async_emb.gather_rows(table, batches[0]), _embedding(table, batches[0])):
        raise AssertionError(f"gather_rows and embedding differ: {setting(width, name_of(dtype), kind)}")
    row_bytes = width * table.element_size()
    moved = 8 * TOKENS + (len(batches[0].unique()) + TOKENS) * row_bytes
    our_ids, their_ids = in_turn(batches), in_turn(batches)
    times = alternately(
        {
            "ours": lambda: torch.ops.async_emb.gather_rows(table, our_ids()),
            "theirs": lambda: _embedding(table, their_ids()),
            "copy": plain_copy(moved),
        },
        options.repetitions,
    )
    return Row(
        work="gather_rows, one device",
        setting=setting(width, name_of(dtype), kind),
        peer="torch.nn.functional.embedding",
        ours=times["ours"],
        theirs=times["theirs"],
        checked="the same bits",
        goal=at_most(1.0),
        moved=moved,
        copy=bandwidth(times["copy"], moved),
    )


def _embedding(table: torch.Tensor, ids: object) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, table)  # type: ignore[arg-type]


# ---- update


def _updates(options: Options, rng: np.random.Generator) -> Iterator[Row]:
    if options.quick:
        cases = [(64, "float32", "zipf 1.05")]
    else:
        cases = [*itertools.product(WIDTHS, ["float32"], IDS), *itertools.product(WIDTHS, ["bfloat16"], ["zipf 1.05"])]
    for width, dtype, kind in cases:
        yield from _update(options, rng, width, dtype, kind)


def _update(options: Options, rng: np.random.Generator, width: int, dtype: str, kind: str) -> Iterator[Row]:
    batches = [make_ids(kind, ROWS, TOKENS, rng) for _ in range(BATCHES)]
    grads = rng.normal(scale=0.01, size=(TOKENS, width)).astype(np.float32)
    ours = OurUpdate(f"{width} {dtype} {kind}", ROWS, width, dtype, batches, grads)
    moved = update_bytes(TOKENS, len(np.unique(batches[0])), width * jnp.dtype(dtype).itemsize)
    runs: dict[str, Callable[[], object]] = {"ours": ours.update, "copy": plain_copy(moved)}
    before: dict[str, Callable[[], object]] = {"ours": ours.look_up}
    if dtype == "float32":
        peers: dict[str, Peer] = {
            "operators": OperatorsUpdate(ROWS, width, batches, grads),
            "plain JAX": JaxUpdate(ROWS, width, batches, grads),
            "torch": TorchUpdate(ROWS, width, batches, grads),
        }
        try:
            peers["FBGEMM"] = FbgemmUpdate(ROWS, width, batches, grads)
        except ImportError as error:
            print(f"  without FBGEMM: {error}", file=sys.stderr)
        _compare(ours, peers, setting(width, dtype, kind))
        for name, peer in peers.items():
            runs[name], before[name] = peer.update, peer.look_up
    times = alternately(runs, options.repetitions, before=before)

    def row(peer: str, name: str, our_name: str = "ours", work: str = "update, one device", **more: object) -> Row:
        return Row(
            work=work,
            setting=setting(width, dtype, kind),
            peer=peer,
            ours=times[our_name],
            theirs=times[name],
            moved=moved,
            copy=bandwidth(times["copy"], moved),
            **more,  # type: ignore[arg-type]
        )

    compared = "weights and state after one update, to 1e-5"
    if "FBGEMM" in times:
        yield row("FBGEMM CPU, backward + row-wise Adagrad", "FBGEMM", checked=compared, goal=faster(10))
        yield row(
            "FBGEMM CPU, backward + row-wise Adagrad",
            "FBGEMM",
            "operators",
            "update, three torch operators",
            checked=compared,
            goal=faster(10),
        )
    if "plain JAX" in times:
        yield row("plain JAX, unique + segment_sum + scatter", "plain JAX", checked=compared)
        yield row(
            "torch, sparse gradient + torch.optim.Adagrad",
            "torch",
            checked="state after one update, as means over rows, to 1e-5",
            note="one accumulator for each weight: another rule, and more memory",
        )
    yield row("a copy of the bytes it must touch", "copy", checked="–", goal=at_most(2.5))


def _compare(ours: OurUpdate, peers: dict[str, Peer], where: str) -> None:
    ours.look_up()
    ours.update()
    for name, peer in peers.items():
        peer.look_up()
        peer.update()
        for what, mine, other in zip(("weights", "state"), ours.result(), peer.result(), strict=True):
            if other is None:
                continue
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5, err_msg=f"{what} beside {name}: {where}")


# ---- uneven batches


def _uneven(options: Options, rng: np.random.Generator) -> Iterator[Row]:
    """One hot id, and padding: beside the same table and batch without them, so that a cliff would show."""
    width, dtype, kind = 64, "float32", "zipf 1.05"
    grads = rng.normal(scale=0.01, size=(TOKENS, width)).astype(np.float32)
    plain = [make_ids(kind, ROWS, TOKENS, rng) for _ in range(BATCHES)]
    uneven = {
        "half of all ids are one": ([np.where(_share(rng, 0.5), np.int32(HOT_ROW), ids) for ids in plain], None),
        "30 % padding": ([np.where(_share(rng, 0.3), np.int32(PADDING_ROW), ids) for ids in plain], PADDING_ROW),
    }
    even = OurUpdate("even", ROWS, width, dtype, plain, grads)
    for what, (batches, padding) in uneven.items():
        ours = OurUpdate(what, ROWS, width, dtype, batches, grads, padding_id=padding)
        times = alternately(
            {"ours": ours.update, "theirs": even.update},
            options.repetitions,
            before={"ours": ours.look_up, "theirs": even.look_up},
        )
        yield Row(
            work="update, uneven batch",
            setting=f"{setting(width, dtype, kind)}, {what}",
            peer="our own update of an even batch",
            ours=times["ours"],
            theirs=times["theirs"],
            checked="–",
        )


def _share(rng: np.random.Generator, share: float) -> np.ndarray:
    return rng.random(TOKENS) < share
