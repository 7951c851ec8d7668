"""The programs that a build runs: ninja and the C++ compiler, found before anything is compiled."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from torch_ext.build_errors import BuildError, first_error

COMPILERS = ("c++", "g++", "clang++")
NINJA_COMMAND = "python -m pip install ninja"
COMPILER_COMMAND = "apt-get install g++    (dnf install gcc-c++, conda install -c conda-forge cxx-compiler)"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that has been run."""

    command: tuple[str, ...]  # the program, by its full path, and arguments that CXX has beside it
    version: str  # the first line of what it says of itself


def search_path(environ: Mapping[str, str] | None = None) -> str:
    """PATH, with the folders where ninja's package puts its program.

    Without an activated environment the folder of the interpreter is not on PATH. An empty PATH would leave out the
    compiler too, so the system's default stands for it.
    """
    path = (os.environ if environ is None else environ).get("PATH", "") or os.defpath
    beside = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    return os.pathsep.join(dict.fromkeys(filter(None, [*beside, *path.split(os.pathsep)])))


def find_ninja(environ: Mapping[str, str] | None = None) -> str:
    """The path of ninja: beside the interpreter, on PATH, or where its package is installed.

    Raises BuildError that names the folders searched, and the command that installs it.
    """
    path = search_path(environ)
    for folder in (path, *_folders_of_the_package()):
        if found := shutil.which("ninja", path=folder):
            return found
    raise BuildError(
        f"ninja, which runs the compilers, was not found. Searched: {path}\nInstall it for {sys.executable}:\n"
        f"    {NINJA_COMMAND}"
    )


def find_compiler(environ: Mapping[str, str] | None = None) -> Compiler:
    """The compiler that ``CXX`` names, which may have arguments, or else the first of COMPILERS on PATH.

    Raises BuildError that names the compiler, what is wrong with it and the folders searched.
    """
    environ = os.environ if environ is None else environ
    path = search_path(environ)
    wish = environ.get("CXX", "").strip()
    try:
        program, *arguments = shlex.split(wish) if wish else _first_of(COMPILERS, path)
    except ValueError as error:
        raise BuildError(f"CXX={wish!r} is no command: {error}") from error
    named = f"CXX={wish!r}" if wish else program
    found = shutil.which(program, path=path)
    if found is None:
        raise BuildError(
            f"the C++ compiler of {named} was not found: there is no program {program!r}. Searched: {path}\n"
            "Correct CXX, or unset it to take the first of " + ", ".join(COMPILERS)
        )
    return Compiler((found, *arguments), _version(found, arguments, named))


def _first_of(names: tuple[str, ...], path: str) -> list[str]:
    for name in names:
        if found := shutil.which(name, path=path):
            return [found]
    raise BuildError(
        f"no C++ compiler was found: none of {', '.join(names)}. Searched: {path}\n"
        f"Set CXX to one, or install one:\n    {COMPILER_COMMAND}"
    )


def _version(program: str, arguments: list[str], named: str) -> str:
    command = [program, *arguments, "--version"]
    result = _run(command, named)
    if result.returncode or not result.stdout.strip():
        said = (result.stderr or result.stdout).strip()[:500]
        raise BuildError(
            f"the C++ compiler of {named} does not run: `{shlex.join(command)}` {_ending(result.returncode)}, and says "
            f"{said!r}"
        )
    return result.stdout.splitlines()[0].strip()


def require_working(command: Sequence[str], flags: Sequence[str] = ()) -> None:
    """Has the compiler make a small library, as it will make the module. Raises BuildError if there is none then.

    Args:
      command: the compiler, with its own arguments.
      flags: those of the build.
    """
    named = shlex.join(command)
    with tempfile.TemporaryDirectory(prefix="async-emb-") as folder:
        source, library = Path(folder, "tried.cpp"), Path(folder, "tried.so")
        source.write_text('extern "C" int tried() { return 1; }\n')
        result = _run([*command, "-shared", "-fPIC", *flags, str(source), "-o", str(library)], named)
        if result.returncode:
            said = first_error(result.stderr + result.stdout)
            raise BuildError(
                f"the C++ compiler {named} cannot make a library: it {_ending(result.returncode)}, and says: {said}\n"
                "A compiler for C++20 with its standard library and linker is needed: set CXX to one, or install one:\n"
                f"    {COMPILER_COMMAND}"
            )
        if not library.is_file() or not library.stat().st_size:
            raise BuildError(
                f"the C++ compiler {named} says that all went well, but has made no file: it is none, or one that "
                "something stands in for\nSet CXX to a C++ compiler, or unset it to take the first of "
                + ", ".join(COMPILERS)
            )


def _run(command: Sequence[str], named: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PATH": search_path(), "LC_ALL": "C"},  # as the build calls it
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler of {named} cannot be run: {error}") from error


def _ending(status: int) -> str:
    return f"ends with status {status}" if status >= 0 else f"is ended by {signal.Signals(-status).name}"


def _folders_of_the_package() -> Iterator[str]:
    """Where ninja's package has put its program: with --user or --target, that is in neither place."""
    try:
        files = metadata.distribution("ninja").files or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "ninja":
            yield str(Path(str(file.locate())).resolve().parent)
