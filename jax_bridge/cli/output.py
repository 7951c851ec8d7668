"""How commands write: colours on a terminal alone, lines that are never wrapped off one."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from .streams import USAGE

PROBLEMS = 1


def console(*, stderr: bool = False) -> Console:
    """For the standard output, or the error output, as it is now."""
    return Console(
        stderr=stderr, highlight=False, markup=False, soft_wrap=True, file=sys.stderr if stderr else sys.stdout
    )


def styled(*parts: str | tuple[str, str]) -> Text:
    """One line of plain and styled pieces."""
    return Text.assemble(*parts)


def fail(message: str) -> NoReturn:
    """Ends the command: it was called wrongly."""
    with contextlib.suppress(OSError):  # the status says it, too
        console(stderr=True).print(styled(("error: ", "bold red"), message))
    raise typer.Exit(USAGE)


def print_json(value: Any) -> None:
    """One value as JSON (RFC 8259), in ASCII: it is read alike whatever the encoding of the terminal."""
    import json

    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
