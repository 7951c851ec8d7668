"""`async-emb train` hands everything to the two-tower example, and says where it is when it is not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jax_bridge.cli import train

ROOT = Path(__file__).parents[2]


def test_all_options_are_those_of_the_example(async_emb, monkeypatch):
    called = []
    monkeypatch.setattr(os, "execve", lambda *arguments: called.append(arguments))
    assert async_emb("train", "--config", "runs/a/config.toml", "--epochs", "1", "--help").status == 0
    ((program, command, environment),) = called
    assert program == sys.executable
    options = ["--config", "runs/a/config.toml", "--epochs", "1", "--help"]
    assert command == [sys.executable, "-m", "examples.two_tower", "train", *options]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_without_a_checkout_it_says_what_to_do(async_emb, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "__file__", str(tmp_path / "site-packages" / "jax_bridge" / "cli" / "train.py"))
    status, _, err = async_emb("train")
    assert status == 2
    assert "is not part of the installed package" in err
    assert "make train" in err
