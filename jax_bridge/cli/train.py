"""`async-emb train`: the two-tower example, as `make train` runs it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import typer

from .output import fail

# What follows is for the example, its own --help included.
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def train(context: typer.Context) -> None:
    """Train the two-tower example of a checkout; `async-emb train --help` shows its options, --config among them."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "examples" / "two_tower" / "__main__.py").is_file():
        fail(
            f"the two-tower example is not part of the installed package, and there is none beside it in {root}. "
            "In a checkout of the sources, run: make train"
        )
    if missing := [name for name in ("matplotlib", "optax") if importlib.util.find_spec(name) is None]:
        fail(f'the example needs {" and ".join(missing)}: python -m pip install "async-emb[train]"')
    # In place of this process, so that signals and the terminal are the example's.
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "examples.two_tower", "train", *context.args]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
