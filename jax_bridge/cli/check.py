"""`async-emb check`: what is wrong with a job file, and a file that is not."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import PROBLEMS, as_json, console, fail, styled

if TYPE_CHECKING:
    from ..jobs.checking import CheckedJob
    from ..jobs.corrections import Correction
    from ..jobs.job_file import Document, Finding

JobFile = Annotated[str, typer.Argument(metavar="JOB.TOML", help="The job file; - reads the standard input.")]


def check(
    job: JobFile,
    fix: Annotated[
        Path | None,
        typer.Option("--fix", metavar="OUT", help="Write a corrected file here; the job file stays as it is."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Let --fix replace a file that exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check a job file without devices: everything that is wrong with it, where, and what to write instead."""
    from ..jobs.checking import check_job
    from ..jobs.corrections import correct

    if fix is not None and fix.exists() and not overwrite:
        fail(f"{fix} exists already; choose another name, or add --overwrite")
    checked = check_job(read_document(job))
    correction = correct(checked) if checked.findings else None
    written = None
    if fix is not None and (not checked.findings or (correction is not None and correction.passes)):
        document = correction.checked.document if correction else checked.document
        try:
            with fix.open("w", encoding="utf-8", newline="") as file:
                file.write(document.text)
        except OSError as error:
            fail(f"{fix} cannot be written: {error.strerror}")
        written = fix
    if json:
        sys.stdout.write(as_json(_as_data(checked, correction, written)) + "\n")
    else:
        show(checked, correction)
        if written is not None:
            console().print(f"written: {written}")
        elif fix is not None:
            console().print(f"{fix} was not written: no file that passes is known")
    if checked.findings:
        raise typer.Exit(PROBLEMS)


def read_document(job: str) -> Document:
    """The file of that name. Ends the command where it cannot be read, or is not TOML."""
    from ..jobs.job_file import Document

    name = "<stdin>" if job == "-" else job
    try:
        content = sys.stdin.buffer.read() if job == "-" else Path(job).read_bytes()
        return Document(content.decode("utf-8-sig"), name)
    except OSError as error:
        fail(f"{name} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        console().print(styled((f"{name}:{line}: ", "bold"), f"byte {error.start} is not UTF-8, as TOML must be"))
    except tomllib.TOMLDecodeError as error:
        console().print(styled((f"{name}: ", "bold"), f"this is not TOML: {error}"))
    raise typer.Exit(PROBLEMS)


def show(checked: CheckedJob, correction: Correction | None) -> None:
    """Prints everything that was found, and the changes that are known to help."""
    out = console()
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
        _show_correction(checked, correction)


def _show_correction(checked: CheckedJob, correction: Correction | None) -> None:
    out = console()
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


def _as_data(checked: CheckedJob, correction: Correction | None, written: Path | None) -> dict[str, Any]:
    document = checked.document

    def described(finding: Finding) -> dict[str, Any]:
        line, column = document.place(finding)
        where = {"line": line, "column": column, "key": ".".join(map(str, finding.path))}
        return {**where, "message": finding.problem.message, "advice": list(finding.problem.advice)}

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
