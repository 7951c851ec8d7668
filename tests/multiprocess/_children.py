"""What the processes of these tests run. The value that a function returns is checked by the test."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY = Path()  # of the job


def run(function: str, arguments: dict[str, Any], environment: dict[str, str], directory: str, output: str) -> None:
    """The whole life of a process, which begins as a copy of one that has imported everything.

    ``function`` is "module:function".
    """
    global DIRECTORY
    DIRECTORY = Path(directory)
    os.environ.update(environment)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(**arguments)
        print(f"\nRESULT {json.dumps(value)}", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    from jax_bridge.processes import starting

    starting.shutdown(timeout_seconds=3)
    os._exit(0)


def end_as_a_program(work: Callable[[], Any]) -> None:
    """Does ``work`` and ends this process as Python ends a program, with what was registered for its end."""
    status: Any = 0
    try:
        work()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def say(name: str) -> None:
    (DIRECTORY / name).touch()


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 40
    while not (DIRECTORY / name).exists():
        assert time.monotonic() < deadline, f"nobody said {name!r}"
        time.sleep(0.02)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    """What became of a call that is expected to raise."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - start,
            "kind": getattr(error, "kind", None),
            "peers": getattr(error, "peers", None),
            "problems": list(getattr(error, "problems", ())),
            "notes": list(getattr(error, "__notes__", ())),
        }
    return {"type": None, "text": "", "seconds": time.monotonic() - start}
