"""Launchers of this machine, and what they need."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest


def find(program: str) -> str:
    """A launcher beside the interpreter, or of the machine."""
    beside = Path(sys.executable).with_name(program)
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} on this machine")
    return found


def two_free_ports() -> int:
    """The first of two neighbours: torchrun's own store takes one, JAX's coordinator the next."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
