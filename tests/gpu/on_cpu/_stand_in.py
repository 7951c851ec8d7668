"""A stand-in for the native module's calls on a GPU: the same calls, worked out by the oracle on CPU tensors.

It is there to try the driver of the GPU suite (`_native_ranks.py`) where no GPU is, not to test a pipeline.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
from torch.utils.dlpack import from_dlpack

from jax_bridge import reference

from .._native_ranks import to_numpy, to_torch


class _Group:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.meet = threading.Barrier(fields["group_size"], timeout=30)
        self.members: dict[int, DeviceRank] = {}
        self.counts: Counter[str] = Counter()
        self.problem: dict[str, Any] | None = None

    def in_token_order(self, name: str) -> Any:
        return np.concatenate([getattr(self.members[r], name) for r in np.argsort(self.fields["token_blocks"])])


class DeviceRank:
    """Tensors come as capsules and are written through them."""

    def __init__(self, group: _Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.staged = False
        group.members[rank] = self

    def lookup_begin(self, ids: Any, table: Any, pin: Any) -> None:
        fields = self.group.fields
        self.table = from_dlpack(table)
        given = to_numpy(from_dlpack(ids)).copy()
        assert given.shape == (fields["tokens_per_rank"],)
        assert self.table.shape[1] == fields["emb_width"] // fields["group_size"]
        self.given = given
        self.armed, report = reference.clean_ids(
            given, len(self.table), id_policy=fields["id_policy"], padding_id=fields["padding_id"]
        )
        self.group.counts["bad_ids"] += report.bad
        self.group.counts["padding_ids"] += int(np.count_nonzero(given == fields["padding_id"]))
        if report.bad and fields["id_policy"] == "error":
            self.group.problem = {"too_many_unique": False}
        from_dlpack(pin).fill_(1.0)

    def lookup_done(self, pin: Any, rows: Any, ids: Any = None) -> None:
        assert from_dlpack(pin).shape == (1,)
        assert ids is None or np.array_equal(to_numpy(from_dlpack(ids)), self.given)
        self.group.meet.wait()
        shards = [to_numpy(self.group.members[r].table) for r in sorted(self.group.members)]
        from_dlpack(rows).copy_(to_torch(reference.lookup(np.concatenate(shards, axis=1), self.armed), "cpu"))
        self.group.counts["lookups"] += self.rank == 0
        self.consumed = self.armed
        self.group.meet.wait()

    def stage_update(self, grads: Any, pending: Any, pin: Any, segment_ids: Any, unique_tokens: Any) -> None:
        self.staged, self.grads, self.ids = True, to_numpy(from_dlpack(grads)).copy(), self.consumed
        self.pending = bool(from_dlpack(pending))
        if segment_ids is not None:
            segments, unique = to_numpy(from_dlpack(segment_ids)), to_numpy(from_dlpack(unique_tokens))
            self.ids = np.where(segments < 0, -1, unique[segments]).astype(np.int32)

    def update_begin(
        self,
        table: Any,
        row_state: Any,
        last_step: Any,
        floats: Any,
        integers: Any,
        pin: Any,
        clips: bool,
        rand: bool,
    ) -> None:
        self.buffers = [from_dlpack(x) for x in (table, row_state, last_step) if x is not None]
        self.floats, words = to_numpy(from_dlpack(floats)).copy(), to_numpy(from_dlpack(integers)).copy()
        assert self.floats.shape == (5,)
        self.step, (self.seed, self.rounding_step) = int(words[0]), words[1:].view(np.uint32)
        self.clips, self.random = clips, rand

    def update_done(self, norm: Any, valid: Any, pending: Any, pin: Any) -> None:
        group, fields = self.group, self.group.fields
        outputs = [from_dlpack(x) for x in (norm, valid, pending)]
        self.group.meet.wait()
        result = self._rule() if self.staged else None
        self.group.meet.wait()
        if result is None:
            for output in outputs:
                output.zero_()
            return
        self.staged = False
        shard = fields["emb_width"] // fields["group_size"]
        for buffer, name in zip(self.buffers, ("table", "row_state", "last_step"), strict=False):
            new = getattr(result, name)
            buffer.copy_(to_torch(new[:, self.rank * shard :][:, :shard] if name == "table" else new, "cpu"))
        for output, value in zip(outputs, (float(result.norm), int(result.valid), 1), strict=True):
            output.fill_(value)
        group.counts["updates" if result.valid else "skipped_updates"] += self.rank == 0

    def settle(self) -> None:
        pass

    def _rule(self) -> Any:
        group = self.group
        shards = [to_numpy(group.members[r].buffers[0]) for r in sorted(group.members)]
        ids = group.in_token_order("ids")
        limit = group.fields["num_unique"]
        if len(np.unique(ids[ids >= 0])) > limit:
            group.problem = {"too_many_unique": True}
        learning_rate, eps, decay, weight_decay, norm = self.floats
        options: dict[str, Any] = {
            "learning_rate": learning_rate,
            "eps": eps,
            "max_grad_norm": norm if self.clips else None,
            "rounding": "stochastic" if self.random else "nearest",
            "seed": int(self.seed),
            "rounding_step": int(self.rounding_step),
            "pending": all(member.pending for member in group.members.values()),
            "num_unique": limit,
            "logical_width": group.fields["logical_width"],
        }
        arrays = [np.concatenate(shards, axis=1), *(to_numpy(b) for b in self.buffers[1:])]
        grads = group.in_token_order("grads")
        if len(arrays) == 2:
            names = {"decay_factor": decay, "weight_decay_factor": weight_decay}
            return reference.rowwise_adagrad_update(*arrays, ids, grads, **names, **options)
        names = {"accum_decay_rate": decay, "weight_decay_rate": weight_decay}
        return reference.rowwise_adagrad_lazy_update(*arrays, self.step, ids, grads, **names, **options)


class StandIn:
    """As much of the native module as the driver calls."""

    def __init__(self) -> None:
        self.groups: dict[int, _Group] = {}

    def open_context(self, fields: dict[str, Any]) -> None:
        assert fields["context_id"] not in self.groups
        self.groups[fields["context_id"]] = _Group(fields)

    def close_context(self, context_id: int) -> None:
        self.groups.pop(context_id, None)

    def abort_context(self, context_id: int, reason: str) -> None:
        self.groups[context_id].meet.abort()

    def DeviceRank(self, context_id: int, group: int, rank: int, stream: int) -> DeviceRank:
        assert (group, stream) == (0, 0)
        return DeviceRank(self.groups[context_id], rank)

    def stats(self, context_id: int) -> dict[str, int]:
        names = ("lookups", "updates", "skipped_updates", "bad_ids", "padding_ids", "refused_calls")
        return {name: self.groups[context_id].counts[name] for name in names}

    def take_refusal(self, context_id: int) -> None:
        return None

    def take_id_problem(self, context_id: int) -> dict[str, Any] | None:
        group = self.groups[context_id]
        problem, group.problem = group.problem, None
        return problem
