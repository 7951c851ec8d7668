"""`async-emb check`: what is wrong with a job file, and a file that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .job_report import JobFile, as_data, read_document, show
from .output import PROBLEMS, console, fail, print_json
from .streams import write_bytes

_STANDARD_OUTPUT = Path("-")


def check(
    job: JobFile,
    fix: Annotated[
        Path | None,
        typer.Option(
            "--fix",
            metavar="OUT",
            help="Write a corrected file here; the job file stays as it is. - is the standard output, and the report "
            "goes to the error output.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Let --fix replace a file that exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check a job file without devices: everything that is wrong with it, where, and what to write instead."""
    from ..jobs.checking import check_job
    from ..jobs.corrections import correct

    piped = fix == _STANDARD_OUTPUT
    if piped and json:
        fail("--fix - and --json would both write to the standard output; give --fix a file")
    if fix is not None and not piped and fix.exists() and not overwrite:
        fail(f"{fix} exists already; choose another name, or add --overwrite")
    checked = check_job(read_document(job, json=json, stderr=piped))
    correction = correct(checked) if checked.findings else None
    written = None
    if fix is not None and (not checked.findings or (correction is not None and correction.passes)):
        document = correction.checked.document if correction else checked.document
        _write(fix, document.text.encode())
        written = fix
    if json:
        print_json(as_data(checked, correction, written))
    else:
        out = console(stderr=piped)
        show(checked, correction, out)
        if written is None and fix is not None:
            out.print(f"{fix} was not written: no file that passes is known")
        elif written is not None and not piped:
            out.print(f"written: {written}")
    if checked.findings:
        raise typer.Exit(PROBLEMS)


def _write(fix: Path, content: bytes) -> None:
    if fix == _STANDARD_OUTPUT:
        write_bytes(content)
        return
    try:
        fix.write_bytes(content)
    except OSError as error:
        fail(f"{fix} cannot be written: {error.strerror}")
