"""`async-emb train`: the two-tower example, as `make train` runs it."""

from __future__ import annotations

import typer

from .checkout import Program, become

EXAMPLE = Program(
    what="the two towers",
    file="examples/two_tower/__main__.py",
    run="from examples.two_tower.__main__ import app; app(prog_name='async-emb')",
    needs=("matplotlib", "optax"),
    make="train",
)


def train(context: typer.Context) -> None:
    """Train the two-tower example of a checkout; `async-emb train --help` shows its options, --config among them."""
    become(EXAMPLE, ["train", *context.args])
