"""Puts a job file to the rules: those of `make_context_handle`, `AsyncEmbedding` and `train_step`, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch_ext.common.table_rules import is_integer

from ..errors import Problem
from ..optimizers import RowwiseAdagrad
from ..validation.checks import Arguments, Checked, check, size_warning
from ..validation.table_checks import TableArguments, own_problems, staleness_problem
from .document import Document
from .job_file import Finding, Job, TableSettings, read_job
from .toml_positions import Path

# Arguments of make_context_handle that the whole job has, and under which name.
_OF_JOB = {"mesh": "mesh", "table_axis": "table_axis", "num_devices_per_node": "num_devices_per_node"}
# Those of a table, where a job file calls them differently.
_OF_TABLE = {"emb_width": "width"}
_GOOD_OPTIMIZER = RowwiseAdagrad(learning_rate=0.0)


@dataclasses.dataclass(frozen=True)
class CheckedJob:
    """A job file, and everything that was found."""

    document: Document
    job: Job
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...]


def check_job(document: Document) -> CheckedJob:
    """Everything that is wrong with the file, in the order of the file."""
    job, findings = read_job(document)
    told = {finding.path for finding in findings}
    told |= {(*finding.path[:-1], finding.rename) for finding in findings if finding.rename}
    rules: list[Finding] = []
    if problem := staleness_problem(job.staleness):
        rules.append(Finding(("staleness",), problem))
    warnings: list[Finding] = []
    for settings in job.tables.values():
        arguments = handle_arguments(job, settings)
        checked = check(arguments)
        rules += _of_table(document, job, settings, checked)
        if not checked.problems and (warning := size_warning(checked.integers)):
            warnings.append(Finding(("tables", settings.name, "num_unique"), Problem(warning)))
    # A mesh or a value that the form of the file has ruled out already is not judged again.
    findings += [finding for finding in dict.fromkeys(rules) if not _is_told(finding.path, told)]
    findings.sort(key=lambda finding: document.place(finding))
    return CheckedJob(document, job, tuple(findings), tuple(warnings))


def handle_arguments(job: Job, settings: TableSettings) -> Arguments:
    """What `make_context_handle` would be called with."""
    return Arguments(
        mesh=job.mesh,
        table_axis=job.table_axis,
        data_axis=job.data_axis,
        tokens_per_batch=settings.tokens_per_batch,
        emb_width=settings.width,
        num_unique=settings.num_unique,
        num_devices_per_node=job.num_devices_per_node,
        name=settings.name,
        purpose="train",
        dtype=settings.dtype,
        logical_width=settings.logical_width,
        id_policy=settings.id_policy,
        padding_id=_within_int32(settings.padding_id),
    )


def table_arguments(job: Job, settings: TableSettings) -> TableArguments:
    """What `AsyncEmbedding` would be called with, for what `make_context_handle` does not judge: rows and int32 ids."""
    return TableArguments(
        mesh=job.mesh,
        table_axis=job.table_axis,
        data_axis=job.data_axis,
        rows=settings.rows,
        width=1,
        name=settings.name,
        optimizer=settings.optimizer or _GOOD_OPTIMIZER,
        dtype=settings.dtype,
        init=None,
        id_policy=settings.id_policy,
        padding_id=settings.padding_id,
        num_unique=settings.num_unique,
    )


def path_of(document: Document, argument: str, table: str) -> Path:
    """The key of a job file that gives an argument."""
    if argument == "data_axis":
        return ("data_axis",) if document.has(("data_axis",)) else ("table_axis",)
    if argument in _OF_JOB:
        return (_OF_JOB[argument],)
    path: Path = ("tables", table, _OF_TABLE.get(argument, argument))
    if argument == "name":
        return path[:2]
    if argument in ("tokens_per_batch", "num_unique") and not document.has(path):
        return ("tokens_per_batch",)
    return path


def _of_table(document: Document, job: Job, settings: TableSettings, checked: Checked) -> Iterator[Finding]:
    own, _ = own_problems(table_arguments(job, settings))
    for problem in (*own, *checked.problems):
        if "num_unique" in problem.arguments and not document.has(("tables", settings.name, "num_unique")):
            continue  # it is tokens_per_batch, which has been judged
        for path in dict.fromkeys(path_of(document, argument, settings.name) for argument in problem.arguments):
            yield Finding(path, problem)


def _is_told(path: Path, told: set[Path]) -> bool:
    return path in told or (path == ("mesh",) and any(other[:1] == ("mesh",) for other in told))


def _within_int32(padding_id: Any) -> Any:
    """None for an id that `own_problems` refuses."""
    return None if is_integer(padding_id) and not -(2**31) <= padding_id < 2**31 else padding_id
