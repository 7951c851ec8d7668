"""An ordinary ``torch.nn.Embedding`` around a weight that is there already."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Embedding

__all__ = ["Embedding", "plain_embedding"]


def plain_embedding(weight: Tensor, padding_id: int | None = None) -> Embedding:
    """``torch.nn.Embedding`` whose parameter shares the memory of ``weight`` [rows, width], and may be trained.

    ``padding_id`` becomes its ``padding_idx`` where it is one of its rows. Ids that no row has are an IndexError there.
    """
    rows = weight.shape[0]
    padding_idx = padding_id if padding_id is not None and 0 <= padding_id < rows else None
    return Embedding.from_pretrained(weight, freeze=False, padding_idx=padding_idx)
