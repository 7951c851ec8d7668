"""What the native module is built from, and how: the one list that every build of it reads.

``recipe`` is that list as data. ``setup.py`` builds it to install it, ``first_use.py`` where none is installed, the
tests with sanitizers; ``ninja_build.py`` does it for all of them.

Neither torch nor jax is imported here: where they are and which versions they have is read from their files. So
metadata steps work without them, and a build at first use does not start jax in a program that has no use for it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_ext import cuda_toolkit
from torch_ext.build_errors import BuildError as BuildError  # what callers catch
from torch_ext.build_tools import find_compiler
from torch_ext.cuda_toolkit import Toolkit
from torch_ext.ninja_build import INCLUDE
from torch_ext.recipe import Recipe, digest_of, digests

MODULE_NAME = "torch_ext._C"
INSTALL_COMMAND = "python -m pip install --no-build-isolation -e ."
CUDA_INSTALL_COMMAND = f"ASYNC_EMB_CUDA=1 {INSTALL_COMMAND}"
REQUIREMENTS_COMMAND = 'python -m pip install "setuptools>=77.0.3" ninja "torch>=2.11,<2.15" "jax>=0.10,<0.13"'

# Patterns below csrc/. Every .cpp file in these folders is part of the module: adding one needs no edit here.
CPP_PATTERNS = ("cpu/*.cpp", "comm/*.cpp", "comm/c10d/*.cpp", "context/*.cpp", "faces/*.cpp")
# These only where torch and the machine have CUDA (cuda_toolkit.py).
CUDA_PATTERNS = ("cuda/*.cu", "cuda/*.cpp", "comm/c10d/cuda_*.cpp", "faces/cuda_*.cpp")

# One binary runs anywhere: csrc/cpu picks the instruction set when it starts. Contraction to FMA would make results
# depend on the machine.
CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-g1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
# Joins at::parallel_for to torch's own thread pool, which is OpenMP's in the builds of torch for Linux.
OPENMP_FLAGS = ("-fopenmp",) if sys.platform.startswith("linux") else ()

# The same promises for device code: no contraction, IEEE division and square root, denormals kept. The last two are
# nvcc's defaults, written down because the promise of equal bits rests on them. -lineinfo costs nothing at run time.
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-lineinfo",
    "-fmad=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-ftz=false",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-g1,-ffp-contract=off,-fno-math-errno,-fvisibility=hidden,-Wall,-Wextra",
)

# No torch_python: nothing here touches torch's Python objects.
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu")
# Linked as far as they are needed.
TORCH_CUDA_LIBRARIES = ("c10_cuda", "torch_cuda")

# In jaxlib: says which version of XLA's FFI it has.
FFI_HEADER = Path("include", "xla", "ffi", "api", "c_api.h")
# The file that has the versions as a text, which the loader reads before it opens the module.
STAMP_SOURCE = "faces/build_stamp.cpp"
# A build for the machine that it runs on may use all of its instructions. Only where that was tried.
MACHINE_FLAGS = ("-march=native",) if platform.machine() == "x86_64" else ()


@dataclass(frozen=True)
class Toolchain:
    """The two packages that the module is built against, and the Python that loads it."""

    torch_version: str
    torch_revision: str  # of its sources; builds of one version may differ
    torch_cuda: str | None  # the version of CUDA that torch was built with
    torch_include_dirs: tuple[str, ...]
    torch_library_dirs: tuple[str, ...]
    jaxlib_version: str
    ffi_api: str  # of XLA, "0.3"
    ffi_include_dir: str
    python_include_dir: str


def recipe(*, for_this_machine: bool = False) -> Recipe:
    """The whole build as data, with CUDA where torch and the machine have it.

    Args:
      for_this_machine: whether the module may use every instruction of this CPU. Results have the same bits.

    Raises BuildError if something that the build needs is missing; nothing has been compiled then.
    """
    compiler = find_compiler()
    tools = toolchain()
    try:
        decision = cuda_toolkit.decide(tools.torch_version, tools.torch_cuda)
        cuda = decision.toolkit
        flags_of_nvcc = nvcc_flags(cuda, cuda_toolkit.gencode_flags(cuda)) if cuda else []
    except cuda_toolkit.CudaError as error:
        raise BuildError(str(error)) from error
    machine = MACHINE_FLAGS if for_this_machine else ()
    identity = {
        "torch": f"{tools.torch_version} ({tools.torch_revision[:10]})",
        "jaxlib": tools.jaxlib_version,
        "FFI API": tools.ffi_api,
        "Python": f"{platform.python_version()} ({sysconfig.get_config_var('SOABI')})",
        "compiler": compiler.version,
    }
    if cuda:
        identity["CUDA"] = f"{cuda.version} ({cuda.home})"
    if machine:
        identity["CPU"] = cpu_type()
    listed = sources(with_cuda=cuda is not None)
    return Recipe(
        module=module_file_name(),
        root=csrc_root(),
        sources=tuple(listed),
        headers=tuple(headers()),
        compiler=compiler.command,
        compile_flags=tuple(compile_flags(tools, cuda, decision.reason)) + machine,
        link_flags=tuple(link_flags(tools, cuda)),
        identity=identity,
        source_flags={csrc_root() / STAMP_SOURCE: (_macro("ASYNC_EMB_SOURCES", f'"{sources_digest()}"'),)},
        generated={"dlpack/dlpack.h": dlpack_header(tools)},
        nvcc=str(cuda.nvcc) if cuda else "",
        nvcc_flags=tuple(flags_of_nvcc),
        notices=(decision.notice,) if decision.notice else (),
    )


def module_file_name() -> str:
    """The name that this Python looks for."""
    return f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"


# ---- sources


def csrc_root() -> Path:
    """The include root of the C++ sources: in a checkout, or as they are installed with the package."""
    package = Path(__file__).resolve().parent
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def sources(*, with_cuda: bool = False) -> list[Path]:
    """The sources of the module, sorted, so that two builds link in the same order."""
    everything = list(_matches(CPP_PATTERNS + CUDA_PATTERNS))
    cuda = set(_matches(CUDA_PATTERNS))
    return [path for path in dict.fromkeys(everything) if with_cuda or path not in cuda]


def headers() -> list[Path]:
    """Every header below csrc/."""
    return sorted(path for pattern in ("*.h", "*.cuh") for path in csrc_root().rglob(pattern))


def sources_digest() -> str:
    """32 hexadecimal digits that change with any file that a build may read, with CUDA or without."""
    return digest_of(digests(csrc_root(), [*sources(with_cuda=True), *headers()]))


def _matches(patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(csrc_root().glob(pattern))


# ---- what it is built against


def toolchain() -> Toolchain:
    """Finds torch, jaxlib and Python's headers. Raises BuildError, naming the command to run, if one is missing."""
    torch = _package("torch")
    ffi_include = _package("jaxlib") / "include"
    ffi_header = ffi_include.parent / FFI_HEADER
    python_include = sysconfig.get_path("include")
    for header, owner, advice in (
        (ffi_header, "jaxlib", REQUIREMENTS_COMMAND),
        (torch / "include" / "ATen" / "ATen.h", "torch", REQUIREMENTS_COMMAND),
        (Path(python_include) / "Python.h", "Python", "apt-get install python3-dev    (dnf install python3-devel)"),
    ):
        if not header.is_file():
            raise BuildError(f"{owner} has no headers: there is no {header}. Install them:\n    {advice}")
    about = runpy.run_path(str(torch / "version.py"))
    return Toolchain(
        torch_version=about["__version__"],
        torch_revision=about.get("git_version") or "",
        torch_cuda=about["cuda"],
        torch_include_dirs=(str(torch / "include"), str(torch / "include" / "torch" / "csrc" / "api" / "include")),
        torch_library_dirs=(str(torch / "lib"),),
        jaxlib_version=version("jaxlib"),
        ffi_api=ffi_api_of(ffi_header),
        ffi_include_dir=str(ffi_include),
        python_include_dir=python_include,
    )


