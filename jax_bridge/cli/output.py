"""How commands write: colours on a terminal alone, lines that are never wrapped off one."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

PROBLEMS, USAGE = 1, 2


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
    console(stderr=True).print(styled(("error: ", "bold red"), message))
    raise typer.Exit(USAGE)


def as_json(value: Any) -> str:
    import json

    return json.dumps(value, indent=2, ensure_ascii=False)
