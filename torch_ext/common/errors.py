"""The exceptions of the package, and how a list of found problems becomes one of them.

Every exception is an `AsyncEmbError` and also the builtin that a caller would expect. `str(error)` is one line that
says what happened; what to do about it is in the exception's notes (PEP 678), which Python prints below that line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


class AsyncEmbError(Exception):
    """Base of everything that this package raises on purpose."""


class ContextError(AsyncEmbError, ValueError):
    """A context cannot be made from these arguments.

    Attributes:
        problems: the first line of every violation found, in the order of the checks; `problems[0] == str(error)`.
        corrections: keyword arguments to change. The call with any one of them merged in has been checked to pass.
            Empty when no value could be guessed (say, a mesh without devices).
    """

    problems: tuple[str, ...]
    corrections: tuple[dict[str, Any], ...]

    def __init__(
        self,
        message: str,
        *,
        problems: Sequence[str] = (),
        corrections: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)
        self.corrections = tuple(dict(correction) for correction in corrections)


class ContextTypeError(ContextError, TypeError):
    """As `ContextError`, where the first problem is an argument of a wrong type. It is a `TypeError` too."""


class PipelineError(AsyncEmbError, RuntimeError):
    """An operation was called in the wrong state. Nothing was applied from there on."""


class FailedContextError(PipelineError):
    """A context has failed, was aborted, or timed out: every call says so until it is closed and opened again."""


class IdError(AsyncEmbError, ValueError):
    """A batch had token ids outside the table, or more unique ids than `num_unique`."""


class CheckpointError(AsyncEmbError, OSError):
    """A checkpoint cannot be written or read: it is not there, damaged, or another process did not do its part."""


class ContextWarning(UserWarning):
    """The arguments of a context work, but probably not as meant."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One violation: the line that is raised or listed, what to do about it, and the arguments that it is about."""

    message: str
    advice: tuple[str, ...] = ()
    wrong_type: bool = False
    arguments: tuple[str, ...] = ()


def raise_problems(
    problems: Sequence[Problem], corrections: Sequence[Mapping[str, Any]] = (), *, call: str | None = None
) -> NoReturn:
    """Raises the first of `problems` (not empty), with the others and all advice as notes.

    Args:
        problems: in the order of the checks.
        corrections: see `ContextError.corrections`; each is printed as arguments of `call`.
        call: the name of the function whose arguments are wrong.
    """
    first = problems[0]
    error_type = ContextTypeError if first.wrong_type else ContextError
    error = error_type(first.message, problems=[problem.message for problem in problems], corrections=corrections)
    for line in first.advice:
        error.add_note(line)
    for number, problem in enumerate(problems[1:], start=2):
        error.add_note(f"Problem {number} of {len(problems)}: {problem.message}")
        for line in problem.advice:
            error.add_note(f"  {line}")
    for number, correction in enumerate(corrections):
        change = ", ".join(f"{argument}={value!r}" for argument, value in correction.items())
        error.add_note(f"{'Or' if number else 'Checked to pass'}: {call}(..., {change})")
    raise error


def show(value: object) -> str:
    """`repr(value)` for a message: one line, the same in every process, and never too long to print."""
    if isinstance(value, (set, frozenset)):
        # A set prints in the order of its hashes, which differ from process to process.
        inside = "{" + ", ".join(sorted(map(show, value))) + "}"
        return inside if isinstance(value, set) and value else f"{type(value).__name__}({inside if value else ''})"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{hex(value)[: 12 + (value < 0)]}... ({value.bit_length()} bits)"
    try:
        text = repr(value)
    except Exception as error:  # Not ours to fail on: an argument is being refused already.
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    if "\n" in text:
        text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."
