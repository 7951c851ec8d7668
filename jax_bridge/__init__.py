"""Asynchronous sharded embedding tables for JAX.

Most programs need ``AsyncEmbedding``, ``RowwiseAdagrad``, ``train_step`` and ``with_next``. ``make_context_handle`` and
the per-shard operations are for those who write their own step inside ``jax.shard_map``.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports what is asked for, when it is: commands that need no JAX do not wait a second for it."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Modules first: those behind `public` ask for one another while it is being imported.
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    public = importlib.import_module(f"{__name__}.public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(public, name)  # the next time Python finds it by itself
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
