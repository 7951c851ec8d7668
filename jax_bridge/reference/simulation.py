"""The pipeline's schedule, run one operation after the other on a whole table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .adagrad import rowwise_adagrad_lazy_update, rowwise_adagrad_update
from .tokens import IdReport, clean_ids, lookup

# (rows [N, width], ids as given, step) -> (gradient rows [N, width], pending)
GradientFunction = Callable[[NDArray[Any], NDArray[Any], int], tuple[ArrayLike, bool | int]]
# The options of an update, or (step that staged the gradients, step that applies them) -> options.
Options = Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]]


class UpdateRecord(NamedTuple):
    """One update that was started.

    Attributes:
        gradient_step: the step that staged the gradients.
        applied_step: the step that started the update; for a flush, the number of the next step.
        norm: float32, the gradient norm.
        valid: whether it was applied.
        pending: what was staged with the gradients.
        saturated: stored values that float16 could not hold.
    """

    gradient_step: int
    applied_step: int
    norm: np.float32
    valid: bool
    pending: bool
    saturated: int


class StepResult(NamedTuple):
    """What one step saw: its rows `[N, width]`, its id report, and the update it applied, None if it had none."""

    rows: NDArray[Any]
    ids: IdReport
    update: UpdateRecord | None


class _Staged(NamedTuple):
    gradient_step: int
    ids: NDArray[np.int32]
    grads: NDArray[Any]
    pending: bool


class Simulation:
    """What the asynchronous pipeline must compute, without its overlap.

    With staleness 0, step k reads a table that holds the updates up to k-1. With staleness 1 it reads one that holds
    the updates up to k-2 (its lookup was started in step k-1, which applied the gradients of k-2), then the gradients
    of k-1 are applied, then its own are staged. `flush` applies what is staged; the step after a flush sees everything.

    Attributes:
        table: `[rows, width]`; row_state: float32 `[rows]`; last_step: int32 `[rows]`, or None for the eager form.
            Copies, replaced (not written) by every update.
        step_number: the number of the next step.
        updates: an UpdateRecord for each update started, in order.
    """

    def __init__(
        self,
        table: ArrayLike,
        row_state: ArrayLike,
        *,
        staleness: int,
        options: Options,
        last_step: ArrayLike | None = None,
        id_policy: str = "error",
        padding_id: int | None = None,
        num_unique: int | None = None,
        logical_width: int | None = None,
    ) -> None:
        """Starts from copies of a table and its state.

        Args:
            table, row_state, num_unique, logical_width: as in `rowwise_adagrad_update`.
            staleness: 0 or 1.
            options: keyword arguments of the update (learning_rate, eps, ...), or a function of (step that staged the
                gradients, step that applies them) that gives them. Where they lack `step` (lazy form) or
                `rounding_step` (with rounding="stochastic"), it is the step that staged the gradients.
            last_step: int32 `[rows]` for the lazy form, None for the other.
            id_policy, padding_id: as in `clean_ids`. Policy "error" goes on as "drop"; the report is in the step's
                result.

        Raises:
            ValueError: staleness is neither 0 nor 1.
        """
        if staleness not in (0, 1):
            raise ValueError(f"staleness={staleness} is neither 0 nor 1")
        self.table: NDArray[Any] = np.array(table, copy=True)
        self.row_state: NDArray[np.float32] = np.array(row_state, copy=True)
        self.last_step: NDArray[np.int32] | None = None if last_step is None else np.array(last_step, copy=True)
        self.step_number = 0
        self.updates: list[UpdateRecord] = []
        self._staleness = staleness
        self._options = options
        self._id_policy = id_policy
        self._padding_id = padding_id
        self._num_unique = num_unique
        self._logical_width = logical_width
        self._staged: _Staged | None = None

    @property
    def norms(self) -> list[np.float32]:
        """The gradient norm of each update, in order."""
        return [update.norm for update in self.updates]

    @property
    def valids(self) -> list[bool]:
        """Whether each update was applied, in order."""
        return [update.valid for update in self.updates]

    def step(self, ids: ArrayLike, grads_fn: GradientFunction) -> StepResult:
        """Runs one step on a batch of ids (any shape, not cleaned).

        `grads_fn(rows, ids, step number)` gives `[N, width]` gradient rows and whether they are pending.
        """
        ids = np.asarray(ids)
        cleaned, report = clean_ids(ids, self.table.shape[0], id_policy=self._id_policy, padding_id=self._padding_id)
        number = self.step_number
        rows = lookup(self.table, cleaned)
        update = self._apply_staged(number)
        grads, pending = grads_fn(rows, ids, number)
        self._staged = _Staged(number, cleaned, np.array(grads, copy=True), bool(pending))
        if self._staleness == 0:
            update = self._apply_staged(number)
        self.step_number = number + 1
        return StepResult(rows, report, update)

    def flush(self) -> UpdateRecord | None:
        """Applies the staged gradients, if there are any. Gives the record of that update, or None."""
        return self._apply_staged(self.step_number)

    def _apply_staged(self, applied_step: int) -> UpdateRecord | None:
        if self._staged is None:
            return None
        staged, self._staged = self._staged, None
        chosen = self._options(staged.gradient_step, applied_step) if callable(self._options) else self._options
        options = {
            "pending": staged.pending,
            "num_unique": self._num_unique,
            "logical_width": self._logical_width,
            **chosen,
        }
        if options.get("rounding") == "stochastic":
            options.setdefault("rounding_step", staged.gradient_step)
        if self.last_step is None:
            eager = rowwise_adagrad_update(self.table, self.row_state, staged.ids, staged.grads, **options)
            self.table, self.row_state, norm, valid, saturated = eager
        else:
            step = options.pop("step", staged.gradient_step)
            lazy = rowwise_adagrad_lazy_update(
                self.table, self.row_state, self.last_step, step, staged.ids, staged.grads, **options
            )
            self.table, self.row_state, self.last_step, norm, valid, saturated = lazy
        record = UpdateRecord(staged.gradient_step, applied_step, norm, valid, staged.pending, saturated)
        self.updates.append(record)
        return record
