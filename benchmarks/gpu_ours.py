"""Our side of the benchmark: one rank of a context on the current GPU, called as XLA calls it."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import torch_ext
from jax_bridge import reference

from .gpu_cases import ELEMENT
from .ids import make_ids
from .timing import Times, times_of

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATE, EPS = 0.05, 1e-8
WARM_UP = 3
HEAD_START = 100_000_000  # cycles: about 50 ms
_next_context = itertools.count(1 << 41)


def timed_parts(parts: list[Callable[[int], Any]], *, repetitions: int) -> list[Times]:
    """Of each of the parts, which run one after the other on the current stream, by events between them.

    The stream is kept busy at first, so that the host is ahead and its own time is not measured.
    """
    torch.cuda._sleep(HEAD_START)
    events = []
    for i in range(WARM_UP + repetitions):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        marks[0].record()
        for part, mark in zip(parts, marks[1:], strict=True):
            part(i)
            mark.record()
        events.append(marks)
    torch.cuda.synchronize()
    measured = events[WARM_UP:]
    return [times_of([marks[k].elapsed_time(marks[k + 1]) * 1e3 for marks in measured]) for k in range(len(parts))]


def timed(calls: list[Callable[[], Any]], *, repetitions: int) -> Times:
    """Of the calls in turn."""
    return timed_parts([lambda i: calls[i % len(calls)]()], repetitions=repetitions)[0]


def copy_bandwidth(size: int, repetitions: int) -> float:
    """Bytes a second, read and written, of the driver's copy within the device."""
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = timed([lambda: target.copy_(source)], repetitions=repetitions)
    return 2 * size / (times.p50 * 1e-6)


class Ours:
    """A table with its context. A context manager."""

    def __init__(self, rows: int, width: int, dtype: str, tokens: int) -> None:
        self.rows, self.width, self.dtype, self.tokens = rows, width, dtype, tokens
        self.table = torch.empty(rows, width, dtype=TORCH_DTYPES[dtype], device="cuda").normal_()
        self.state = torch.zeros(rows, device="cuda")
        self._id = next(_next_context)
        self._native = torch_ext.native()
        self._native.open_context(
            {
                "context_id": self._id,
                "key": f"benchmark {self._id}",
                "name": f"benchmark, width {width}, {dtype}",
                "group_size": 1,
                "devices": [0],
                "gpus": [torch.cuda.current_device()],
                "token_blocks": [0],
                "tokens_per_rank": tokens,
                "emb_width": width,
                "logical_width": width,
                "num_unique": tokens,
                "dtype": dtype,
                "id_policy": "drop",
                "padding_id": None,
                "lookup_only": False,
                "timeout_seconds": 60.0,
            }
        )
        self._calls = self._native.DeviceRank(self._id, 0, 0, torch.cuda.current_stream().cuda_stream)
        self.rows_out = torch.empty(tokens, width, dtype=self.table.dtype, device="cuda")
        self._pin = torch.zeros(1, device="cuda")
        self._order = torch.zeros(1, device="cuda")
        self._pending = torch.ones((), dtype=torch.int32, device="cuda")
        self._floats = torch.tensor([LEARNING_RATE, EPS, 1.0, 1.0, 0.0], device="cuda")
        self._integers = torch.zeros(3, dtype=torch.int32, device="cuda")
        self.norm = torch.zeros((), device="cuda")
        self._valid, self._was_pending = (torch.zeros((), dtype=torch.int32, device="cuda") for _ in range(2))

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self._native.close_context(self._id)

    def lookup(self, ids: torch.Tensor) -> None:
        """A whole pair: the rows are in `rows_out` when the stream is done."""
        self._calls.lookup_begin(_capsule(ids), _capsule(self.table), _capsule(self._pin))
        self._calls.lookup_done(_capsule(self._pin), _capsule(self.rows_out))

    def stage(self, grads: torch.Tensor) -> None:
        self._calls.stage_update(_capsule(grads), _capsule(self._pending), _capsule(self._order))

    def update(self) -> None:
        """Start and done of what is staged."""
        buffers = (_capsule(self.table), _capsule(self.state), None)
        self._calls.update_begin(*buffers, _capsule(self._floats), _capsule(self._integers), _capsule(self._order))
        results = (_capsule(self.norm), _capsule(self._valid), _capsule(self._was_pending))
        self._calls.update_done(*results, _capsule(self._order))


def _capsule(tensor: torch.Tensor) -> Any:
    return tensor.__dlpack__(stream=-1)


def kernel_times(work: Callable[[], Any], repetitions: int) -> dict[str, list[float]]:
    """Microseconds of each launch of our kernels in `repetitions` of `work`, by body; empty without CUPTI."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repetitions):
            work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events() or ():
        if (name := kernel_name(event.name)) is not None:
            found[name].append(float(event.time_range.elapsed_us()))
    return dict(found)


def kernel_name(symbol: str) -> str | None:
    """The body of one of our kernels, or the algorithm of one of CUB's; None for others."""
    if (ours := re.search(r"run_body<(?:\w+::)*(\w+)", symbol)) is not None:
        return ours[1]
    if (cub := re.search(r"cub::.*?\b(Device\w+Kernel)", symbol)) is not None:
        return cub[1]
    return None


def check_bits(width: int, dtype: str) -> None:
    """A lookup and an update of a small table give the oracle's bits. Raises AssertionError."""
    rows, tokens = 50_000, 16_384
    rng = np.random.default_rng(width)
    ids = make_ids("zipf 1.15", rows, tokens, rng)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    grads = rng.normal(size=(tokens, width)).astype(numpy_dtype)
    with Ours(rows, width, dtype, tokens) as ours:
        table, state = _to_numpy(ours.table), _to_numpy(ours.state)
        on_device = torch.from_numpy(ids).cuda()
        ours.lookup(on_device)
        same_width = np.int16 if ELEMENT[dtype] == 2 else np.int32
        given = torch.from_numpy(grads.view(same_width)).cuda().view(TORCH_DTYPES[dtype])
        ours.stage(given)
        ours.update()
        torch.cuda.synchronize()
        assert np.array_equal(_to_numpy(ours.rows_out).view(same_width), table[ids].view(same_width)), "rows"
        wanted = reference.rowwise_adagrad_update(
            table, state, ids, grads, learning_rate=LEARNING_RATE, eps=EPS, decay_factor=1.0
        )
        assert float(ours.norm) == float(wanted.norm), "norm"
        assert np.array_equal(_to_numpy(ours.state), wanted.row_state), "state"
        assert np.array_equal(_to_numpy(ours.table).view(same_width), wanted.table.view(same_width)), "table"


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    host = tensor.cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy().copy()
