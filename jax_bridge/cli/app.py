"""The commands, by name. Each imports what it needs when it runs: `--help` and `check` answer without JAX."""

from __future__ import annotations

import typer

from . import check, doctor, plan, train

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Asynchronous sharded embedding tables for JAX: checks before launch, and an example to run.",
)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("train", context_settings=train.PASS_ON)(train.train)
