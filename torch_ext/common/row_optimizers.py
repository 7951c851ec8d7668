"""Row optimizers as data: how the gradient rows of a step change a table, in numbers.

The rule itself runs in the native kernels; what is here turns settings into the operands of one step, for either
framework. A learning rate may be a schedule: a function of the step, as in optax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .errors import Problem, raise_problems, show
from .table_rules import is_integer

Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad:
    """Row-wise Adagrad: one fp32 accumulator for each row (``docs/numerics.md`` has the rule).

    Attributes:
        learning_rate: a number, or a schedule: a function from the step (int32, from 0) to a number.
        eps: added to the root of the accumulator.
        half_life: steps after which an accumulator has decayed to a half; None for no decay.
        lazy: decay an accumulator (and weights) by the steps since the row was last touched, when it is touched again.
            Without it, rows decay once for each step that touches them.
        weight_decay: decoupled: each step multiplies a touched row by ``1 - learning_rate * weight_decay``; in the lazy
            form by ``exp(-learning_rate * weight_decay * delta)``.
        max_grad_norm: scales a step's gradient rows so that their global norm is at most this; None for no limit.
        rounding: of stored weights, "nearest" or "stochastic" (for bfloat16 and float16 tables).
        seed: keys the generator of stochastic rounding, together with step, row and column.
        initial_accumulator: of every row.
    """

    learning_rate: float | Schedule
    eps: float = 1e-8
    half_life: float | None = None
    lazy: bool = False
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    rounding: str = "nearest"
    seed: int = 0
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise_problems(problems)

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the settings, each problem with the setting's name."""
        if not callable(self.learning_rate):
            yield from _wrong_number("learning_rate", self.learning_rate, least=0.0)
        yield from _wrong_number("eps", self.eps, least=0.0)
        yield from _wrong_number("weight_decay", self.weight_decay, least=0.0)
        yield from _wrong_number("initial_accumulator", self.initial_accumulator, least=0.0)
        if self.half_life is not None:
            yield from _wrong_number("half_life", self.half_life, above=0.0)
        if self.max_grad_norm is not None:
            yield from _wrong_number("max_grad_norm", self.max_grad_norm, above=0.0)
        lazy: Any = self.lazy
        if not isinstance(lazy, bool):
            yield _problem("lazy", lazy, "True or False", wrong_type=True)
        if not isinstance(self.rounding, str) or self.rounding not in ("nearest", "stochastic"):
            wrong_type = not isinstance(self.rounding, str)
            yield _problem("rounding", self.rounding, "'nearest' or 'stochastic'", wrong_type=wrong_type)
        if not is_integer(self.seed) or not 0 <= self.seed < 2**32:
            yield _problem("seed", self.seed, "an integer in [0, 2^32)", wrong_type=not is_integer(self.seed))

    def init(self, rows: int) -> dict[str, Any]:
        state: dict[str, Any] = {"accumulator": np.full(rows, self.initial_accumulator, np.float32)}
        if self.lazy:
            state["last_step"] = np.zeros(rows, np.int32)
        return state

    def decays(self, rate: Any) -> dict[str, Any]:
        """How a step of this learning rate decays what it touches, by the names that the update starts use.

        Args:
            rate: float32 scalar, of NumPy, jax or torch.
        """
        if self.lazy:
            return {
                "accum_decay_rate": 0.0 if self.half_life is None else math.log(2) / self.half_life,
                "weight_decay_rate": rate * np.float32(self.weight_decay),
            }
        return {
            "decay_factor": 1.0 if self.half_life is None else 0.5 ** (1 / self.half_life),
            "weight_decay_factor": np.float32(1) - rate * np.float32(self.weight_decay),
        }


def described(optimizer: RowwiseAdagrad) -> dict[str, Any]:
    """The settings as text, by name, for processes or ranks to compare. Two schedules are compared where they are
    read, by what they give."""
    values = ((field.name, getattr(optimizer, field.name)) for field in dataclasses.fields(optimizer))
    return {f"optimizer.{name}": "a schedule" if callable(value) else repr(value) for name, value in values}


_ADVICE = {
    "learning_rate": "A number, or a schedule: a function from the step to a number, such as those of optax.",
    "eps": "It is added to the root of the accumulator; 1e-8 is usual.",
    "half_life": "Steps after which an accumulator has decayed to a half; None for no decay.",
    "lazy": "True decays a row by the steps since it was last touched, False once for each step that touches it.",
    "weight_decay": "0 for none.",
    "max_grad_norm": "The largest global norm of a step's gradient rows; None for no limit.",
    "rounding": "'stochastic' is for bfloat16 and float16 tables, which lose small updates to 'nearest'.",
    "seed": "It keys the generator of stochastic rounding.",
    "initial_accumulator": "0 is usual; a larger one makes the first steps smaller.",
}


def _wrong_number(
    name: str, value: Any, *, least: float | None = None, above: float | None = None
) -> Iterator[Problem]:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    fits = is_number and math.isfinite(value)
    fits = fits and (least is None or value >= least) and (above is None or value > above)
    if not fits:
        bound = f"at least {least:g}" if least is not None else f"above {above:g}"
        yield _problem(name, value, f"a finite number {bound}", wrong_type=not is_number)


def _problem(name: str, value: Any, wanted: str, *, wrong_type: bool) -> Problem:
    message = f"async_emb RowwiseAdagrad {name}={show(value)} must be {wanted}"
    return Problem(message, (_ADVICE[name],), wrong_type=wrong_type, arguments=(name,))
