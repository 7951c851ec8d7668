"""What `check` and `plan` say of a job file: as text, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from .output import PROBLEMS, console, fail, print_json, styled
from .streams import read_bytes

if TYPE_CHECKING:
    from ..jobs.checking import CheckedJob
    from ..jobs.corrections import Correction
    from ..jobs.document import Document, NotTomlError
    from ..jobs.job_file import Finding

JobFile = Annotated[str, typer.Argument(metavar="JOB.TOML", help="The job file; - reads the standard input.")]


def read_document(job: str, *, json: bool, stderr: bool = False) -> Document:
    """The file of that name. Ends the command where it cannot be read, or is not TOML, which is a finding."""
    from ..jobs.document import Document, NotTomlError

    name = "<stdin>" if job == "-" else job
    try:
        return Document.of_bytes(read_bytes() if job == "-" else Path(job).read_bytes(), name)
    except NotTomlError as error:
        if json:
            print_json(_not_toml_as_data(error))
        else:
            _show_not_toml(error, console(stderr=stderr))
        raise typer.Exit(PROBLEMS) from None
    except OSError as error:
        fail(f"{name} cannot be read: {error.strerror}")


def end_with_findings(checked: CheckedJob, *, json: bool) -> NoReturn:
    """Reports a job with problems for a command that needs one without, and ends it."""
    from ..jobs.corrections import correct

    correction = correct(checked)
    if json:
        print_json(as_data(checked, correction))
    else:
        show(checked, correction, console())
    raise typer.Exit(PROBLEMS)


# ---- as text


def show(checked: CheckedJob, correction: Correction | None, out: Console) -> None:
    """Prints everything that was found, and the changes that are known to help."""
    document = checked.document
    uncovered = correction.uncovered if correction else ()
    for finding in (*checked.findings, *uncovered):
        line, column = document.place(finding)
        there = document.line_of(finding)
        out.print(styled((f"{document.name}:{line}:{column}:", "bold"), f" {there}" if there else ""))
        once = "once the above is corrected: " if finding in uncovered else ""
        out.print(styled(f"    {once}", (finding.problem.message, "red")))
        for advice in finding.problem.advice:
            out.print(styled("    ", advice))
    for finding in checked.warnings:
        line, column = document.place(finding)
        warning = finding.problem.message
        out.print(styled((f"{document.name}:{line}:{column}: ", "bold"), ("warning: ", "yellow"), warning))
    if not checked.findings:
        out.print(styled((f"{document.name}: ok: ", "green"), _summary(checked)))
    else:
        _show_correction(checked, correction, out)


def _show_not_toml(error: NotTomlError, out: Console) -> None:
    place = f"{error.name}:{error.line}:{error.column}:"
    out.print(styled((place, "bold"), f" {error.there}" if error.there else ""))
    out.print(styled("    ", (error.message, "red")))


def _show_correction(checked: CheckedJob, correction: Correction | None, out: Console) -> None:
    count = len(checked.findings) + (len(correction.uncovered) if correction else 0)
    problems = "1 problem" if count == 1 else f"{count} problems"
    if correction is None:
        out.print(styled((f"{problems}; ", "bold"), "what to write instead cannot be guessed"))
        return
    if correction.passes:
        out.print(styled((f"{problems}; ", "bold"), "with these changes the job passes (checked):"))
    else:
        left = len(correction.checked.findings)
        out.print(styled((f"{problems}; ", "bold"), f"with these changes {left} would be left (checked):"))
    for key, old, new in correction.changes:
        if new is None:
            out.print(styled("    ", (f"remove {key}", "green"), f"  # {old}"))
        else:
            out.print(styled("    ", (f"{key} = {new}", "green"), f"  # {'new' if old is None else f'was {old}'}"))
    for note in correction.notes:
        out.print(f"    {note}")


def _summary(checked: CheckedJob) -> str:
    job = checked.job
    assert job.mesh is not None
    axes = ", ".join(f"{name}={size}" for name, size in job.mesh.shape.items())
    devices, tables = int(job.mesh.devices.size), len(job.tables)
    return (
        f"{tables} table{'s' * (tables != 1)} on mesh {axes} ({devices} device{'s' * (devices != 1)}, "
        f"{job.processes} process{'es' * (job.processes != 1)})"
    )


# ---- as JSON


def as_data(checked: CheckedJob, correction: Correction | None, written: Path | None = None) -> dict[str, Any]:
    """Everything that `show` says, and the name of the corrected file if one was written."""
    document = checked.document

    def described(finding: Finding) -> dict[str, Any]:
        line, column = document.place(finding)
        return _problem(line, column, ".".join(map(str, finding.path)), finding.problem.message, finding.problem.advice)

    problems = [*checked.findings, *(correction.uncovered if correction else ())]
    data: dict[str, Any] = {
        "file": document.name,
        "ok": not problems,
        "problems": list(map(described, problems)),
        "warnings": list(map(described, checked.warnings)),
    }
    if correction is not None:
        changes = [{"key": key, "old": old, "new": new} for key, old, new in correction.changes]
        data["correction"] = {"passes": correction.passes, "changes": changes, "costs": list(correction.notes)}
    if written is not None:
        data["written"] = str(written)
    return data


def _not_toml_as_data(error: NotTomlError) -> dict[str, Any]:
    problem = _problem(error.line, error.column, "", error.message)
    return {"file": error.name, "ok": False, "problems": [problem], "warnings": []}


def _problem(line: int, column: int, key: str, message: str, advice: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"line": line, "column": column, "key": key, "message": message, "advice": list(advice)}
