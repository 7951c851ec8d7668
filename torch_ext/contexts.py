"""One rank's side of a native context: opening it together with the other ranks, its calls, and what it has to say."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_ext._load import load
from torch_ext.build import installed_version
from torch_ext.common.context_key import differences, id_of, key_of
from torch_ext.common.errors import ContextError, FailedContextError, IdError, PipelineError, raise_problems
from torch_ext.common.ids import id_error
from torch_ext.common.timeouts import timeout_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from torch_ext.ranks import Ranks

AFTER_A_FAILURE = (
    "Every call of this context fails until it is closed and opened again (AsyncEmbedding.close on every rank; the "
    "next call opens it). An update that failed on the way may have reached some rows: go on from a state_dict"
)


class Numbers(NamedTuple):
    """What all ranks of a context must agree about, beside who they are. Widths are columns, over all ranks."""

    name: str
    purpose: str
    tokens_per_rank: int
    emb_width: int
    logical_width: int
    num_unique: int
    dtype: str
    id_policy: str
    padding_id: int | None


class Context:
    """One rank of an open context.

    Attributes:
        numbers: what it was opened with.
        context_id: its number in the native module.
        lookups, updates: how many this rank has finished since.
        told_failure: the caller knows that the context has failed.
    """

    def __init__(self, owner: object, ranks: Ranks, numbers: Numbers, settings: Mapping[str, Any]) -> None:
        """Opens it. Every rank must do so.

        Args:
            owner: whose work is under way here. While it lives, nobody else of its name can open the context.
            settings: what all ranks must agree about beside ``numbers``: of the optimizer and the schedule.

        Raises:
            ContextError: the ranks do not mean the same, or another table at work has this name.
        """
        self.numbers, self._ranks = numbers, ranks
        self.lookups = self.updates = 0
        self.told_failure = False
        self._opening = _open(ranks, numbers, settings, owner)
        self.context_id = self._opening.context_id
        self._rank = load().Rank(self.context_id, ranks.rank)
        self._refusals = 0  # refused calls that were told
        # Where nobody has closed it: a context holds memory, and its name.
        self._finalizer = weakref.finalize(owner, self._opening.leave, ranks.rank)
        self._finalizer.atexit = False

    # ---- the calls ----

    def lookup_start(self, ids: Tensor, table: Tensor) -> tuple[float, Any]:
        """(pin, lease): the table is read until the lease is over."""
        return self._call(self._opening.lookup_start, self._rank, _lend(ids), _lend(table))

    def lookup_done(self, pin: float, ids: Tensor | None, rows: Tensor) -> None:
        """Waits for the rows, [tokens_per_rank, emb_width], without Python's lock."""
        given = None if ids is None else _lend(ids)
        self._call(self._call(self._rank.lookup_done, pin, given, _lend(rows)).wait)
        self.lookups += 1

    def stage_update(self, grads: Tensor, apply: bool) -> float:
        """Hands over gradient rows, [tokens_per_rank, emb_width], which are copied."""
        return self._call(self._rank.stage_update, _lend(grads), apply)

    def update_start(
        self, rule: Mapping[str, Any], table: Tensor, row_state: Tensor, last_step: Tensor | None
    ) -> tuple[float, Any]:
        """(pin, lease): the tensors are written until the lease is over."""
        last = None if last_step is None else _lend(last_step)
        return self._call(self._rank.update_start, dict(rule), _lend(table), _lend(row_state), last)

    def update_done(self) -> tuple[float, bool, bool]:
        """Waits for (norm, valid, pending), without Python's lock."""
        result = self._call(self._call(self._rank.update_done).result)
        self.updates += 1
        return result

    def wait(self, work: Any) -> None:
        """Waits for a lease, without Python's lock."""
        self._call(work.wait)

    def staged(self) -> tuple[Tensor, Tensor, bool] | None:
        """This rank's staged gradients: ids int32 [tokens_per_rank] (-1 trains nothing), rows [tokens_per_rank,
        emb_width], and whether to apply them. Every rank must be at rest."""
        (found,) = self._call(load().staged, self.context_id)
        if found is None:
            return None
        ids, grads, pending = found
        # Of all ranks of this process, in order.
        first = 0 if self._ranks.processes else self._ranks.rank * self.numbers.tokens_per_rank
        mine = slice(first, first + self.numbers.tokens_per_rank)
        dtype = getattr(torch, self.numbers.dtype)
        rows = torch.frombuffer(bytearray(grads), dtype=dtype).reshape(-1, self.numbers.emb_width)
        return torch.frombuffer(bytearray(ids), dtype=torch.int32)[mine].clone(), rows[mine].clone(), pending

    def restore_staged(self, ids: Tensor, grads: Tensor, pending: bool) -> None:
        """Takes the staged gradients of all ranks, in token order. Every rank does so, at rest."""
        self._ranks.exchange("restore staged gradients", None)
        if self._speaks:
            self._call(load().restore_staged, self.context_id, _bytes(ids), _bytes(grads), pending)
        self._ranks.exchange("restore staged gradients, second part", None)

    # ---- what it has to say ----

    def check(self) -> None:
        """Raises what the steps that this rank has finished have left to say. Nothing of this rank may run.

        Raises:
            FailedContextError: the context has failed. This is not cleared.
            PipelineError: a call was refused, and so was everything after it. The ranks meet to clear that.
            IdError: ids outside of the table, or more distinct ones than ``num_unique``; they were dropped.
        """
        self.check_refusals()
        if (problem := self._opening.take_id_problem(self._ranks.rank, self.lookups, self.updates)) is not None:
            raise self._id_error(problem)

    def check_refusals(self) -> None:
        """As ``check``, but for ids: also for a step that has only looked up yet."""
        if (failure := self._call(load().failure, self.context_id)) is not None:
            raise self._failed(failure)
        if int(load().stats(self.context_id)["refused_calls"]) > self._refusals:
            self._raise_refusal()

    def stats(self) -> dict[str, float]:
        """The counters of the ranks of this process, as ``jax_bridge.stats`` has them."""
        counts: dict[str, float] = dict(self._call(load().stats, self.context_id))
        counts["unique_share"] = counts["unique_tokens"] / max(counts["trained_tokens"], 1)
        here = 1 if self._ranks.processes else self._ranks.size
        counts["exposed_wait_seconds"] = counts.pop("exposed_wait_ns") * 1e-9 / here
        return counts

    def abort(self, reason: str) -> None:
        """Ends every wait of the context, on every rank, with an error that says ``reason``."""
        load().abort_context(self.context_id, reason)

    def close(self) -> None:
        """Leaves the context; the last rank of the process closes it."""
        self._finalizer()

    @property
    def _speaks(self) -> bool:
        """Whether this rank does what is to be done once in its process."""
        return bool(self._ranks.processes) or self._ranks.rank == 0

    def _raise_refusal(self) -> None:
        where = f"hear why a call of table {self.numbers.name!r} was refused"
        in_threads = not self._ranks.processes
        if in_threads:
            self._ranks.exchange(where, None)  # it can be taken back only where nothing runs
        refusal = self._call(load().take_refusal, self.context_id) if self._speaks else None
        if in_threads:
            refusal = self._ranks.exchange(f"{where}, second part", refusal)[0]
        self._refusals = int(load().stats(self.context_id)["refused_calls"])
        raise PipelineError(refusal or f"async_emb {self.numbers.name!r}: a call was refused on another rank")

    def _id_error(self, problem: Mapping[str, int]) -> IdError:
        return id_error(
            self.numbers.name,
            problem,
            num_unique=self.numbers.num_unique,
            tokens_per_batch=self.numbers.tokens_per_rank * self._ranks.size,
            padding_id=self.numbers.padding_id,
        )

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except load().CallError as error:
            if error.kind == "invalid_argument":
                raise ContextError(str(error)) from None
            raise self._failed(str(error)) from None

    def _failed(self, message: str) -> FailedContextError:
        self.told_failure = True
        error = FailedContextError(message)
        error.add_note(AFTER_A_FAILURE)
        return error


