"""What a build would find on this machine, for `async-emb doctor`: asked by the functions that the build calls.

Run by path, in a process of its own: `python -P build_report.py MARK ninja jobs cache compiler` prints a line for each:
MARK, name and JSON. It imports neither torch nor jax, and works where they do not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any


def of_ninja() -> dict[str, Any]:
    from torch_ext.build_tools import find_ninja

    path = find_ninja()
    result = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return {"path": path, "version": result.stdout.strip()}


def of_jobs() -> dict[str, Any]:
    """How many compilers run at once."""
    from torch_ext import build_jobs

    return {"jobs": build_jobs.parallel_jobs(), "cores": build_jobs.available_cores()}


def of_cache() -> dict[str, Any]:
    """Where builds at first use are kept, what is there, and why nothing can be built there."""
    from torch_ext import build_cache

    folders = []
    for folder in build_cache.folders():
        found: dict[str, Any] = {"path": str(folder), "refusal": build_cache.refusal(folder), "states": {}, "bytes": 0}
        try:
            builds = build_cache.builds(folder)
        except OSError as error:
            builds = []
            found["refusal"] = found["refusal"] or f"{folder} cannot be read: {error}"
        states = [build.state for build in builds]
        found["states"] = {state: states.count(state) for state in dict.fromkeys(states)}
        found["bytes"] = sum(build.size for build in builds)
        found["removable"] = [str(build.path) for build in builds if build.state in ("damaged", "left behind")]
        folders.append(found)
    return {"folders": folders}


def of_compiler() -> dict[str, Any]:
    """The compiler, which has made a library. May take as long as it hangs."""
    from torch_ext import build, build_tools

    compiler = build_tools.find_compiler()
    build_tools.require_working(compiler.command, (*build.CXX_FLAGS, *build.OPENMP_FLAGS))
    return {"command": list(compiler.command), "version": compiler.version}


def main(mark: str, *names: str) -> None:
    # The package without its __init__, which would import torch.
    package = sys.modules["torch_ext"] = types.ModuleType("torch_ext")
    package.__path__ = [str(Path(__file__).resolve().parent)]
    reports = {"ninja": of_ninja, "jobs": of_jobs, "cache": of_cache, "compiler": of_compiler}
    for name in names:
        try:
            found = reports[name]()
        except Exception as error:
            kind = "" if type(error).__name__ == "BuildError" else f"{type(error).__name__}: "
            found = {"error": f"{kind}{error}"}
        print(f"\n{mark}{name} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
