"""Commands run in this process: starting Python a hundred times would take longer than everything else."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("typer")


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def async_emb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Calls `async-emb` with these arguments, its outputs being no terminals."""
    from jax_bridge.cli.app import app

    def run(*arguments: object, stdin: bytes = b"", folder: Path | None = None) -> Outcome:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder or Path.cwd()):
            try:
                app(list(map(str, arguments)), prog_name="async-emb", standalone_mode=True)
                status = 0
            except SystemExit as exit:
                status = exit.code if isinstance(exit.code, int) else 1
        for stream in (out, err):
            stream.seek(0)
        return Outcome(status, out.read(), err.read())

    return run
