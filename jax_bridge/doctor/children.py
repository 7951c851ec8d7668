"""Runs something that may hang, crash or not be there, and always comes back with what it said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARK = "async-emb says "


class Answer(NamedTuple):
    """What something says of itself, or why it says nothing; ``output`` is what else was printed."""

    found: dict[str, Any] | None
    failure: str
    output: str


class Child:
    """A command in a process group of its own, which is ended as a whole."""

    def __init__(self, command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> None:
        # A file: a grandchild that lives on would hold a pipe open, and reading it up.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `wait`
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            self._refusal = f"cannot be run: {error.strerror}"

    def wait(self, seconds: float) -> tuple[str, str]:
        """(what went wrong, or nothing; everything it printed)."""
        failure = self._refusal
        if self._process is not None:
            try:
                status = self._process.wait(seconds)
                if status < 0:
                    failure = f"was ended by {signal.Signals(-status).name}"
                elif status > 0:
                    failure = f"ended with status {status}"
            except subprocess.TimeoutExpired:
                failure = f"did not answer within {seconds:g} s"
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        self._output.close()
        return failure, output


def start_reports(script: Path, names: Sequence[str], environ: Mapping[str, str]) -> Child:
    """Starts a `self_report.py`, in a Python of its own."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), environ.get("PYTHONPATH", "")]))
    return Child([sys.executable, "-P", script, MARK, *names], {**environ, "PYTHONPATH": path})


def answers_of(child: Child, names: Sequence[str], seconds: float) -> dict[str, Answer]:
    """What each of them says. What one was doing when all ended is that one's failure."""
    failure, output = child.wait(seconds)
    found: dict[str, Answer] = {}
    other: list[str] = []
    for line in output.splitlines():
        if line.startswith(MARK):
            name, _, answer = line.removeprefix(MARK).partition(" ")
            found[name] = Answer(json.loads(answer), "", "\n".join(other).strip())
            other = []
        else:
            other.append(line)
    missing = [name for name in names if name not in found]
    for name in missing:
        why = (
            failure or "said nothing"
            if name == missing[0]
            else f"was not asked, because that of {missing[0]} {failure}"
        )
        found[name] = Answer(None, why, "\n".join(other).strip() if name == missing[0] else "")
    return found
