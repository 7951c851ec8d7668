"""What a table may be: dtypes, sizes, id policies, padding, and what to say where something is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

import ml_dtypes
import numpy as np

from .errors import Problem, show

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
ID_POLICIES = ("error", "drop", "clamp")
# Token positions and slots of unique ids are int32 in the kernels.
MAX_TOKENS = 2**31 - 1
# The dyadic sums of the kernels are built for at most 2^20 columns.
MAX_WIDTH = 2**20
MAX_ROWS = 2**31 - 1
_INT32 = np.iinfo(np.int32)
_SIZES = {
    "rows": (MAX_ROWS, "2^31)", "how many rows the table has"),
    "width": (MAX_WIDTH, "2^20]", "how many columns a row has, over all ranks"),
}


class Options(Protocol):
    """The arguments that ``option_problems`` looks at, unchecked."""

    @property
    def name(self) -> Any: ...
    @property
    def purpose(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def id_policy(self) -> Any: ...
    @property
    def padding_id(self) -> Any: ...


def option_problems(arguments: Options, dtype: np.dtype[Any] | None) -> Iterator[Problem]:
    if dtype is None:
        advice = "The kernels keep tables as one of these."
        message = f"async_emb dtype={_dtype_name(arguments.dtype)} is not supported; use one of {', '.join(DTYPES)}"
        yield Problem(message, (advice,), arguments=("dtype",))
    if not isinstance(arguments.id_policy, str) or arguments.id_policy not in ID_POLICIES:
        policies = ", ".join(map(repr, ID_POLICIES))
        message = f"async_emb id_policy={show(arguments.id_policy)} is not one of {policies}"
        advice = "It says what an id outside the table does: raise after the step, read zeros, or use the nearest row."
        wrong_type = not isinstance(arguments.id_policy, str)
        yield Problem(message, (advice,), wrong_type=wrong_type, arguments=("id_policy",))
    padding_id = arguments.padding_id
    if padding_id is not None and not is_integer(padding_id):
        message = f"async_emb padding_id={show(padding_id)} must be an integer or None, not {type(padding_id).__name__}"
        meaning = "padding_id is the token id that reads zeros and is never trained."
        yield Problem(message, (meaning,), wrong_type=True, arguments=("padding_id",))
    elif padding_id is not None and not -(2**63) <= padding_id < 2**63:
        message = f"async_emb padding_id={show(int(padding_id))} is not a 64-bit integer"
        advice = "Token ids are int32 or int64, so no token could ever be padding."
        yield Problem(message, (advice,), arguments=("padding_id",))
    for argument in ("name", "purpose"):
        text = getattr(arguments, argument)
        if not isinstance(text, str):
            message = f"async_emb {argument}={show(text)} must be a string, not {type(text).__name__}"
            yield Problem(
                message, (f"{argument} appears in messages and logs.",), wrong_type=True, arguments=(argument,)
            )
        elif not text or not text.isprintable():
            message = f"async_emb {argument}={show(text)} must be one line of printable characters, and not empty"
            yield Problem(message, (f"{argument} appears in messages and logs.",), arguments=(argument,))


def size_problem(where: str, argument: str, value: object) -> Problem | None:
    """What is wrong with ``rows`` or ``width``; ``where`` begins the message."""
    limit, shown_limit, meaning = _SIZES[argument]
    if is_integer(value) and 1 <= value <= limit:
        return None
    message = f"{where}: {argument}={show(value)} must be an integer in [1, {shown_limit}"
    return Problem(message, (f"{argument} is {meaning}.",), wrong_type=not is_integer(value), arguments=(argument,))


def largest(argument: str) -> int:
    """The limit of ``rows`` or ``width``."""
    return _SIZES[argument][0]


def narrow_padding_problem(where: str, padding_id: object) -> Problem | None:
    """What is wrong with an integer ``padding_id`` that no token could have."""
    if not is_integer(padding_id) or _INT32.min <= padding_id <= _INT32.max:
        return None
    advice = "A padding_id outside of the table, such as -1, needs no row of its own."
    return Problem(
        f"{where}: padding_id={show(int(padding_id))} does not fit int32, as token ids must",
        (advice,),
        arguments=("padding_id",),
    )


def is_integer(value: object) -> TypeGuard[int]:
    """Python's and NumPy's integers, but not bools."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_number(value: object) -> int | float | None:
    """A finite number that was given, be it an integer or not; None for anything else, bools included."""
    if is_integer(value):
        return int(value)
    if not isinstance(value, (float, np.floating)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def read_dtype(value: object) -> np.dtype[Any] | None:
    if value is None:  # NumPy would read it as float64.
        return None
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    return next((supported for supported in DTYPES.values() if supported == dtype), None)


def _dtype_name(value: object) -> str:
    if isinstance(value, str) or value is None:
        return show(value)
    try:
        return str(np.dtype(value).name)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return show(value)