def ffi_api_of(header: Path) -> str:
    """The version of XLA's FFI that a ``c_api.h`` defines, "major.minor"."""
    text = header.read_text()
    parts = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    return ".".join(part[1] if part else "?" for part in parts)


def dlpack_header(tools: Toolchain) -> Path:
    """torch's copy of DLPack's header. csrc includes it as ``dlpack/dlpack.h``."""
    for include_dir in tools.torch_include_dirs:
        header = Path(include_dir) / "ATen" / "dlpack.h"
        if header.is_file():
            return header
    raise BuildError(f"torch {tools.torch_version} has no ATen/dlpack.h in {', '.join(tools.torch_include_dirs)}")


def cpu_type() -> str:
    """The model of this machine's CPU, and a digest of the instructions that it has."""
    model, instructions = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                instructions = " ".join(sorted(value.split()))
    except OSError:
        pass
    return f"{model} ({hashlib.sha256(instructions.encode()).hexdigest()[:8]})"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return Path(folder)
    raise BuildError(
        f"{MODULE_NAME} is built against the torch and jax that will load it, and {sys.executable} has no {name}.\n"
        "An isolated build environment has neither. Run these two commands instead:\n"
        f"    {REQUIREMENTS_COMMAND}\n"
        f"    {_install('--no-build-isolation')}\n"
        "Or leave the build to the first use, against the torch and jax that run then:\n"
        f"    ASYNC_EMB_BUILD=first-use {_install()}"
    )


