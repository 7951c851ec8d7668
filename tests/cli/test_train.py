"""`async-emb train` and `bench` hand everything to programs of the checkout, and say so where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_bridge.cli import checkout

ROOT = Path(__file__).parents[2]
COMMANDS = {"train": ["--config", "runs/a/config.toml", "--epochs", "1"], "bench": ["--quick", "--only", "calls"]}


@pytest.mark.parametrize(("command", "options"), COMMANDS.items())
def test_all_options_are_those_of_the_program(command, options, async_emb, monkeypatch):
    called = []
    monkeypatch.setattr(os, "execve", lambda *arguments: called.append(arguments))
    assert async_emb(command, *options, "--help").status == 0
    ((program, words, environment),) = called
    assert program == words[0] == sys.executable
    assert words[-len(options) - 1 :] == [*options, "--help"]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_program_bears_the_name_of_the_command_wherever_it_is_called(command, tmp_path):
    for folder in ("examples", "benchmarks"):  # of somebody else
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('not this one')")
    result = subprocess.run(
        [sys.executable, "-P", "-m", "jax_bridge", command, "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert f"usage: async-emb {command} [" in result.stdout.lower()


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_checkout_it_says_what_to_do(command, async_emb, monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    status, out, err = async_emb(command)
    assert (status, out) == (2, "")
    assert "are not part of the installed package" in err
    assert f"make {command}" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_package_that_is_missing_is_named(command, async_emb, monkeypatch):
    monkeypatch.setattr(checkout, "find_spec", lambda name: None)
    status, _, err = async_emb(command)
    assert status == 2
    assert 'need matplotlib and optax: python -m pip install "async-emb[train]"' in err
