"""Builds the native module ``torch_ext._C``. Everything else about the package is in pyproject.toml.

torch is imported only when the module is compiled: sdist and metadata steps work without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def _load_build_config():
    spec = importlib.util.spec_from_file_location("async_emb_build_config", ROOT / "torch_ext" / "build_config.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build_config = _load_build_config()

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"setuptools {setuptools.__version__} cannot read the license of pyproject.toml, 77.0.3 and later can. Run\n"
        f"    {build_config.REQUIREMENTS_COMMAND}"
    )


class BuildNative(build_ext):
    """Hands the compilation to torch's own build command, once torch is really needed."""

    def run(self) -> None:
        try:
            tools = build_config.toolchain()
        except build_config.BuildError as error:
            sys.exit(f"error: {error}")
        os.environ.update(build_config.build_environment())

        generated = ROOT / "build" / "include"
        build_config.write_dlpack_header(tools, generated)
        for extension in self.extensions:
            extension.define_macros = build_config.version_macros(tools)
            extension.extra_compile_args = {"cxx": build_config.compile_flags(tools, generated)}
            extension.extra_link_args = list(build_config.OPENMP_FLAGS)
            extension.library_dirs = list(tools.torch_library_dirs)
            extension.libraries = list(build_config.TORCH_LIBRARIES)

        command = _torch_build_extension()(self.distribution)
        for option in ("build_lib", "inplace", "editable_mode", "debug", "force"):
            setattr(command, option, getattr(self, option))
        # Not the temporary folder that an editable install would use: a second build compiles only what has changed.
        command.build_temp = str(ROOT / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}")
        command.ensure_finalized()
        command.run()


def _torch_build_extension():
    from torch.utils.cpp_extension import BuildExtension

    return BuildExtension.with_options(use_ninja=True)


setup(
    ext_modules=[
        Extension(
            build_config.MODULE_NAME,
            sources=[os.path.relpath(path, ROOT) for path in build_config.sources()],
            include_dirs=[str(ROOT / "csrc")],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
