"""Whether the native module is built with CUDA, and with which toolkit; if not, why not.

CUDA joins the build where torch has CUDA and an nvcc of the same major version is found. ``ASYNC_EMB_CUDA=1`` makes its
absence an error, ``ASYNC_EMB_CUDA=0`` leaves it out. No GPU is looked for: none is needed to compile.

Imports neither torch nor the rest of the package, and is loaded by path, like ``build.py`` beside it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# GPUs of 2020, 2022 and 2025; PTX lets later ones compile for themselves.
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"

# Where toolkits are installed by themselves; {version} is that of torch.
SYSTEM_HOMES = ("/usr/local/cuda-{version}", "/usr/local/cuda")

# The names that torch gives to groups of architectures, as far as a toolkit that we support still knows them.
NAMED_ARCHITECTURES = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


class CudaError(RuntimeError):
    """CUDA cannot be built here.

    Attributes:
      reason: one short phrase without paths, the same from build to build: it is compiled into the module.
      detail: where that was seen, and what to do.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that fits torch."""

    home: Path  # what CUDA_HOME is to be: has bin/nvcc and the headers
    version: str  # "13.0"
    include_dirs: tuple[str, ...]  # its headers, then those of the nvidia packages that torch brings
    library_dirs: tuple[str, ...]
    runtime_library: str  # for the linker: the file name, since the nvidia packages have no name without a version

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"


@dataclass(frozen=True)
class Decision:
    """Whether CUDA is in: ``toolkit``, or None and the reason. ``notice`` is for whoever builds."""

    toolkit: Toolkit | None
    reason: str = ""
    notice: str = ""


def decide(torch_version: str, torch_cuda: str | None, environ: Mapping[str, str] | None = None) -> Decision:
    """Decides before a compiler runs.

    Args:
      torch_version: of the torch that the module is built for.
      torch_cuda: ``torch.version.cuda``, None for a build of torch without CUDA.
      environ: the environment; that of the process if None.

    Raises CudaError where ``ASYNC_EMB_CUDA=1`` asks for what cannot be had, and for any other value than 0 and 1.
    """
    environ = os.environ if environ is None else environ
    wish = environ.get("ASYNC_EMB_CUDA", "").strip()
    if wish not in ("", "0", "1"):
        raise CudaError(
            f"ASYNC_EMB_CUDA={wish!r} is neither 0 nor 1. 0 builds without CUDA, 1 fails where CUDA cannot be built; "
            "unset it to build with CUDA where torch and the machine have it"
        )
    if wish == "0":
        return Decision(None, "ASYNC_EMB_CUDA=0 asked for a build without it")
    try:
        if torch_cuda is None:
            raise CudaError(
                f"torch {torch_version} is a build without CUDA",
                ".\nInstall a torch with CUDA, as PyPI has for Linux, or unset ASYNC_EMB_CUDA to build for CPUs alone",
            )
        toolkit = find_toolkit(torch_version, torch_cuda, environ)
    except CudaError as error:
        if wish == "1":
            raise CudaError(f"ASYNC_EMB_CUDA=1 asks for CUDA, but {error}") from error
        if torch_cuda is None:  # nothing is missing, and nobody asked
            return Decision(None, error.reason)
        return Decision(None, error.reason, f"building without CUDA, because {error}")
    if toolkit.version != torch_cuda:
        versions = f"nvcc is of CUDA {toolkit.version} ({toolkit.home}), torch {torch_version} of CUDA {torch_cuda}"
        return Decision(toolkit, "", f"{versions}: with equal major versions that works")
    return Decision(toolkit)


# ---- the toolkit


def find_toolkit(torch_version: str, torch_cuda: str, environ: Mapping[str, str]) -> Toolkit:
    """The first toolkit of torch's major version.

    CUDA_HOME decides alone if it is set. Otherwise PATH, the usual folders and Python's nvidia packages are looked at.
    Raises CudaError that says where was looked, and what is wrong with each nvcc found.
    """
    packages = nvidia_packages(torch_cuda)
    problems: list[CudaError] = []
    for nvcc in _candidates(torch_cuda, packages, environ):
        try:
            return _toolkit(nvcc, torch_version, torch_cuda, packages)
        except CudaError as error:
            problems.append(error)
    if problems:
        by_reason: dict[str, CudaError] = {}
        for problem in problems:
            by_reason.setdefault(problem.reason, problem)
        first, *others = by_reason.values()
        raise CudaError(first.reason, "".join([first.detail, *(f"\nAlso: {problem}" for problem in others)]))
    if home := _home_of_environment(environ):
        raise CudaError("CUDA_HOME has no bin/nvcc", f": it is {home}.\nCorrect it, or unset it to look elsewhere too")
    folders = ", ".join(str(home) for home in _system_homes(torch_cuda))
    raise CudaError(
        "no nvcc was found",
        f" on PATH ({environ.get('PATH', '')}), in {folders} or in Python's nvidia packages, and CUDA_HOME is unset.\n"
        f"Install the toolkit of CUDA {torch_cuda} and set CUDA_HOME to it, or run\n    {nvcc_command(torch_cuda)}",
    )


def nvcc_command(torch_cuda: str) -> str:
    """How to get an nvcc for torch's CUDA without a toolkit of the system."""
    return "python -m pip install " + " ".join(f'"{package}"' for package in nvcc_packages(torch_cuda))


