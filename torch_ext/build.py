"""What the native module is built from and how: the one list that every build of it reads.

Importing this file imports neither torch nor jax, so that metadata steps (sdist, egg_info) work without them.
``setup.py`` loads it by path, because importing the package would try to load the module that is about to be built.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ext.cuda_toolkit import Toolkit

MODULE_NAME = "torch_ext._C"
INSTALL_COMMAND = "python -m pip install --no-build-isolation -e ."
CUDA_INSTALL_COMMAND = f"ASYNC_EMB_CUDA=1 {INSTALL_COMMAND}"
REQUIREMENTS_COMMAND = 'python -m pip install "setuptools>=77.0.3" ninja "torch>=2.11,<2.15" "jax>=0.10,<0.13"'

# Patterns below csrc/. Every .cpp file in these folders is part of the module: adding one needs no edit here.
CPP_PATTERNS = ("cpu/*.cpp", "comm/*.cpp", "comm/c10d/*.cpp", "context/*.cpp", "faces/*.cpp")
# These only where torch and the machine have CUDA (cuda_toolkit.py).
CUDA_PATTERNS = ("cuda/*.cu", "cuda/*.cpp", "faces/cuda_*.cpp")

# No -march: one binary runs anywhere, csrc/cpu picks the instruction set when it starts. Contraction to FMA would make
# results depend on the machine.
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

# A file that includes ATen needs about this much memory to compile.
_BYTES_PER_JOB = 2 * 1024**3


class BuildError(RuntimeError):
    """The native module cannot be built here; the message ends with the command that makes it possible."""


@dataclass(frozen=True)
class Toolchain:
    """The two packages that the module is built against."""

    torch_version: str
    torch_cuda: str | None  # the version of CUDA that torch was built with
    torch_include_dirs: tuple[str, ...]
    torch_library_dirs: tuple[str, ...]
    jaxlib_version: str
    ffi_include_dir: str


def csrc_root() -> Path:
    """The include root of the C++ sources."""
    return Path(__file__).resolve().parent.parent / "csrc"


def sources(*, with_cuda: bool = False) -> list[Path]:
    """The sources of the module, sorted, so that two builds link in the same order."""
    everything = list(_matches(CPP_PATTERNS + CUDA_PATTERNS))
    cuda = set(_matches(CUDA_PATTERNS))
    return [path for path in dict.fromkeys(everything) if with_cuda or path not in cuda]


def headers() -> list[Path]:
    """Every header below csrc/."""
    return sorted(csrc_root().rglob("*.h"))


def toolchain() -> Toolchain:
    """Finds torch and jaxlib. Raises BuildError, naming the command to run, if one of them is missing."""
    # It warns where no GPU is visible, which a build does not need.
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in str(record.msg))
    try:
        torch_version = importlib.import_module("torch.version")
        cpp_extension = importlib.import_module("torch.utils.cpp_extension")
        jax_ffi = importlib.import_module("jax.ffi")
    except ImportError as error:
        raise BuildError(
            f"{MODULE_NAME} is built against the torch and jax that will load it, and {error.name or error} cannot be "
            f"imported by {sys.executable}: {error}\n"
            "An isolated build environment has neither. Run these two commands instead:\n"
            f"    {REQUIREMENTS_COMMAND}\n"
            f"    {INSTALL_COMMAND}"
        ) from error
    return Toolchain(
        torch_version=torch_version.__version__,
        torch_cuda=torch_version.cuda,
        torch_include_dirs=tuple(cpp_extension.include_paths()),
        torch_library_dirs=tuple(cpp_extension.library_paths()),
        jaxlib_version=version("jaxlib"),
        ffi_include_dir=jax_ffi.include_dir(),
    )


def compile_flags(tools: Toolchain, generated_include_dir: Path, cuda: Toolkit | None = None) -> list[str]:
    """Flags for one C++ file. Headers of others are system headers, so that every warning is about our own code."""
    system_dirs = (
        str(generated_include_dir),
        *tools.torch_include_dirs,
        tools.ffi_include_dir,
        sysconfig.get_path("include"),
        *(cuda.include_dirs if cuda else ()),
    )
    werror = ["-Werror"] if warnings_are_errors() else []
    return [*CXX_FLAGS, *OPENMP_FLAGS, *werror, *(f"-isystem{directory}" for directory in dict.fromkeys(system_dirs))]


def nvcc_flags(cuda: Toolkit, gencode_flags: Sequence[str]) -> list[str]:
    """Flags for one CUDA file, which knows neither torch nor XLA."""
    werror = ["-Werror=all-warnings", "-Xcompiler=-Werror"] if warnings_are_errors() else []
    system_dirs = [argument for directory in cuda.include_dirs for argument in ("-isystem", directory)]
    return [*NVCC_FLAGS, *werror, *gencode_flags, *system_dirs]


def link_flags(cuda: Toolkit | None = None) -> list[str]:
    """Flags for the link, beside TORCH_LIBRARIES."""
    if cuda is None:
        return list(OPENMP_FLAGS)
    libraries = (f"-l{name}" for name in TORCH_CUDA_LIBRARIES)
    return [*OPENMP_FLAGS, "-Wl,--as-needed", f"-l:{cuda.runtime_library}", *libraries]


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


def write_dlpack_header(tools: Toolchain, generated_include_dir: Path) -> Path:
    """Puts torch's copy of DLPack's header at ``dlpack/dlpack.h``, the name under which csrc includes it."""
    for include_dir in tools.torch_include_dirs:
        header = Path(include_dir) / "ATen" / "dlpack.h"
        if header.is_file():
            break
    else:
        raise BuildError(f"torch {tools.torch_version} has no ATen/dlpack.h in {', '.join(tools.torch_include_dirs)}")
    target = generated_include_dir / "dlpack" / "dlpack.h"
    if not target.is_file() or target.read_bytes() != header.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header, target)
    return target


def build_environment() -> dict[str, str]:
    """Changes to the environment of a build: where ninja is, and how many compilers run at once."""
    changes = {"PATH": _path_with_ninja(os.environ.get("PATH", ""))}
    if not os.environ.get("MAX_JOBS", "").isdigit():
        changes["MAX_JOBS"] = str(parallel_jobs())
    return changes


def parallel_jobs() -> int:
    """Compilers to run at once: as many as there are cores, fewer where memory would not hold them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _available_memory_bytes() // _BYTES_PER_JOB))


def _matches(patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(csrc_root().glob(pattern))


def _path_with_ninja(path: str) -> str:
    # Without an activated environment the folder of the interpreter is not on PATH, and ninja's wheel puts the program
    # there. An empty PATH would leave the compiler out too.
    system = (path or os.defpath).split(os.pathsep)
    directories = [os.path.dirname(sys.executable), sysconfig.get_path("scripts"), *system]
    return os.pathsep.join(dict.fromkeys(filter(None, directories)))


def _available_memory_bytes() -> int:
    available = sys.maxsize
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # A container's own limit, which /proc/meminfo does not know.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return available


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _main(arguments: list[str]) -> int:
    if arguments == ["jobs"]:
        print(parallel_jobs())
    elif arguments == ["flags"]:
        print(" ".join(CXX_FLAGS))
    elif len(arguments) == 2 and arguments[0] == "dlpack":
        write_dlpack_header(toolchain(), Path(arguments[1]))
    else:
        print("usage: build.py {jobs | flags | dlpack INCLUDE_DIR}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
