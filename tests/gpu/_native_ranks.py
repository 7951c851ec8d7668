"""Ranks of one context as threads, each with a torch stream of its own: the calls that XLA makes, without XLA.

Several ranks may share a GPU, which tests the whole exchange on one card. Inputs are overwritten on the stream right
after the call that took them, as XLA reuses buffers, and no host waits for a device before the end of a run.

With ``device="cpu"`` and a stand-in for the native module the same code runs without a GPU (`on_cpu`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
import torch

import torch_ext

from ._cases import Batch, Case, Outcome, Rule, Run

# (rank, name of the call that comes next): runs on the rank's thread, with its stream current.
Hook = Callable[[int, str], None]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TRASH = 0x7B7B
_next_context = itertools.count(1 << 40)


def to_torch(values: Any, device: str) -> torch.Tensor:
    """A host array on the device, bit for bit; torch has no conversion for ml_dtypes."""
    values = np.ascontiguousarray(values)
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(values.copy()).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def capsule(tensor: torch.Tensor | None) -> Any:
    """What the native calls take. -1: torch shall order no streams, since the call's own stream is the tensor's."""
    return None if tensor is None else tensor.__dlpack__(stream=-1)


class Inputs(NamedTuple):
    """One rank's part of a batch, on the device."""

    ids: torch.Tensor
    grads: torch.Tensor
    pending: torch.Tensor
    segment_ids: torch.Tensor | None
    unique_tokens: torch.Tensor | None


class Numbers(NamedTuple):
    """learning rate, eps, state decay, weight decay, norm; step, seed, rounding step."""

    floats: torch.Tensor
    integers: torch.Tensor


class Report(NamedTuple):
    """Results of an update, on the device."""

    norm: torch.Tensor
    valid: torch.Tensor
    pending: torch.Tensor


class Rank:
    """One rank: its shard, its stream, and the calls on it. Use it with its stream current (``with rank.on_stream()``).

    Attributes:
        pin: of the last lookup that was started.
    """

    def __init__(self, ranks: NativeRanks, rank: int, start: Any) -> None:
        case, device = ranks.case, ranks.device
        self.device = device
        self.case = case
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        shard = case.width // case.ranks
        self.table = to_torch(start.table[:, rank * shard : (rank + 1) * shard], device)
        self.row_state = to_torch(start.row_state, device)
        self.last_step = to_torch(start.last_step, device) if case.rule.lazy else None
        self.pin = torch.zeros(1, device=device)
        self._order = torch.zeros(1, device=device)
        self._tokens = case.tokens // case.ranks
        block = case.blocks[rank]
        self._mine = slice(block * self._tokens, (block + 1) * self._tokens)
        self.calls = ranks.native.DeviceRank(ranks.context_id, 0, rank, self._handle_of(self.stream))

    @staticmethod
    def _handle_of(stream: Any) -> int:
        return 0 if stream is None else int(stream.cuda_stream)

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    # ---- inputs, uploaded before a run so that nothing waits in it

    def inputs(self, batch: Batch) -> Inputs:
        is_bool = isinstance(batch.pending, bool)
        pending = torch.tensor(batch.pending if is_bool else int(batch.pending), device=self.device)
        segments, unique = batch.segment_ids, batch.unique_tokens
        return Inputs(
            to_torch(batch.ids[self._mine], self.device),
            to_torch(batch.grads[self._mine], self.device),
            pending if is_bool else pending.to(torch.int32),
            None if segments is None else to_torch(segments[self._mine], self.device),
            None if unique is None else to_torch(unique, self.device),
        )

    def numbers(self, rule: Rule, step: int) -> Numbers:
        clip = 0.0 if rule.max_grad_norm is None else rule.max_grad_norm
        floats = [rule.learning_rate, rule.eps, rule.state_decay, rule.weight_decay, clip]
        words = np.array([step & 0xFFFFFFFF, rule.seed, step & 0xFFFFFFFF], np.uint32).view(np.int32)
        return Numbers(torch.tensor(floats, dtype=torch.float32, device=self.device), to_torch(words, self.device))

    # ---- the calls

    @contextlib.contextmanager
    def lent(self, *tensors: torch.Tensor | None) -> Iterator[list[Any]]:
        """Copies of the tensors, which are overwritten on the stream when the block ends."""
        copies = [None if tensor is None else tensor.clone() for tensor in tensors]
        yield [capsule(copy) for copy in copies]
        for copy in copies:
            if copy is not None:
                copy.view(torch.uint8 if copy.dtype == torch.bool else copy.dtype).fill_(_TRASH % 256)

    def lookup_begin(self, ids: torch.Tensor) -> None:
        with self.lent(ids) as (given,):
            self.calls.lookup_begin(given, capsule(self.table), capsule(self.pin))

    def lookup_done(self, ids: torch.Tensor | None = None, pin: torch.Tensor | None = None) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.case.dtype.name]
        rows = torch.zeros(self._tokens, self.case.width, dtype=dtype, device=self.device)
        with self.lent(ids) as (given,):
            self.calls.lookup_done(capsule(self.pin if pin is None else pin), capsule(rows), given)
        return rows

    def stage(self, inputs: Inputs) -> None:
        with self.lent(inputs.grads, inputs.pending, inputs.segment_ids, inputs.unique_tokens) as given:
            self.calls.stage_update(given[0], given[1], capsule(self._order), given[2], given[3])

    def update_begin(self, rule: Rule, numbers: Numbers) -> None:
        with self.lent(*numbers) as (floats, integers):
            self.calls.update_begin(
                capsule(self.table),
                capsule(self.row_state),
                capsule(self.last_step),
                floats,
                integers,
                capsule(self._order),
                rule.max_grad_norm is not None,
                rule.rounding == "stochastic",
            )

    def update_done(self) -> Report:
        norm = torch.full((), -1.0, device=self.device)
        valid, pending = (torch.full((), -1, dtype=torch.int32, device=self.device) for _ in range(2))
        self.calls.update_done(capsule(norm), capsule(valid), capsule(pending), capsule(self._order))
        return Report(norm, valid, pending)

    def settle(self) -> None:
        self.calls.settle()