class _Opening:
    """What the ranks of this process share of one opening of a context."""

    def __init__(self, group: Any, context_id: int, members: set[int]) -> None:
        self.group, self.context_id = group, context_id
        self.owners: dict[int, weakref.ref[object]] = {}  # by rank
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._everyone = frozenset(members)
        self._members = members
        self._problems: list[tuple[Mapping[str, int], set[int]]] = []  # with the ranks that were told

    def lookup_start(self, rank: Any, ids: Any, table: Any) -> tuple[float, Any]:
        """The native call. What it finds of its ids is taken at once: the native module keeps the first of a context,
        and another rank may be a step ahead."""
        with self._lock:
            result = rank.lookup_start(ids, table)
            self._collect()
        return result

    def take_id_problem(self, rank: int, lookups: int, updates: int) -> Mapping[str, int] | None:
        """The first problem that ``rank`` has finished the step of and was not told. Asking the native module clears
        it for all ranks, so it is kept here until each was told."""
        with self._lock:
            self._collect()
            for problem, told in self._problems:
                finished = updates if problem["too_many_unique"] else lookups
                if rank not in told and problem["step"] <= finished:
                    told.add(rank)
                    self._problems = [entry for entry in self._problems if entry[1] != self._everyone]
                    return problem
        return None

    def _collect(self) -> None:
        found = load().take_id_problem(self.context_id)
        if found is None:
            return
        same = ("step", "too_many_unique")
        for place, (known, told) in enumerate(self._problems):
            if all(known[key] == found[key] for key in same):  # nobody was told before all had found theirs
                if found["position"] < known["position"]:
                    self._problems[place] = (found, told)
                return
        self._problems.append((found, set()))
        self._problems.sort(key=lambda entry: entry[0]["step"])

    def leave(self, rank: int) -> None:
        if os.getpid() != self._process:  # a fork: the threads that would end the work are the other process's
            return
        with _openings_lock:
            self._members.discard(rank)
            if self._members or _openings.get(self.context_id) is not self:
                return
            del _openings[self.context_id]
        load().close_context(self.context_id)