def nvcc_packages(torch_cuda: str) -> list[str]:
    """The packages that bring nvcc, the parts that it calls, and CUB. The rest of a toolkit comes with torch."""
    return [f"nvidia-{name}=={torch_cuda}.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl")]


def nvidia_packages(torch_cuda: str) -> tuple[Path, ...]:
    """The folders of Python's nvidia packages, which a torch with CUDA brings: cuBLAS, NCCL, the runtime and others."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    major = torch_cuda.split(".")[0]
    found = (path for folder in folders or () for path in sorted(Path(folder).iterdir()) if path.is_dir())
    # Leftovers of another CUDA lie beside them.
    return tuple(path for path in found if not re.fullmatch(r"cu\d+", path.name) or path.name == f"cu{major}")


def _candidates(torch_cuda: str, packages: tuple[Path, ...], environ: Mapping[str, str]) -> Iterator[Path]:
    if home := _home_of_environment(environ):
        folders = [Path(home) / "bin"]
    else:
        folders = [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
        folders += [home / "bin" for home in (*_system_homes(torch_cuda), *packages)]
    for folder in dict.fromkeys(folders):
        if found := shutil.which("nvcc", path=str(folder)):
            yield Path(found)


def _home_of_environment(environ: Mapping[str, str]) -> str:
    return environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or ""


def _system_homes(torch_cuda: str) -> list[Path]:
    return [Path(home.format(version=torch_cuda)) for home in SYSTEM_HOMES]


def _toolkit(nvcc: Path, torch_version: str, torch_cuda: str, packages: tuple[Path, ...]) -> Toolkit:
    version = _version_of(nvcc)
    major = version.split(".")[0]
    if major != torch_cuda.split(".")[0]:
        raise CudaError(
            f"nvcc is of CUDA {version}, torch {torch_version} of CUDA {torch_cuda}: the major versions must be equal",
            f" ({nvcc}). Set CUDA_HOME to a toolkit of CUDA {torch_cuda}, or install a torch for CUDA {major}",
        )
    home = _home_of(nvcc)
    library = f"libcudart.so.{major}"
    # The packages' own library first: it is the one that torch loads.
    folders = [package / "lib" for package in packages] + [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    library_dirs = tuple(str(folder) for folder in folders if (folder / library).exists())
    if not library_dirs:
        looked = ", ".join(map(str, folders))
        raise CudaError(f"there is no {library}", f" in {looked}. Install CUDA's runtime library")
    return Toolkit(home, version, _include_dirs(home, packages), library_dirs, library)


def _version_of(nvcc: Path) -> str:
    output = _run(nvcc, "--version")
    if match := re.search(r"release (\d+\.\d+)", output):
        return match[1]
    raise CudaError("nvcc does not tell its version", f": `{nvcc} --version` says {output.strip()[:500]!r}")


def _home_of(nvcc: Path) -> Path:
    """The toolkit that ``nvcc`` belongs to. ``nvcc`` may be a link, or a script that calls the real one elsewhere."""
    homes = [nvcc.parent.parent, nvcc.resolve().parent.parent]
    # The real one tells the folder that it was called in.
    output = _run(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull)
    if match := re.search(r"^#\$ _HERE_=(.+)$", output, re.MULTILINE):
        homes.append((Path(match[1].strip()) / "nvcc").resolve().parent.parent)
    for home in homes:
        if (home / "bin" / "nvcc").exists() and _own_include_dirs(home):
            return home.absolute()
    looked = ", ".join(map(str, dict.fromkeys(homes)))
    raise CudaError(
        "nvcc is outside of its toolkit",
        f": {nvcc} has no include/cuda_runtime.h beside it; looked in {looked}. Set CUDA_HOME to the toolkit",
    )


def _own_include_dirs(home: Path) -> list[Path]:
    return [path for path in (home / "include", *home.glob("targets/*/include")) if (path / "cuda_runtime.h").is_file()]


def _include_dirs(home: Path, packages: tuple[Path, ...]) -> tuple[str, ...]:
    # The toolkit first: its headers are of the same version as nvcc. It lacks those of cuBLAS and NCCL.
    folders = [*_own_include_dirs(home), *(package / "include" for package in packages)]
    found: dict[Path, Path] = {}
    for path in (path for folder in folders for path in (folder, folder / "cccl") if path.is_dir()):
        found.setdefault(path.resolve(), path)  # toolkits have links to their own folders
    # The compiler looks into /usr/include by itself, and must do so last.
    return tuple(str(path) for path in found.values() if path != Path("/usr/include"))


def _run(nvcc: Path, *arguments: str) -> str:
    try:
        result = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CudaError("nvcc cannot be run", f": {nvcc}: {error}") from error
    return result.stdout + result.stderr


# ---- architectures


def gencode_flags(toolkit: Toolkit, wish: str | None = None) -> list[str]:
    """nvcc's flags for the architectures of ``TORCH_CUDA_ARCH_LIST`` (or of ``wish``), or else of the default list.

    Raises CudaError that names what is no architecture, or none that this nvcc knows.
    """
    wish = os.environ.get("TORCH_CUDA_ARCH_LIST", "") if wish is None else wish
    wish = wish.strip() or DEFAULT_ARCHITECTURES
    known = _known_architectures(toolkit)
    flags = []
    for name in _architectures(wish):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
        if match is None or f"{match[1]}.{match[2]}" not in known:
            raise CudaError(
                f"TORCH_CUDA_ARCH_LIST={wish!r}: {name!r} is no architecture that nvcc {toolkit.version} knows. "
                f"It knows {', '.join(known)}, each with +PTX or without; the default is {DEFAULT_ARCHITECTURES!r}"
            )
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return list(dict.fromkeys(flags))


def _architectures(wish: str) -> Iterator[str]:
    for name in filter(None, re.split(r"[;,\s]+", wish)):
        yield from NAMED_ARCHITECTURES.get(name, name).split(";")


def _known_architectures(toolkit: Toolkit) -> list[str]:
    numbers = re.findall(r"^compute_(\d+)$", _run(toolkit.nvcc, "--list-gpu-arch"), re.MULTILINE)
    return [f"{number[:-1]}.{number[-1]}" for number in sorted(numbers, key=int)]


def _main(arguments: list[str]) -> int:
    match arguments:
        case ["home", torch_version, torch_cuda]:
            try:
                print(find_toolkit(torch_version, torch_cuda, os.environ).home)
            except CudaError as error:
                print(error, file=sys.stderr)
                return 1
        case ["packages", torch_cuda]:
            print(*nvcc_packages(torch_cuda))
        case ["architectures"]:
            print(*DEFAULT_ARCHITECTURES.replace("+PTX", "").split(";"))
        case _:
            usage = "cuda_toolkit.py {home TORCH_VERSION CUDA_OF_TORCH | packages CUDA_OF_TORCH | architectures}"
            print(f"usage: {usage}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
