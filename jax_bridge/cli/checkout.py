"""Commands that are programs of a checkout, and not part of the installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .output import fail

# What follows such a command is for its program, --help included.
PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
ROOT = Path(__file__).resolve().parents[2]


class Program(NamedTuple):
    """Attributes:
    what: it in words.
    file: below the root of the checkout.
    run: the Python that runs it under the name of the command, which its --help shows.
    needs: what it imports beside what the package itself does.
    make: the target that runs it, with all that it needs.
    """

    what: str
    file: str
    run: str
    needs: tuple[str, ...]
    make: str


def become(program: Program, arguments: Sequence[str]) -> NoReturn:
    """Runs the program in place of this process, so that signals and the terminal are the program's. Ends the command
    with an error where it cannot be run."""
    if not (ROOT / program.file).is_file():
        fail(
            f"there is no {program.file} in {ROOT}: {program.what} come with the sources, and are not part of the "
            f"installed package. In a checkout, run: make {program.make}"
        )
    if missing := [name for name in program.needs if find_spec(name) is None]:
        fail(f'{program.what} need {" and ".join(missing)}: python -m pip install "async-emb[train]"')
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # -P: a folder of such a name where the command is called is another one.
    command = [sys.executable, "-P", "-c", program.run, *arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
