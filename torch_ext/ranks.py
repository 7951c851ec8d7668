"""Who holds a table: the ranks of a program, as processes of ``torch.distributed`` or as threads of one process.

A rank says things to all others (``exchange``) and gathers tensors from them. Every rank makes the same calls in the
same order; one that does not come ends the call of the others with an error that names it.
"""

from __future__ import annotations

import abc
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from torch_ext import process_groups
from torch_ext.common.errors import ContextError, FailedContextError
from torch_ext.common.timeouts import timeout_seconds

if TYPE_CHECKING:
    from torch import Tensor

dist: Any = torch.distributed
Result = TypeVar("Result")


class Ranks(abc.ABC):
    """One rank, and its way to the others.

    Attributes:
        size: how many ranks there are.
        rank: which one this is, from 0.
    """

    size: int
    rank: int

    @property
    @abc.abstractmethod
    def group(self) -> Any:
        """What all ranks of this process have in common: the same object for all that share contexts."""

    @property
    @abc.abstractmethod
    def processes(self) -> list[int]:
        """The process of each rank; empty where all are in this one."""

    @property
    def process(self) -> int:
        """The number of this process."""
        return self.rank if self.processes else 0

    @abc.abstractmethod
    def exchange(self, what: str, value: Any) -> list[Any]:
        """What every rank says, in rank order. ``what`` is for messages, and the same on every rank.

        Raises:
            FailedContextError: a rank did not come within ``ASYNC_EMB_TIMEOUT_SECONDS``, or is in another call.
        """

    @abc.abstractmethod
    def gather(self, what: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of every rank, of one dtype and shape, in rank order."""

    @abc.abstractmethod
    def connect(self) -> list[Any]:
        """What a native context needs to reach the ranks of other processes; empty where there are none."""


def default_ranks() -> Ranks:
    """The processes of ``torch.distributed``'s default group where it is initialised, else this thread alone."""
    if dist.is_available() and dist.is_initialized():
        return ProcessRanks()
    return ThreadRanks(1).rank(0)


class ThreadRanks:
    """Ranks that are threads of this process: a table shared by several workers, or a test of many ranks.

    Example::

        def train(ranks):
            users = AsyncEmbedding(1000, 64, name="users", optimizer=optimizer, ranks=ranks)
            ...

        ThreadRanks(4).run(train)
    """

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ContextError(f"async_emb ThreadRanks: size={size!r} must be an integer of at least 1")
        self.size = size
        self._changed = threading.Condition()
        self._calls = [0] * size
        self._said: dict[int, dict[int, tuple[str, Any]]] = {}  # by the number of the call
        self._ended: str | None = None

    def rank(self, number: int) -> Ranks:
        """Rank ``number``, for the thread that is to be it."""
        if not 0 <= number < self.size:
            raise ContextError(f"async_emb ThreadRanks: there is no rank {number} among {self.size}")
        return _ThreadRank(self, number)

    def run(self, function: Callable[[Ranks], Result]) -> list[Result]:
        """Calls ``function`` once for each rank, each in a thread of its own, and returns what they return.

        If one raises, the others' waits end with a FailedContextError, and its exception is raised here.
        """
        with self._changed:
            self._calls, self._said, self._ended = [0] * self.size, {}, None
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def call(number: int) -> None:
            try:
                results[number] = function(self.rank(number))
            except BaseException as error:
                errors.append((number, error))
                self.end(f"rank {number} has ended with {type(error).__name__}: {error}")

        threads = [threading.Thread(target=call, args=(n,), name=f"async_emb rank {n}") for n in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            # One that has ended the others may be told of later than they are.
            own = [entry for entry in errors if not isinstance(entry[1], FailedContextError)]
            number, error = (own or errors)[0]
            if self.size > 1:
                error.add_note(f"On rank {number} of {self.size}.")
            raise error
        return results

    def end(self, why: str) -> None:
        """Ends every wait of these ranks for each other, now and later."""
        from torch_ext.contexts import abort_all

        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()
        abort_all(self, why)

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """See ``Ranks.exchange``."""
        if self.size == 1:
            return [value]
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            said = self._said.setdefault(number, {})
            said[rank] = (what, value)
            self._changed.notify_all()
            seconds = timeout_seconds()
            self._changed.wait_for(lambda: len(said) == self.size or self._ended is not None, seconds)
            self._said.pop(number, None)
        if len(said) < self.size:
            missing = ", ".join(f"rank {r}" for r in range(self.size) if r not in said)
            why = self._ended or f"{missing} did not come within {seconds:g} s"
            raise FailedContextError(f"async_emb: rank {rank} waited for the others to {what}, but {why}")
        _require_same_call(rank, what, {r: said[r][0] for r in said})
        return [said[r][1] for r in range(self.size)]


class _ThreadRank(Ranks):
    def __init__(self, group: ThreadRanks, rank: int) -> None:
        self._group = group
        self.size, self.rank = group.size, rank

    @property
    def group(self) -> Any:
        return self._group

    @property
    def processes(self) -> list[int]:
        return []

    def exchange(self, what: str, value: Any) -> list[Any]:
        return self._group.exchange(self.rank, what, value)

    def gather(self, what: str, tensor: Tensor) -> list[Tensor]:
        tensors = [theirs.clone() for theirs in self.exchange(what, tensor)]
        self.exchange(f"{what}, second part", None)  # nobody writes into a tensor that another rank still copies
        return tensors

    def connect(self) -> list[Any]:
        return []


class ProcessRanks(Ranks):
    """The processes of a group of ``torch.distributed``, one rank each.

    Args:
        group: a process group that moves tensors of the CPU (Gloo); the default group unless given. Contexts have
            connections of their own, and take from it only its store.
    """

    def __init__(self, group: Any = None) -> None:
        process_groups.require_distributed()
        if not dist.is_initialized():
            raise ContextError(
                "async_emb ProcessRanks: torch.distributed is not initialised; call torch.distributed."
                "init_process_group first, or use ThreadRanks in one process"
            )
        self._process_group = dist.group.WORLD if group is None else group
        self.size, self.rank = dist.get_world_size(self._process_group), dist.get_rank(self._process_group)
        if self.rank < 0:
            raise ContextError("async_emb ProcessRanks: this process does not belong to the group")
        # The group's own store: two groups may meet at the same time.
        self._store = dist.distributed_c10d._get_process_group_store(self._process_group)

    @property
    def group(self) -> Any:
        return self._process_group

    @property
    def processes(self) -> list[int]:
        return list(range(self.size)) if self.size > 1 else []

    def exchange(self, what: str, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        number = self._next()
        keys = [f"async_emb/said/{number}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps((what, value)))
        seconds = timeout_seconds()
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = ", ".join(f"rank {rank}" for rank, key in enumerate(keys) if not self._store.check([key]))
            raise FailedContextError(
                f"async_emb: rank {self.rank} waited for the others to {what}, but {missing or 'one of them'} did not "
                f"come within {seconds:g} s ({str(error).splitlines()[0]})"
            ) from None
        said = [pickle.loads(self._store.get(key)) for key in keys]
        if number > 1:  # which all have read, since they are here
            self._store.delete_key(f"async_emb/said/{number - 1}/{self.rank}")
        _require_same_call(self.rank, what, {rank: call for rank, (call, _) in enumerate(said)})
        return [theirs for _, theirs in said]

    def gather(self, what: str, tensor: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [tensor.clone()]
        self.exchange(what, None)
        mine = tensor.contiguous().reshape(-1).view(torch.uint8)  # Gloo does not know every dtype
        received = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(received, mine, group=self._process_group)
        return [bytes_.view(tensor.dtype).reshape(tensor.shape) for bytes_ in received]

    def connect(self) -> list[Any]:
        if self.size == 1:
            return []
        prefix = f"async_emb/connect/{self._next()}"
        try:
            transport = process_groups.connect_over(
                self._store, self.rank, self.size, prefix=prefix, timeout_seconds=timeout_seconds()
            )
        except process_groups.ProcessGroupError as error:
            raise ContextError(f"async_emb: the ranks cannot be connected: {error}") from None
        return [transport]

    def _next(self) -> int:
        """The number of this call: all ranks make the same ones."""
        return int(self._store.add(f"async_emb/calls/{self.rank}", 1))


def _require_same_call(rank: int, what: str, calls: dict[int, str]) -> None:
    for other, call in calls.items():
        if call != what:
            raise FailedContextError(
                f"async_emb: rank {rank} is to {what}, but rank {other} is to {call}: every rank must make the same "
                "calls in the same order"
            )
