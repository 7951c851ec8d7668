"""What a table is made with, whichever framework it is for."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonTableArguments:
    """Arguments of ``AsyncEmbedding``, unchecked: as a user gave them, so each may be anything."""

    rows: Any
    width: Any
    name: Any
    optimizer: Any
    dtype: Any
    init: Any
    id_policy: Any
    padding_id: Any
    num_unique: Any
