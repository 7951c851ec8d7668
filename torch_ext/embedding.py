"""``AsyncEmbedding``: a sharded table as a module of torch, trained on the side of a loop.

The rows of a call are part of torch's graph; what ``backward`` brings goes to the table, not to a gradient tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ext import logical
from torch_ext.common.errors import AsyncEmbError, ContextError, ContextWarning, PipelineError
from torch_ext.common.row_optimizers import RowwiseAdagrad
from torch_ext.lookups import Lookup
from torch_ext.module_checks import TableArguments, check_module, require_cpu_module
from torch_ext.ranks import Ranks, default_ranks
from torch_ext.table import Initializer, Table, UpdateReport


class AsyncEmbedding(torch.nn.Module):
    """An embedding table that is looked up and trained on the side of a training step.

    Every rank holds some columns of all rows, has a part of each batch's ids, and makes the same calls in the same
    order on as many ids::

        rows = users(ids)          # [*ids.shape, width]
        loss = model(rows).mean()
        loss.backward()            # brings the gradient rows to the table
        users.step()               # applies them, on the side of what comes next

    Nothing here is a ``Parameter``: ``users.parameters()`` is empty, so optimizers and DistributedDataParallel leave
    the table alone. In ``eval()`` mode and under ``torch.no_grad()`` a call is ``lookup``.

    Args:
        rows: number of rows, at least 1.
        width: columns of a row. A width that the number of ranks does not divide is padded; the padding never shows.
        name: names the table in messages and contexts; two tables of one process need two names.
        optimizer: how gradients change the table.
        staleness: 0, or 1: an update runs beside the next batch's dense part, whose rows miss it.
        dtype: torch.float32, torch.bfloat16 or torch.float16, of weights, rows and gradient rows.
        init: function (generator, (rows, width)) -> tensor, the same on every rank; normal with standard deviation 0.05
            unless given.
        seed: of the generator: the same bits on any number of ranks.
        id_policy: what an id outside of [0, rows) does: "error" (reported by the next call when the step has finished;
            the step drops it), "drop" (reads zeros, trains nothing) or "clamp".
        padding_id: the id that reads zeros and is never trained, or None.
        num_unique: most distinct ids in a batch of all ranks; the number of tokens unless given.
        ranks: who holds the table: ``ProcessRanks``, or a rank of ``ThreadRanks``. Unless given, the processes of
            ``torch.distributed`` where it is initialised, else this thread alone.
        gradient_scale: gradient rows are multiplied by it. Gradients of all ranks are added, so ``1 / ranks.size``
            suits a loss that is a mean on each rank, whose dense gradients DistributedDataParallel averages.
        sync_errors: ``step`` waits for its update and raises what it has to say, instead of the next call.

    Attributes:
        table: the ``Table``, with the start and done calls that this module makes.

    Raises:
        ContextError: with every problem of the configuration, each saying what to change.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        name: str,
        optimizer: RowwiseAdagrad,
        staleness: int = 0,
        dtype: torch.dtype = torch.float32,
        init: Initializer | None = None,
        seed: int = 0,
        id_policy: str = "error",
        padding_id: int | None = None,
        num_unique: int | None = None,
        ranks: Ranks | None = None,
        gradient_scale: float = 1.0,
        sync_errors: bool = False,
    ) -> None:
        super().__init__()
        arguments = TableArguments(
            rows=rows,
            width=width,
            name=name,
            optimizer=optimizer,
            dtype=dtype,
            init=init,
            id_policy=id_policy,
            padding_id=padding_id,
            num_unique=num_unique,
            ranks=default_ranks() if ranks is None else ranks,
        )
        check_module(arguments, staleness, gradient_scale, sync_errors, seed)
        self.table = Table(arguments, seed=seed, schedule={"staleness": int(staleness)})
        self.staleness = int(staleness)
        self.gradient_scale, self.sync_errors = float(gradient_scale), sync_errors
        self._strict = False  # torch does not tell the parts of a module how they are loaded
        self._lookup: Lookup | None = None  # whose gradient the next step takes

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.name

    # ---- one training step ----

    @torch.compiler.disable  # it waits for other ranks, and keeps on the host what is under way
    def forward(self, token_ids: Any) -> Tensor:
        """The rows of ``token_ids``, integers of any shape: [*token_ids.shape, width], zeros for padding.

        With staleness 1 the update of the step before starts now, on the side.

        Raises:
            IdError, PipelineError: what an earlier step had to say; nothing of this call has run.
            FailedContextError: the table's context has failed, for example because a rank has ended.
        """
        if torch._C._current_graph_task_id() != -1:
            raise PipelineError(
                f"async_emb {self.name!r}: the module was called inside of backward, as activation checkpointing does: "
                "a lookup is a step's own and is not repeated. Call the module outside of torch.utils.checkpoint, and "
                "give its rows to the function that is checkpointed"
            )
        if not (self.training and torch.is_grad_enabled()):
            return self.lookup(token_ids)
        self.check()
        self._warn_of_forgotten_step()
        if not self.table.is_armed:
            self.table.finish()
            self.table.lookup_start(token_ids)
        padded = self.table.lookup_done(token_ids)
        if self.table.staged_step is not None:
            self.table.update_start()
        if self._lookup is not None:
            self._lookup.take_grads()
        self._lookup = Lookup(self.name, self.table.width, number=self.table.lookups)
        return self._lookup.rows(padded, torch.as_tensor(token_ids).shape)

    @torch.compiler.disable
    def prefetch(self, token_ids: Any) -> None:
        """Starts to look up the next call's ids, with staleness 1: best after the forward, beside the backward. Where
        the update still runs, the lookup begins when it has ended."""
        if self.staleness == 0:
            raise PipelineError(
                f"async_emb {self.name!r}: prefetch needs staleness=1: with staleness 0 the next batch is looked up in "
                "a table that this step's update has changed"
            )
        self.table.lookup_start(token_ids)

    @torch.compiler.disable
    def step(self, *, apply: bool = True) -> None:
        """Hands the gradient rows of the last forward to an update; with staleness 0 the update starts at once.

        Args:
            apply: False skips the update, on every rank: say whether all gradients of the step, dense ones too, were
                finite on this rank. An update whose norm is not finite is skipped anyway.
        """
        lookup = self._lookup
        if lookup is None or lookup.number != self.table.lookups or not lookup.has_grads:
            raise PipelineError(
                f"async_emb {self.name!r}: step() found no gradient rows: call the module, in train() mode, and "
                "backward first. On a rank whose loss does not need the rows, add 0 * rows.sum() to it"
            )
        self._lookup, grads = None, lookup.take_grads()
        assert grads is not None
        if self.gradient_scale != 1:
            grads.mul_(self.gradient_scale)
        self.table.finish()
        self.table.stage_update(grads, apply=apply)
        if self.staleness == 0:
            self.table.update_start()
        if self.sync_errors:
            self.finish()
            self.check()

    def finish(self) -> UpdateReport:
        """Waits for the update that was started last, if it has not been waited for. What became of the last one."""
        return self.table.finish()

    def flush(self) -> UpdateReport:
        """Applies the gradients that are staged, drops a lookup that is armed, waits, and raises what there is to say.

        Every rank calls it, at the end and wherever the table must be as after the last step.
        """
        self.table.finish()
        if self.table.is_armed:
            self.table.lookup_done()
        if self.table.staged_step is not None:
            self.table.update_start()
        report = self.table.finish()
        self.check()
        return report

    # ---- evaluation ----

    @torch.compiler.disable
    def lookup(self, token_ids: Any) -> Tensor:
        """The rows of ``token_ids`` for evaluation, also between the calls of a step: nothing is trained on them.

        Every rank calls it, on as many ids up to the next power of two. It sees every update that was started.

        Raises:
            IdError: an id outside of [0, rows), with the policy "error", on any rank.
        """
        return self.table.lookup(token_ids)

    # ---- the tensors ----

    @property
    def weight(self) -> Tensor:
        """This rank's columns [rows, padded width / ranks], the storage itself: waits for the update that runs. What
        reads it later than the next ``step`` reads while an update may write."""
        return self.table.shard

    @property
    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, [rows] each, the same on every rank; the storage itself, as ``weight`` is."""
        return self.table.state

    def to_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """``state_dict`` as NumPy arrays: what ``jax_bridge`` takes, see ``jax_bridge.handover``. Every rank
        calls it."""
        return logical.to_arrays(self.table)

    def load_arrays(self, arrays: Mapping[str, Any]) -> None:
        """The opposite of ``to_arrays``, on any number of ranks; all but "weight" may be missing. Drops what is under
        way.

        Raises:
            ContextError: an array does not fit; nothing has changed.
        """
        logical.load_arrays(self.table, arrays, may_stage=self.staleness == 1)
        self._drop_lookup()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for key, tensor in logical.gather(self.table).items():
            destination[prefix + key] = tensor

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As that of every module, but one that raises has changed nothing. (As a part of another module's it is as
        with torch's own: what fits is taken, and what is missing is told at the end.)"""
        self._strict = strict
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        finally:
            self._strict = False

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        missing, unexpected = logical.fits(self.table, found)
        missing_keys += [prefix + key for key in missing]
        unexpected_keys += [prefix + key for key in unexpected]
        wrong = [*(f"no {key}" for key in missing), *(f"{key}, which it does not know" for key in unexpected)]
        why_not = f"async_emb {self.name!r}: the table was given {', '.join(wrong)}" if self._strict and wrong else None
        known = {key: value for key, value in found.items() if key not in unexpected}
        try:
            logical.load(self.table, known, may_stage=self.staleness == 1, why_not=why_not)
            self._drop_lookup()
        except ContextError as error:
            error_msgs += [problem for problem in error.problems if problem != why_not]

    def _warn_of_forgotten_step(self) -> None:
        if self._lookup is None or not self._lookup.has_grads:
            return
        message = (
            f"async_emb {self.name!r}: backward has brought gradient rows of lookup {self._lookup.number}, but no "
            "step() took them; they are lost. Call step() after backward, step(apply=False) to train nothing"
        )
        warnings.warn(ContextWarning(message), stacklevel=3)

    def _drop_lookup(self) -> None:
        if self._lookup is not None:
            self._lookup.take_grads()
        self._lookup = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> AsyncEmbedding:
        require_cpu_module(self.name, self.table.dtype, fn)
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> Any:
        raise PipelineError(
            f"async_emb {self.name!r}: an AsyncEmbedding cannot be pickled or copied, because its context is this "
            "process's; save its state_dict() and make a new one"
        )

    def extra_repr(self) -> str:
        table = self.table
        return (
            f"{table.rows}, {table.width}, name={table.name!r}, dtype={table.dtype}, staleness={self.staleness}, rank "
            f"{table.ranks.rank} of {table.ranks.size}"
        )

    # ---- contexts ----

    def check(self) -> None:
        """Raises what the steps that have finished have left to say, and clears it (a failure stays).

        Raises:
            IdError: ids outside of the table, or too many distinct ones; they were dropped, and the steps are done.
            PipelineError: a call was refused. What was armed or staged is dropped; the table is as before that call.
            FailedContextError: a context has failed: ``close`` it on every rank, and load a state_dict.
        """
        self.table.check()

    def stats(self) -> dict[str, float]:
        """Counters of the contexts that train, summed, as ``jax_bridge.AsyncEmbedding.stats`` has them: over the ranks
        of this process; empty before the first step. Waits for the update that runs."""
        return self.table.stats()

    def abort(self, reason: str) -> None:
        """Ends every wait for this table, on every rank, with an error that says ``reason``."""
        self.table.abort(reason)

    def close(self) -> None:
        """Waits for the update that runs, closes the contexts, and raises what was still to be said, unless the caller
        knows. Every rank calls it.

        Drops gradients that are staged: ``flush`` first to keep them. The next call opens what it needs again.
        """
        self._drop_lookup()
        self.table.close()

    def __enter__(self) -> AsyncEmbedding:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            if self.table.ranks.size > 1:  # the others wait for this rank
                self.abort(f"rank {self.table.ranks.rank} left its block with {type(error).__name__}: {error}")
            try:
                self.close()
            except AsyncEmbError as another:
                error.add_note(f"And on closing: {another}")
            return
        self._warn_of_forgotten_step()
        lost = self.table.staged_step
        self.close()
        if lost is not None and lost != self.table.saved_step:
            message = (
                f"async_emb {self.name!r}: the block was left while gradients of step {lost} were staged: that update "
                "is lost. End the block with flush(), or take a state_dict, which keeps them"
            )
            warnings.warn(ContextWarning(message), stacklevel=2)
