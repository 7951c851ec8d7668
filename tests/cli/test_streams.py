"""A command whose output is full, closed, or not read to its end; and one whose terminal knows ASCII alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_bridge.cli import app

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "tests" / "jobs" / "good" / "axis_of_size_one.toml"
BROKEN = ROOT / "tests" / "jobs" / "broken" / "width_uneven.toml"

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


def command(*arguments, redirection="", **environment):
    line = f'exec "$0" -m jax_bridge "$@" {redirection}'
    return subprocess.run(
        ["/bin/sh", "-c", line, sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "redirection", "why"),
    [
        (("plan", GOOD), ">/dev/full", "No space left on device"),
        (("check", BROKEN, "--json"), ">/dev/full", "No space left on device"),
        (("check", BROKEN, "--fix", "-"), ">/dev/full", "No space left on device"),
        (("--help",), ">/dev/full", "No space left on device"),
        (("check", GOOD), ">&-", "it is closed"),
    ],
)
def test_output_that_cannot_be_written_is_said(arguments, redirection, why):
    result = command(*arguments, redirection=redirection)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"async-emb: error: the standard output cannot be written: {why}\n"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_has_gone_ends_the_command_in_silence(options):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "jax_bridge", "check", BROKEN, *options],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        check=False,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, b"")


def test_a_status_does_not_depend_on_the_error_output():
    for redirection in ("2>/dev/full", "2>&-"):
        assert command("check", "nowhere.toml", redirection=redirection).returncode == 2
        assert command("check", BROKEN, redirection=redirection).returncode == 1


def test_a_job_from_an_input_that_is_closed_cannot_be_read():
    result = command("check", "-", redirection="<&-")
    assert (result.returncode, result.stderr) == (2, "error: <stdin> cannot be read: it is closed\n")


def test_signs_that_a_terminal_does_not_have_are_escaped():
    result = command("plan", GOOD, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0
    assert "\\u2588 weights" in result.stdout
    result = command("check", BROKEN, "--json", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert json.loads(result.stdout)["problems"]


def test_the_version_is_that_of_the_code_that_runs(async_emb, monkeypatch, tmp_path):
    status, out, err = async_emb("--version")
    assert (status, err) == (0, "")
    assert out == f"async-emb {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}\n"
    monkeypatch.setattr(app, "ROOT", tmp_path)
    monkeypatch.setattr(app.importlib.metadata, "version", lambda name: f"9.9 of {name}")
    assert async_emb("--version").out == "async-emb 9.9 of async-emb\n"
