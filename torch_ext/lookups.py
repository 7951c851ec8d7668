"""Rows of a table in a graph of torch's: what ``backward`` hands to the table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.common.errors import PipelineError


class Lookup:
    """What ``backward`` brings of one batch.

    Args:
        table: its name, for messages.
        width: columns that are not padding.
        number: of the lookup, among those of its table.
    """

    def __init__(self, table: str, width: int, *, number: int) -> None:
        self.number = number
        self._table, self._width = table, width
        self._grads: Tensor | None = None
        self._over = False

    def rows(self, padded: Tensor, shape: torch.Size) -> Tensor:
        """[*shape, width], in the graph, of the rows [tokens, width of all ranks]."""
        anchor = torch.zeros((), requires_grad=True)  # a leaf, so that there is a graph; it gets no gradient
        return _Rows.apply(anchor, _Fresh(padded), self, self._width).reshape(*shape, self._width)

    @property
    def has_grads(self) -> bool:
        """``backward`` has come."""
        return self._grads is not None

    def take_grads(self) -> Tensor | None:
        """The gradient rows so far, [tokens, width of all ranks], or None. The lookup is over: no more may come."""
        grads, self._grads, self._over = self._grads, None, True
        return grads

    def add(self, grads: Tensor, padded_width: int) -> None:
        if self._over:
            raise PipelineError(
                f"async_emb {self._table!r}: backward has reached rows of a lookup that is over: step() has taken its "
                "gradient rows, or another lookup came since, and a step trains one. Look up all ids of a step in one "
                "call (torch.cat them), and call backward before step()"
            )
        if self._grads is None:
            self._grads = grads.new_zeros((len(grads), padded_width))
            self._grads[:, : self._width] = grads
        else:
            self._grads[:, : self._width] += grads


class _Fresh(NamedTuple):
    """Rows that nobody else has. Not an input of the graph, of which the output would be a view that refuses writes."""

    rows: Tensor


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, fresh: _Fresh, lookup: Lookup, width: int) -> Tensor:
        padded = fresh.rows
        ctx.lookup, ctx.padded_width = lookup, padded.shape[1]
        return padded if width == padded.shape[1] else padded[:, :width].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, None, None, None]:
        ctx.lookup.add(grads, ctx.padded_width)
        return None, None, None, None
