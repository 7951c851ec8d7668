"""The contexts of one table: a handle for each batch size and purpose, and what those that are open have to say."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import runtime
from .context import AsyncEmbContextHandle
from .errors import AsyncEmbError, FailedContextError, IdError

# In messages of a context, which knows nothing of the states that its calls belong to.
_SAYS_A_STEP = re.compile(r"\bstep \d")
_WHOSE_STEPS = (
    "Steps in this message are the context's own: it counts its lookups, and its updates, from 1 since it was opened. "
    "state.step counts calls from 0."
)


class TableContexts:
    """Args:
    make_handle: function (tokens per batch, purpose) -> handle.
    """

    def __init__(self, make_handle: Callable[[int, str], AsyncEmbContextHandle]) -> None:
        self._make_handle = make_handle
        self._handles: dict[tuple[int, str], AsyncEmbContextHandle] = {}
        self._told: dict[int, float] = {}  # by context: refused calls and bad ids when it was last checked
        self._early: dict[int, IdError] = {}  # by context: what has_news has taken from it

    def handle(self, tokens_per_batch: int, purpose: str) -> AsyncEmbContextHandle:
        key = (tokens_per_batch, purpose)
        if key not in self._handles:
            self._handles[key] = self._make_handle(tokens_per_batch, purpose)
        return self._handles[key]

    def open(self, purpose: str | None = None) -> list[AsyncEmbContextHandle]:
        """Of the contexts that are open, all or those of one purpose."""
        return [h for (_, p), h in self._handles.items() if purpose in (None, p) and runtime.is_open(h)]

    def stats(self) -> dict[str, float]:
        """Counters of those that train, summed; empty where there are none."""
        total: dict[str, float] = {}
        for handle in self.open("train"):
            for name, value in runtime.stats(handle).items():
                total[name] = total.get(name, 0) + value
        if total:
            total["unique_share"] = total["unique_tokens"] / max(total["trained_tokens"], 1)
        return total

    def check(self) -> None:
        """Raises what a context has to say. Every step must have finished."""
        for handle in self.open():
            self._told[handle.context_id] = _troubles(handle)
            early = self._early.pop(handle.context_id, None)
            try:
                runtime.check(handle)
                if early is not None:
                    raise early
            except AsyncEmbError as error:
                if _SAYS_A_STEP.search(str(error)):
                    error.add_note(_WHOSE_STEPS)
                raise

    def require_working(self) -> None:
        """Raises FailedContextError where a context has failed. Steps may run."""
        for handle in self.open():
            runtime.require_working(handle)

    def has_news(self) -> bool:
        """Whether ``check`` would raise, as far as one can tell while steps run. Never waits. Raises FailedContextError
        where a context has failed."""
        self.require_working()
        for handle in self.open("train"):
            if handle.num_unique < handle.tokens_per_batch and handle.context_id not in self._early:
                try:
                    runtime.check_ids(handle)
                except IdError as error:
                    self._early[handle.context_id] = error
        return bool(self._early) or any(_troubles(h) != self._told.get(h.context_id, 0) for h in self.open())

    def close(self) -> None:
        for handle in self.open():
            runtime.close_context(handle)
        self._told.clear()
        self._early.clear()

    def close_failed(self) -> None:
        """Closes the contexts that have failed."""
        for handle in self.open():
            try:
                runtime.require_working(handle)
            except FailedContextError:
                runtime.close_context(handle)


def _troubles(handle: AsyncEmbContextHandle) -> float:
    counts = runtime.stats(handle)
    return counts["refused_calls"] + (counts["bad_ids"] if handle.id_policy == "error" else 0)
