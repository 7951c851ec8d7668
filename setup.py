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


def _load(name: str):
    """A file of torch_ext, without the package, which would load the module that is about to be built."""
    spec = importlib.util.spec_from_file_location(f"async_emb_{name}", ROOT / "torch_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build = _load("build")
cuda_toolkit = _load("cuda_toolkit")

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"setuptools {setuptools.__version__} cannot read the license of pyproject.toml, 77.0.3 and later can. Run\n"
        f"    {build.REQUIREMENTS_COMMAND}"
    )


class BuildNative(build_ext):
    """Hands the compilation to torch's own build command, once torch is really needed."""

    def run(self) -> None:
        os.environ.update(build.build_environment())
        try:
            tools = build.toolchain()
            decision = cuda_toolkit.decide(tools.torch_version, tools.torch_cuda)
            cuda = decision.toolkit
            gencode_flags = cuda_toolkit.gencode_flags(cuda) if cuda else []
        except (build.BuildError, cuda_toolkit.CudaError) as error:
            sys.exit(f"error: {error}")
        if decision.notice:
            print(f"async-emb: {decision.notice}", file=sys.stderr)

        # Not the temporary folder that an editable install would use: a second build compiles only what has changed.
        # Builds with CUDA and without may take turns in one checkout, against two versions of torch.
        variant = "native-cuda" if cuda else "native"
        build_temp = ROOT / "build" / f"{variant}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        generated = build_temp / "include"
        build.write_dlpack_header(tools, generated)
        for extension in self.extensions:
            extension.sources = _relative(build.sources(with_cuda=cuda is not None))
            extension.define_macros = build.version_macros(tools, cuda, decision.reason)
            extension.extra_compile_args = {"cxx": build.compile_flags(tools, generated, cuda)}
            extension.extra_link_args = build.link_flags(cuda)
            extension.library_dirs = list(tools.torch_library_dirs)
            extension.libraries = list(build.TORCH_LIBRARIES)
            if cuda:
                extension.extra_compile_args["nvcc"] = build.nvcc_flags(cuda, gencode_flags)
                extension.library_dirs += cuda.library_dirs

        command = _torch_build_extension(cuda)(self.distribution)
        for option in ("build_lib", "inplace", "editable_mode", "debug", "force"):
            setattr(command, option, getattr(self, option))
        command.build_temp = str(build_temp)
        command.ensure_finalized()
        command.run()


def _torch_build_extension(cuda):
    from torch.utils import cpp_extension

    if cuda:
        # torch has guessed when it was imported, wrongly where nvcc is a link outside of its toolkit.
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(cuda.home)
    return cpp_extension.BuildExtension.with_options(use_ninja=True)


def _relative(paths: list[Path]) -> list[str]:
    return [os.path.relpath(path, ROOT) for path in paths]


setup(
    ext_modules=[
        Extension(
            build.MODULE_NAME,
            sources=_relative(build.sources()),
            include_dirs=[str(ROOT / "csrc")],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