def _install(*options: str) -> str:
    """The command that installs what this file was unpacked with: a checkout, or a source distribution."""
    unpacked = (csrc_root().parent / "PKG-INFO").is_file()
    what = ["async_emb-*.tar.gz"] if unpacked else ["-e", "."] if options else ["."]
    return " ".join(["python -m pip install", *options, *what])


# ---- flags


def compile_flags(tools: Toolchain, cuda: Toolkit | None = None, reason: str = "") -> list[str]:
    """Flags for one C++ file. Headers of others are system headers, so that every warning is about our own code.

    ``reason`` says why ``cuda`` is missing.
    """
    system_dirs = (
        INCLUDE,
        *tools.torch_include_dirs,
        tools.ffi_include_dir,
        tools.python_include_dir,
        *(cuda.include_dirs if cuda else ()),
    )
    werror = ["-Werror"] if warnings_are_errors() else []
    macros = ["-DNDEBUG", *(_macro(name, value) for name, value in version_macros(tools, cuda, reason))]
    include = [f"-isystem{directory}" for directory in dict.fromkeys(system_dirs)]
    return [*CXX_FLAGS, *OPENMP_FLAGS, *werror, *macros, *include]


def nvcc_flags(cuda: Toolkit, gencode_flags: Sequence[str]) -> list[str]:
    """Flags for one CUDA file, which knows neither torch nor XLA."""
    werror = ["-Werror=all-warnings", "-Xcompiler=-Werror"] if warnings_are_errors() else []
    system_dirs = [argument for directory in cuda.include_dirs for argument in ("-isystem", directory)]
    return [*NVCC_FLAGS, "-DNDEBUG", *werror, *gencode_flags, *system_dirs]


def link_flags(tools: Toolchain, cuda: Toolkit | None = None) -> list[str]:
    """Flags for the link, behind the objects."""
    directories = [*tools.torch_library_dirs, *(cuda.library_dirs if cuda else ())]
    flags = [*(f"-L{directory}" for directory in directories), *(f"-l{name}" for name in TORCH_LIBRARIES)]
    if cuda:
        flags += ["-Wl,--as-needed", f"-l:{cuda.runtime_library}", *(f"-l{name}" for name in TORCH_CUDA_LIBRARIES)]
    return [*flags, *OPENMP_FLAGS]


def warnings_are_errors() -> bool:
    """Whether ASYNC_EMB_WERROR=1 asks for that, as checks do. Other compilers may warn of other things."""
    return os.environ.get("ASYNC_EMB_WERROR", "") not in ("", "0")


def version_macros(tools: Toolchain, cuda: Toolkit | None = None, reason: str = "") -> list[tuple[str, str]]:
    """Macros that stamp the module with what it was built against; the loader compares them.

    ``reason`` says why ``cuda`` is missing. It is left out where torch has no CUDA, which is reason enough and is known
    when the module is loaded: a build for CPUs names CUDA nowhere.
    """
    macros = [
        ("ASYNC_EMB_TORCH_VERSION", f'"{tools.torch_version}"'),
        ("ASYNC_EMB_JAXLIB_VERSION", f'"{tools.jaxlib_version}"'),
    ]
    if cuda:
        macros += [("ASYNC_EMB_WITH_CUDA", "1"), ("ASYNC_EMB_CUDA_VERSION", f'"{cuda.version}"')]
    elif tools.torch_cuda:
        macros += [("ASYNC_EMB_CUDA_REASON", f'"{reason}"')]
    return macros


def _macro(name: str, value: str) -> str:
    return f"-D{name}={value}"