_openings: dict[int, _Opening] = {}
_openings_lock = threading.Lock()


def abort_all(group: Any, why: str) -> None:
    """Aborts every context that the ranks of ``group`` have open."""
    with _openings_lock:
        ids = [opening.context_id for opening in _openings.values() if opening.group is group]
    for context_id in ids:
        load().abort_context(context_id, why)


def _open(ranks: Ranks, numbers: Numbers, settings: Mapping[str, Any], owner: object) -> _Opening:
    agreed = {
        **numbers._asdict(),
        "face": "torch",
        "group_size": ranks.size,
        "processes": ranks.processes,
        "shard_width": numbers.emb_width // ranks.size,
    }
    around = {
        "ASYNC_EMB_TIMEOUT_SECONDS": timeout_seconds(),
        "async_emb": installed_version("async-emb"),
        "torch": torch.__version__,
    }
    key = key_of(agreed)
    context_id = id_of(key)
    _require_free(context_id, ranks, numbers.name, owner)
    said = ranks.exchange("open a context", {**agreed, **settings, **around})
    describe = lambda who: ", ".join(f"rank {rank}" for rank in who)  # noqa: E731
    if problems := differences(numbers.name, dict(enumerate(said)), describe, whose="ranks"):
        raise_problems(problems)
    transports = ranks.connect()
    with _openings_lock:
        opening = _openings.get(context_id)
        if opening is None:
            _open_native(context_id, key, ranks, numbers, transports)
            here = {ranks.rank} if ranks.processes else set(range(ranks.size))
            opening = _openings[context_id] = _Opening(ranks.group, context_id, here)
        opening.owners[ranks.rank] = weakref.ref(owner)
    return opening


def _open_native(context_id: int, key: str, ranks: Ranks, numbers: Numbers, transports: list[Any]) -> None:
    fields = {
        **numbers._asdict(),
        "context_id": context_id,
        "key": key,
        "group_size": ranks.size,
        "devices": list(range(ranks.size)),
        "gpus": [],
        "processes": ranks.processes,
        "process": ranks.process,
        "token_blocks": list(range(ranks.size)),
        "lookup_only": numbers.purpose == "lookup",
        "timeout_seconds": timeout_seconds(),
        "transports": transports,
    }
    try:
        load().open_context(fields)
    except (RuntimeError, MemoryError) as error:
        raise ContextError(f"async_emb context {numbers.name!r} cannot be opened: {error}") from error


def _require_free(context_id: int, ranks: Ranks, name: str, owner: object) -> None:
    with _openings_lock:
        opening = _openings.get(context_id)
        if opening is None:
            return
        holder = opening.owners.get(ranks.rank)
        other = opening.group is not ranks.group or (holder is not None and holder() not in (None, owner))
    if other:
        error = ContextError(f"async_emb {name!r}: another AsyncEmbedding at work in this process has this name")
        error.add_note("Contexts are told apart by name: give this table another name, or close the other one first.")
        raise error


def _lend(tensor: Tensor) -> Any:
    return torch.utils.dlpack.to_dlpack(tensor.detach())  # type: ignore[attr-defined]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
