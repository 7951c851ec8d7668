"""The commands, by name. Each imports what it needs when it runs: `--help` and `check` answer without JAX."""

from __future__ import annotations

import importlib.metadata
import tomllib
from typing import Annotated

import typer

from . import bench, check, doctor, plan, train
from .checkout import PASS_ON, ROOT

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Asynchronous sharded embedding tables for JAX: checks before launch, and programs to run.",
)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("train", context_settings=PASS_ON)(train.train)
app.command("bench", context_settings=PASS_ON)(bench.bench)


def version() -> str:
    """Of the code that runs: that of a checkout is not what may be installed beside it."""
    file = ROOT / "pyproject.toml"
    project = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    if project.get("name") == "async-emb":
        return str(project["version"])
    return importlib.metadata.version("async-emb")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"async-emb {version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
