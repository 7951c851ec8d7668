"""Builds another copy of the native module, instrumented by a sanitizer, beside copies of the Python packages.

``python tests/sanitized_build.py build/asan address`` makes ``build/asan``, a folder to put first on the path of
modules. Only what has changed is compiled again.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_ext", "jax_bridge")


def build_module(folder: Path, sanitizers: str) -> Path:
    """Builds the module for CPUs into ``folder / "native"``; returns its path."""
    # The package without its __init__, which would load the module that is installed.
    package = sys.modules["torch_ext"] = types.ModuleType("torch_ext")
    package.__path__ = [str(ROOT / "torch_ext")]
    from torch_ext import build, ninja_build

    os.environ["ASYNC_EMB_CUDA"] = "0"
    plain = build.recipe()
    instrument = (f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer") if sanitizers else ()
    recipe = dataclasses.replace(
        plain,
        compile_flags=(*plain.compile_flags, "-O1", "-UNDEBUG", *instrument),
        link_flags=(*plain.link_flags, *instrument),
    )
    return ninja_build.build(recipe, folder / "native", print)


def copy_packages(folder: Path) -> None:
    """Copies the packages' Python files. Not links: the loader looks for the module beside the file itself."""
    for package in PACKAGES:
        for old in (folder / package).rglob("*.py"):
            if not (ROOT / old.relative_to(folder)).exists():
                old.unlink()
        for source in (ROOT / package).rglob("*.py"):
            target = folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: sanitized_build.py FOLDER [SANITIZERS]", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    copy_packages(folder)
    module = build_module(folder, *arguments[1:] or [""])
    shutil.copyfile(module, folder / "torch_ext" / module.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
