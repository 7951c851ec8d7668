"""Whose work is under way in a context: contexts are found by name, and two steps may use the same tables in turns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import jax

from .. import runtime
from ..context import AsyncEmbContextHandle
from ..errors import PipelineError

# By context: the step whose work is under way there.
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def take(step: Any, handles: Iterable[AsyncEmbContextHandle], owned: set[int], *, under_way: bool) -> None:
    """Opens the contexts for ``step``; what another step has left there is dropped.

    Args:
        step: who takes them.
        handles: the contexts.
        owned: those that ``step`` has begun on before, by id; the others are added.
        under_way: whether ``step`` relies on what it has left in them.

    Raises:
        PipelineError: it does, and another step has begun on them since.
    """
    for handle in handles:
        begun = handle.context_id in owned
        if not begun or _owners.get(handle.context_id) is not step:
            if begun and under_way:
                raise PipelineError(
                    f"async_emb {handle.name!r}: another TrainStep has begun on a table of this name since, and "
                    "what was under way here (staged gradients, a lookup) is dropped. Restore a snapshot or begin "
                    "anew with init, and give tables that train side by side different names"
                )
            if runtime.is_open(handle):
                # Left by a step that was given up, or by another step at rest. Its programs may still run.
                with contextlib.suppress(Exception):
                    jax.effects_barrier()
                runtime.close_context(handle)
            owned.add(handle.context_id)
            _owners[handle.context_id] = step
        runtime.open_context(handle)