class NativeRanks:
    """A context of its own for a case, and its ranks, all on the first GPU. Leaving it closes the context."""

    def __init__(self, case: Case, *, device: str = "cuda", native: Any = None, timeout_seconds: float = 60.0) -> None:
        self.case, self.device = case, device
        self.native = torch_ext.native() if native is None else native
        self.context_id = next(_next_context)
        self._timeout_seconds = timeout_seconds
        self.open()
        self.ranks = [Rank(self, rank, case.start) for rank in range(case.ranks)]
        if device == "cuda":
            torch.cuda.synchronize()  # uploads went through another stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.native.close_context(self.context_id)

    def fields(self) -> dict[str, Any]:
        """As jax_bridge.runtime.open_context gives them."""
        case = self.case
        return {
            "context_id": self.context_id,
            "key": f"{case} {self.context_id}",
            "name": case.name,
            "group_size": case.ranks,
            "devices": list(range(100, 100 + case.ranks)),
            "gpus": [0] * case.ranks,
            "processes": [],
            "process": 0,
            "transports": [],
            "device_links": [],
            "token_blocks": list(case.blocks),
            "tokens_per_rank": case.tokens // case.ranks,
            "emb_width": case.width,
            "logical_width": case.logical_width or case.width,
            "num_unique": case.num_unique or case.tokens,
            "dtype": case.dtype.name,
            "id_policy": case.id_policy,
            "padding_id": case.padding_id,
            "lookup_only": False,
            "timeout_seconds": self._timeout_seconds,
        }

    def open(self) -> None:
        self.native.open_context(self.fields())

    def on_ranks(self, body: Callable[[Rank, int], Any]) -> list[Any]:
        """Runs the body for every rank on a thread of its own, its stream current. Gives what the bodies return.

        One that raises aborts the context, so that no other waits for it; the first exception is raised.
        """

        def run(rank: int) -> Any:
            try:
                with self.ranks[rank].on_stream():
                    return body(self.ranks[rank], rank)
            except BaseException as error:
                self.native.abort_context(self.context_id, f"rank {rank} of the test failed: {error}")
                raise

        with ThreadPoolExecutor(self.case.ranks) as pool:
            futures = [pool.submit(run, rank) for rank in range(self.case.ranks)]
        errors = [future.exception() for future in futures]
        mine = [error for error in errors if error is not None]
        if mine:
            raise next((error for error in mine if "was aborted" not in str(error)), mine[0])
        return [future.result() for future in futures]

    def run(self, hook: Hook = lambda rank, call: None) -> Outcome:
        """All batches of the case, in its schedule."""
        case = self.case
        program = _stale if case.staleness else _exact

        def prepare(rank: Rank, _: int) -> Any:
            inputs = [rank.inputs(batch) for batch in case.batches]
            return inputs, [rank.numbers(case.rule, step) for step in range(len(inputs))]

        prepared = self.on_ranks(prepare)
        if self.device == "cuda":
            torch.cuda.synchronize()
        results = self.on_ranks(lambda rank, number: program(rank, *prepared[number], lambda c: hook(number, c)))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return Outcome(self._run_of(results), dict(self.native.stats(self.context_id)), self.reported())

    def reported(self) -> str | None:
        """What the host is told after a run; raises where that is a refusal."""
        refusal = self.native.take_refusal(self.context_id)
        assert refusal is None, refusal
        problem = self.native.take_id_problem(self.context_id)
        if problem is None:
            return None
        return "unique" if problem["too_many_unique"] else "id"

    def tables(self) -> np.ndarray[Any, Any]:
        """The whole table."""
        return np.concatenate([to_numpy(rank.table) for rank in self.ranks], axis=1)

    def _run_of(self, results: list[tuple[list[torch.Tensor], list[Report]]]) -> Run:
        in_token_order = np.argsort(self.case.blocks)
        steps = len(self.case.batches)
        rows = np.stack(
            [np.concatenate([to_numpy(results[rank][0][k]) for rank in in_token_order]) for k in range(steps)]
        )
        reports = [[np.array([to_numpy(report[i]) for report in reports]) for i in range(3)] for _, reports in results]
        states = [to_numpy(rank.row_state) for rank in self.ranks]
        lasts = [self.case.start.last_step if r.last_step is None else to_numpy(r.last_step) for r in self.ranks]
        for same in (reports, states, lasts):
            for other in same[1:]:
                assert np.array_equal(np.array(same[0]).view(np.uint8), np.array(other).view(np.uint8)), "ranks differ"
        norms, valids, pendings = reports[0]
        return Run(self.tables(), states[0], lasts[0], rows, norms, valids, pendings)


