"""A module of one small source, built at first use as the native module is, but at once.

Run as a program it is one process that uses that module: ``python tests/torch_ext/tiny_build.py ROOT`` builds what is
in ROOT, or takes it from the cache, loads it, and prints what it found as JSON. It imports neither torch nor jax.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import types
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent

SOURCE = """\
#include "folder/number.h"

extern "C" int number() { return kNumber; }
"""
# Notes each compilation. With `closed` beside it, compilations wait until that is gone.
COMPILER = """\
#!/bin/sh
case "$*" in *" -c "*)
  echo $$ >>'{folder}/compilations'
  while [ -e '{folder}/closed' ]; do sleep 0.05; done ;;
esac
exec c++ "$@"
"""


def write_sources(root: Path, number: int = 1) -> Path:
    """The sources of a module whose ``number`` is this."""
    (root / "folder").mkdir(parents=True, exist_ok=True)
    (root / "tiny.cpp").write_text(SOURCE)
    (root / "folder" / "number.h").write_text(f"constexpr int kNumber = {number};\n")
    return root


def write_compiler(folder: Path) -> Path:
    """A compiler that can be counted and stopped."""
    path = folder / "compiler"
    path.write_text(COMPILER.format(folder=folder))
    path.chmod(0o755)
    return path


def tiny_recipe(root: Path, *flags: str, identity: Mapping[str, str] | None = None):
    """The recipe of what ``write_sources`` wrote, by the compiler of the environment."""
    from torch_ext.build_tools import find_compiler
    from torch_ext.recipe import Recipe

    compiler = find_compiler()
    return Recipe(
        module="tiny.so",
        root=root,
        sources=(root / "tiny.cpp",),
        headers=(root / "folder" / "number.h",),
        compiler=compiler.command,
        compile_flags=("-O0", *flags),
        link_flags=(),
        identity={"compiler": compiler.version} if identity is None else identity,
    )


def number_of(path: Path) -> int:
    """Loads the module, and asks it for its number."""
    return ctypes.CDLL(str(path)).number()


def use(root: Path) -> dict[str, object]:
    """What a process does that needs the module."""
    from torch_ext import first_use

    path = first_use.module_of(tiny_recipe(root), interval=0.1)
    return {
        "path": str(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "number": number_of(path),
    }


def _main() -> int:
    # A shell starts what runs behind it with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The package without its __init__, which would import torch.
    package = sys.modules["torch_ext"] = types.ModuleType("torch_ext")
    package.__path__ = [str(REPOSITORY / "torch_ext")]
    from torch_ext.build_errors import BuildError

    try:
        print(json.dumps(use(Path(os.fsdecode(sys.argv[1])))))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
