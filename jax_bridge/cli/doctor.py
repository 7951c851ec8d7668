"""`async-emb doctor`: one screen of what is installed here and whether it fits together."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import PROBLEMS, console, print_json, styled

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False) -> None:
    """Look at torch, JAX, the native module, compilers, CUDA, devices and environment; say what to mend."""
    from ..doctor.report import Line, examine

    out = console()
    lines: list[Line] = []
    for line in examine():
        lines.append(line)
        if not json:
            name = line.name if len(lines) == 1 or lines[-2].name != line.name else ""
            out.print(styled((f"{line.status:8}", _STYLES[line.status]), (f"{name:14}", "bold"), line.text))
            if line.advice:
                out.print(styled(" " * 22, ("→ ", "bold"), line.advice))
    counts = {status: sum(line.status == status for line in lines) for status in _STYLES}
    if json:
        data = {"ok": not counts["problem"], "lines": [line._asdict() for line in lines]}
        print_json(data)
    else:
        out.print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['problem']} problems")
    if counts["problem"]:
        raise typer.Exit(PROBLEMS)
