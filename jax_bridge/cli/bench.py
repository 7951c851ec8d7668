"""`async-emb bench`: the CPU benchmarks, as `make bench` runs them, beside those peers that are installed."""

from __future__ import annotations

import typer

from .checkout import Program, become

BENCHMARKS = Program(
    what="the benchmarks",
    file="benchmarks/__main__.py",
    run="import sys; from benchmarks.__main__ import main; sys.exit(main(program='async-emb bench'))",
    needs=("matplotlib", "optax"),
    make="bench",
)


def bench(context: typer.Context) -> None:
    """Run the CPU benchmarks of a checkout; `async-emb bench --help` shows their options, --quick among them."""
    become(BENCHMARKS, context.args)
