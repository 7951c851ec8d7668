"""``Table``: the tensors of one rank, and the starts and dones that look them up and update them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_ext.common.batches import pad_width
from torch_ext.common.errors import ContextError, FailedContextError, PipelineError
from torch_ext.common.row_optimizers import RowwiseAdagrad, described
from torch_ext.contexts import Context, Numbers
from torch_ext.module_checks import TableArguments, check_table, flat_ids

Initializer = Callable[[torch.Generator, tuple[int, int]], Tensor]

# The default initializer draws this many rows at once, so that a rank never holds columns that are not its own of more.
_ROWS_AT_ONCE = 4096


class UpdateReport(NamedTuple):
    """What became of an update.

    Attributes:
        norm: of the whole gradient, over all ranks, before clipping.
        valid: whether it was applied: the norm was finite, and every rank had ``apply`` true.
        pending: whether one had been staged.
    """

    norm: float
    valid: bool
    pending: bool


class Table:
    """One rank of a table. Each call is made by every rank, in the same order; ``AsyncEmbedding`` makes them for a
    module.

    The tensors are lent to the context from a start until its done: reading them through ``shard`` and ``state`` waits.

    Attributes:
        rows, width, name, optimizer, dtype, id_policy, padding_id, num_unique, ranks: as ``AsyncEmbedding`` has them.
        padded_width: columns over all ranks, padding included.
        steps: updates that were staged.
        lookups: lookups that were consumed.
        saved_step: the last step whose staged gradients were gathered, and so are not lost with the context; or None.
    """

    def __init__(self, arguments: TableArguments, *, seed: int, schedule: Mapping[str, Any] | None = None) -> None:
        """A table.

        Args:
            arguments: what ``AsyncEmbedding`` takes.
            seed: of the initial weights.
            schedule: what else all ranks must agree about, for the comparison when a context opens.
        """
        check_table(arguments)
        self._process = os.getpid()
        self._settings = {**described(arguments.optimizer), **(schedule or {})}
        self.saved_step: int | None = None
        self.rows, self.width, self.name = int(arguments.rows), int(arguments.width), str(arguments.name)
        self.optimizer: RowwiseAdagrad = arguments.optimizer
        self.dtype: torch.dtype = arguments.dtype
        self.id_policy, self.padding_id, self.num_unique = (
            arguments.id_policy,
            arguments.padding_id,
            arguments.num_unique,
        )
        self.ranks = arguments.ranks
        self.padded_width = pad_width(self.width, self.ranks.size)
        self.steps = self.lookups = 0
        self._shard = self._initial_shard(arguments.init, seed)
        self._state = {key: torch.tensor(array) for key, array in self.optimizer.init(self.rows).items()}
        self._contexts: dict[tuple[int, str], Context] = {}
        self._report = UpdateReport(0.0, False, False)
        self._forget()

    def _forget(self) -> None:
        """Nothing is under way."""
        self._armed: tuple[Context, float, int] | None = None  # its context, pin and number of ids
        self._reading: tuple[Context, Any] | None = None  # the last lookup, and its lease
        self._consumed: Context | None = None  # of the last consumed lookup, until its gradients are staged
        self._staged: tuple[Context, int] | None = None  # gradients that wait, and the step they are of
        self._updating: Context | None = None

    # ---- the calls of a step ----

    @property
    def is_armed(self) -> bool:
        """A lookup was started and not consumed."""
        return self._armed is not None

    @property
    def staged_step(self) -> int | None:
        """The step whose gradients wait for an update start, or None."""
        return None if self._staged is None else self._staged[1]

    def lookup_start(self, token_ids: Any) -> None:
        """Starts to look up ids, integers of any shape, as many on every rank, on the side: after the update that runs,
        if one does, so that the rows have it."""
        self._require_own_process()
        ids = flat_ids(self.name, token_ids)
        if ids.numel() == 0:
            raise ContextError(
                f"async_emb {self.name!r}: there are no token ids on rank {self.ranks.rank}: every rank looks up as "
                "many; fill up with padding_id"
            )
        context = self._context(ids.numel(), "train")
        if self._updating not in (None, context):  # only its own context's lookups wait for an update
            self.finish()
        pin, lease = context.lookup_start(ids, self._shard)
        self._armed, self._reading = (context, pin, ids.numel()), (context, lease)

    def lookup_done(self, token_ids: Any = None) -> Tensor:
        """Waits for the rows of the last start: [tokens, padded_width], outside of any graph.

        Args:
            token_ids: the ids that the rows are wanted for. If others were looked up, the call is refused.
        """
        self._require_own_process()
        context, pin, tokens = self._require("lookup_done", self._armed, "lookup_start")
        ids = None if token_ids is None else flat_ids(self.name, token_ids)
        if ids is not None and ids.numel() != tokens:
            raise PipelineError(
                f"async_emb {self.name!r}: {tokens} ids were looked up in advance, but rows of {ids.numel()} are "
                "wanted: pass the ids that the lookup was started with"
            )
        padded = torch.empty((tokens, self.padded_width), dtype=self.dtype)
        self._armed = None
        context.lookup_done(pin, ids, padded)
        self._consumed = context
        self.lookups += 1
        if ids is not None:
            self._closing_on_refusal(context.check_refusals)
        return padded

    def stage_update(self, grads: Tensor, *, apply: bool = True) -> None:
        """Hands over gradient rows [tokens, padded_width] of the last consumed lookup; they are copied.

        Args:
            apply: False on any rank skips the update.
        """
        self._require_own_process()
        context = self._require("stage_update", self._consumed, "lookup_done")
        context.stage_update(grads.detach().to(self.dtype).contiguous(), bool(apply))
        self._staged, self._consumed = (context, self.steps), None
        self.steps += 1

    def update_start(self) -> None:
        """Starts to apply what is staged, in place, on the side."""
        self._require_own_process()
        context, step = self._require("update_start", self._staged, "stage_update")
        if self._reading is not None and self._reading[0] is not context:  # a batch of another size
            self._reading[0].wait(self._reading[1])
        context.update_start(
            _operands(self.optimizer, step), self._shard, self._state["accumulator"], self._state.get("last_step")
        )
        self._staged, self._updating = None, context

    def update_done(self) -> UpdateReport:
        """Waits for the update that was started last."""
        context = self._require("update_done", self._updating, "update_start")
        self._updating = None
        self._report = UpdateReport(*context.update_done())
        return self._report

    def finish(self) -> UpdateReport:
        """Waits for the update that runs, if one does. What became of the last one."""
        self._require_own_process()
        return self._report if self._updating is None else self.update_done()

    def _require_own_process(self) -> None:
        """Raises PipelineError in a fork of the process that made the table: its threads stay there."""
        if os.getpid() == self._process:
            return
        error = PipelineError(
            f"async_emb {self.name!r}: the table was made in process {self._process}, and is used in process "
            f"{os.getpid()}, which was forked from it: the threads that look up and update are not there"
        )
        error.add_note(
            "Workers of a DataLoader should give ids; look their rows up where the table was made. A worker that needs "
            "rows itself takes them from an ordinary torch.nn.Embedding of a state_dict."
        )
        raise error

    def _require(self, call: str, what: Any, before: str) -> Any:
        if what is None:
            raise PipelineError(f"async_emb {self.name!r}: {call} has nothing to work on; call {before} first")
        return what

    # ---- evaluation ----

    def lookup(self, token_ids: Any) -> Tensor:
        """See ``AsyncEmbedding.lookup``."""
        self.finish()
        ids = flat_ids(self.name, token_ids)
        shape = torch.as_tensor(token_ids).shape
        # Powers of two, so that evaluation over many batch sizes opens a handful of contexts.
        tokens = max(8, 1 << max(ids.numel() - 1, 0).bit_length())
        # Any id reads the same whatever its neighbours are.
        filler = ids[-1:] if ids.numel() else torch.zeros(1, dtype=ids.dtype)
        context = self._context(tokens, "lookup")
        pin, lease = context.lookup_start(torch.cat([ids, filler.expand(tokens - ids.numel())]), self._shard)
        padded = torch.empty((tokens, self.padded_width), dtype=self.dtype)
        context.lookup_done(pin, None, padded)
        context.wait(lease)
        context.check()
        return padded[: ids.numel(), : self.width].reshape(*shape, self.width)

    # ---- the tensors ----

    @property
    def shard(self) -> Tensor:
        """This rank's columns [rows, padded_width / ranks]: the storage, once no update runs. What reads it later than
        the next update start reads while an update may write."""
        self.finish()
        return self._shard

    @property
    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, [rows] each, the same on every rank: the storage, as ``shard`` is."""
        self.finish()
        return dict(self._state)

    def columns(self) -> slice:
        """This rank's columns of the logical table, padding excluded."""
        held = self.padded_width // self.ranks.size
        first = min(self.ranks.rank * held, self.width)
        return slice(first, min(first + held, self.width))

    def staged(self) -> tuple[Tensor, Tensor, bool] | None:
        """Gradients that wait, of this rank: ids int32 [tokens], rows [tokens, padded_width], and whether to apply
        them. Every rank must be at rest."""
        return None if self._staged is None else self._staged[0].staged()

    def restore_staged(self, ids: Tensor, grads: Tensor, apply: bool) -> None:
        """Takes gradients of all ranks, in token order, of step ``steps - 1``. Every rank does so, with nothing under
        way."""
        context = self._context(ids.numel() // self.ranks.size, "train")
        context.restore_staged(ids, grads, apply)
        self._staged = (context, self.steps - 1)

    def _initial_shard(self, init: Initializer | None, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shard = torch.zeros((self.rows, self.padded_width // self.ranks.size), dtype=self.dtype)
        columns = self.columns()
        mine = shard[:, : columns.stop - columns.start]
        if init is not None:
            weights = torch.as_tensor(init(generator, (self.rows, self.width)))
            if tuple(weights.shape) != (self.rows, self.width):
                raise ContextError(
                    f"async_emb {self.name!r}: init returned a tensor of shape {list(weights.shape)}, but the table is "
                    f"[{self.rows}, {self.width}]"
                )
            mine.copy_(weights[:, columns])
            return shard
        for first in range(0, self.rows, _ROWS_AT_ONCE):
            some = mine[first : first + _ROWS_AT_ONCE]
            drawn = torch.randn((len(some), self.width), generator=generator)
            some.copy_(drawn[:, columns].mul_(0.05))
        return shard

    # ---- contexts ----

    def check(self) -> None:
        """See ``AsyncEmbedding.check``."""
        self._require_own_process()
        for context in list(self._contexts.values()):
            self._closing_on_refusal(context.check)

    def _closing_on_refusal(self, check: Callable[[], None]) -> None:
        try:
            check()
        except FailedContextError:
            raise
        except PipelineError:
            self.drop()  # the ranks may stand at different calls
            raise

    def stats(self) -> dict[str, float]:
        """See ``AsyncEmbedding.stats``."""
        self.finish()
        total: dict[str, float] = {}
        for (_, purpose), context in self._contexts.items():
            for key, value in context.stats().items() if purpose == "train" else ():
                total[key] = total.get(key, 0) + value
        if total:
            total["unique_share"] = total["unique_tokens"] / max(total["trained_tokens"], 1)
        return total

    def abort(self, reason: str) -> None:
        """Ends every wait for this table, on every rank, with an error that says ``reason``."""
        self._require_own_process()
        for context in self._contexts.values():
            context.abort(reason)

    def close(self) -> None:
        """See ``AsyncEmbedding.close``."""
        self._require_own_process()
        told = any(context.told_failure for context in self._contexts.values())
        try:
            self.finish()
            self.check()
        except FailedContextError:
            if not told:
                raise
        finally:
            self.drop()

    def drop(self) -> None:
        """Closes the contexts, with what is armed and staged. Every rank does so."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        self._forget()

    def _context(self, tokens: int, purpose: str) -> Context:
        if (tokens, purpose) not in self._contexts:
            numbers = Numbers(
                name=self.name,
                purpose=purpose,
                tokens_per_rank=tokens,
                emb_width=self.padded_width,
                logical_width=self.width,
                num_unique=self.num_unique or tokens * self.ranks.size,
                dtype=str(self.dtype).removeprefix("torch."),
                id_policy=self.id_policy,
                padding_id=self.padding_id,
            )
            self._contexts[tokens, purpose] = Context(self, self.ranks, numbers, self._settings)
        return self._contexts[tokens, purpose]


def _operands(optimizer: RowwiseAdagrad, step: int) -> dict[str, Any]:
    """The numbers of one update, as the native call takes them; ``step`` is the one whose gradients are applied."""
    rate = np.float32(optimizer.learning_rate(step) if callable(optimizer.learning_rate) else optimizer.learning_rate)
    decay, weight_decay = optimizer.decays(rate).values()
    stochastic = optimizer.rounding == "stochastic"
    return {
        "lazy": optimizer.lazy,
        "learning_rate": float(rate),
        "eps": float(optimizer.eps),
        "decay": float(decay),
        "weight_decay": float(weight_decay),
        "step": step + 1 if optimizer.lazy else 0,  # an untouched row was last touched at 0
        "max_grad_norm": optimizer.max_grad_norm,
        "stochastic_rounding": stochastic,
        "seed": int(optimizer.seed) if stochastic else 0,
        "rounding_step": step % 2**32 if stochastic else 0,
    }