def _exact(rank: Rank, inputs: list[Inputs], numbers: list[Numbers], hook: Callable[[str], None]) -> Any:
    rule, rows, reports = rank.case.rule, [], []
    for batch, now in zip(inputs, numbers, strict=True):
        hook("lookup_begin")
        rank.lookup_begin(batch.ids)
        hook("lookup_done")
        rows.append(rank.lookup_done(batch.ids))
        hook("stage")
        rank.stage(batch)
        hook("update_begin")
        rank.update_begin(rule, now)
        hook("update_done")
        reports.append(rank.update_done())
    return rows, reports


def _stale(rank: Rank, inputs: list[Inputs], numbers: list[Numbers], hook: Callable[[str], None]) -> Any:
    """As a stale step does it: its settle is at its end, behind the backward."""
    rule, rows, reports = rank.case.rule, [], []
    rank.lookup_begin(inputs[0].ids)
    for k, batch in enumerate(inputs):
        hook("lookup_done")
        rows.append(rank.lookup_done(batch.ids))
        hook("update_begin")
        rank.update_begin(rule, numbers[max(k - 1, 0)])
        hook("lookup_begin")
        rank.lookup_begin(inputs[min(k + 1, len(inputs) - 1)].ids)
        hook("update_done")
        reports.append(rank.update_done())
        hook("stage")
        rank.stage(batch)
        hook("settle")
        rank.settle()
    rank.lookup_done()
    rank.update_begin(rule, numbers[-1])
    reports.append(rank.update_done())
    return rows, reports[1:]  # the first update had nothing staged
