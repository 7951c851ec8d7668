"""Builds the native module ``torch_ext._C``. Everything else about the package is in pyproject.toml.

Nothing here imports torch or jax, and only the compilation needs them: sdist and metadata steps work without.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import types
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# The package without its __init__, which would import torch and load the module that is about to be built.
package = sys.modules["torch_ext"] = types.ModuleType("torch_ext")
package.__path__ = [str(ROOT / "torch_ext")]

from torch_ext import build, build_errors, ninja_build  # noqa: E402

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"setuptools {setuptools.__version__} cannot read the license of pyproject.toml, 77.0.3 and later can. Run\n"
        f"    {build.REQUIREMENTS_COMMAND}"
    )


# When to compile: ASYNC_EMB_BUILD=first-use leaves that to the first use, against whatever torch runs then.
WHEN = os.environ.get("ASYNC_EMB_BUILD", "").strip() or "now"
if WHEN not in ("now", "first-use"):
    sys.exit(f"error: ASYNC_EMB_BUILD={WHEN!r} is neither 'now' nor 'first-use'")


class BuildPython(build_py):
    """Puts the C++ sources into the package: who changes torch later can build for that at first use."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy = Path(self.build_lib) / "torch_ext" / "csrc"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(ROOT / "csrc", copy)


class BuildNative(build_ext):
    """Compiles with the builder that the build at first use has."""

    def build_extension(self, extension: Extension) -> None:
        try:
            recipe = build.recipe()
            for notice in recipe.notices:
                say(notice)
            # Not the temporary folder that an editable install would use: a second build compiles what has changed.
            # Builds with CUDA and without may take turns in one checkout, against two versions of torch.
            variant = "native-cuda" if recipe.nvcc else "native"
            folder = ROOT / "build" / f"{variant}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
            module = ninja_build.build(recipe, folder, say)
        except build_errors.BuildError as error:
            sys.exit(f"error: {error}")
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not over the old file: a process that runs has it mapped.
        target.unlink(missing_ok=True)
        shutil.copy2(module, target)


def say(line: str) -> None:
    print(f"async-emb: {line}", file=sys.stderr, flush=True)


setup(
    ext_modules=[Extension(build.MODULE_NAME, sources=[], language="c++")] if WHEN == "now" else [],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
)
