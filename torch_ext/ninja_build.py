"""Writes a recipe down in ninja's language, and runs it: every build of the native module goes through here.

``setup.py``, the build at first use, copies with a sanitizer and the check of the CUDA build differ in their recipe and
in the folder alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from torch_ext.build_errors import BuildError, compilation_error
from torch_ext.build_jobs import parallel_jobs
from torch_ext.build_lock import locked
from torch_ext.build_tools import find_ninja, require_working, search_path
from torch_ext.recipe import Recipe

NINJA_FILE = "build.ninja"
LOG = "build.log"
LOCK = "build.lock"
STARTED = "started"  # the sources whose compilation has started, one a line
INCLUDE = "include"  # what the build itself generates, below its folder
REPORT_SECONDS = 5.0

# ninja ends its compilers when it is told to end. It is told so, by the system, when the process that started it dies:
# a build that nobody waits for must not go on.
_NINJA_THAT_DIES_WITH_ITS_PARENT = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_STATUS = re.compile(r"^\[(\d+)/(\d+)\] (.*)$", re.MULTILINE)


def build(
    recipe: Recipe,
    folder: Path,
    report: Callable[[str], None],
    *,
    keep_objects: bool = True,
    log: Path | None = None,
    interval: float = REPORT_SECONDS,
) -> Path:
    """Makes the module of a recipe.

    Args:
      folder: where it is made; created if missing. Objects of an earlier build in it are used where nothing changed.
      report: is given a line on what is being built, every few seconds.
      keep_objects: whether the folder will be built in again; if not, nothing is written down about included headers.
      log: where to keep the output of a build that failed; ``build.log`` of the folder if None.
      interval: seconds between two lines.

    Returns the path of the module. Raises BuildError: a tool is missing, or the compiler found an error.
    """
    ninja, jobs = require_tools(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, report):  # two builds of one checkout would write the same objects
        prepare(recipe, folder, keep_objects=keep_objects)
        status = _run([ninja, "-f", NINJA_FILE, "-j", str(jobs)], folder, report, interval)
        if status:
            if log is not None:
                shutil.copyfile(folder / LOG, log)
            raise failure(recipe, _text(folder / LOG), log or folder / LOG)
    module = folder / recipe.module
    if not module.is_file() or not module.stat().st_size:
        compiler = shlex.join(recipe.compiler)
        raise BuildError(
            f"building {recipe.module} with {compiler} made nothing: all steps went well, but {module} is not there"
        )
    return module


def require_tools(recipe: Recipe) -> tuple[str, int]:
    """ninja, and how many compilers it is to run. Raises BuildError where one of the tools cannot serve."""
    ninja, jobs = find_ninja(), parallel_jobs()
    require_working(recipe.compiler, recipe.compile_flags)
    return ninja, jobs


def _run(command: Sequence[str], folder: Path, report: Callable[[str], None], interval: float) -> int:
    """Runs ninja, and reports; returns its exit status."""
    (folder / STARTED).write_text("")
    began = time.monotonic()
    with (folder / LOG).open("wb") as file, _running(command, folder, file) as process:
        while True:
            try:
                return process.wait(timeout=interval)
            except subprocess.TimeoutExpired:
                report(_progress(_text(folder / LOG), _text(folder / STARTED), time.monotonic() - began))


def failure(recipe: Recipe, output: str, log: Path) -> BuildError:
    """The error of a build that failed with this output, which is kept in ``log``."""
    return compilation_error(f"building {recipe.module} with {shlex.join(recipe.compiler)}", output, str(log))


def prepare(recipe: Recipe, folder: Path, *, keep_objects: bool = True) -> None:
    """Writes what ninja needs into the folder: its file, and the headers that the recipe has from elsewhere."""
    for name, source in recipe.generated.items():
        copy_if_different(source, folder / INCLUDE / name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NINJA_FILE).write_text(ninja_text(recipe, folder, keep_objects=keep_objects), encoding="utf-8")


def ninja_text(recipe: Recipe, folder: Path, *, keep_objects: bool = True) -> str:
    """The recipe in ninja's language, for a ninja that runs in ``folder``: an object a source, then the module."""
    # Before they are part of a command: ninja would see a command that ends.
    paths = {source: _path(_seen_from(folder, source)) for source in recipe.sources}
    root = _seen_from(folder, recipe.root)
    compiler = list(recipe.compiler)
    # Behind ccache and the like.
    host_compiler = ["-ccbin", [word for word in compiler if not word.startswith("-")][-1]]
    gcc_dependencies = " -MMD -MF $out.d" if keep_objects else ""
    nvcc_dependencies = " --generate-dependencies-with-compile --dependency-output $out.d" if keep_objects else ""
    compile_cxx = _shell([*compiler, "-fPIC", f"-I{root}", *recipe.compile_flags])
    compile_cuda = _shell([recipe.nvcc, *host_compiler, "-Xcompiler=-fPIC", f"-I{root}", *recipe.nvcc_flags])
    link = _shell([*compiler, "-shared"])
    remember = ["  depfile = $out.d", "  deps = gcc"] if keep_objects else []

    lines = ["ninja_required_version = 1.5", ""]
    note = f"echo $quoted >>{STARTED} && "
    lines += ["rule cxx", f"  command = {note}{compile_cxx} $more{gcc_dependencies} -c $in -o $out"]
    lines += ["  description = compiled $name", *remember, ""]
    if recipe.nvcc:
        lines += ["rule cuda", f"  command = {note}{compile_cuda} $more{nvcc_dependencies} -c $in -o $out"]
        lines += ["  description = compiled $name", *remember, ""]
    lines += [
        "rule link",
        f"  command = {link} $in {_shell(recipe.link_flags)} -o $out",
        "  description = linked $out",
        "",
    ]

    objects = []
    for source in recipe.sources:
        name = source.relative_to(recipe.root).as_posix()
        objects.append(f"objects/{name}.o")
        rule = "cuda" if source.suffix == ".cu" else "cxx"
        lines += [f"build {_path(objects[-1])}: {rule} {paths[source]}", f"  name = {_escape(name)}"]
        lines.append(f"  quoted = {_shell([name])}")
        if flags := recipe.source_flags.get(source):
            lines.append(f"  more = {_shell(flags)}")
    lines += ["", f"build {_path(recipe.module)}: link {' '.join(map(_path, objects))}"]
    return "\n".join(lines) + "\n"


def copy_if_different(source: Path, target: Path) -> None:
    """Copies a file. An equal one keeps its time of writing, for which objects would be compiled again."""
    if not target.is_file() or target.read_bytes() != source.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


class _running:
    """Starts ninja; ends it, and with it its compilers, if the block ends before it does."""

    def __init__(self, command: Sequence[str], folder: Path, output: IO[bytes]) -> None:
        # Messages in English, whose errors we look for. A group of its own: Ctrl-C reaches us alone, and we end it.
        environ = os.environ | {"PATH": search_path(), "LC_ALL": "C", "NINJA_STATUS": "[%f/%t] "}
        child = [sys.executable, "-I", "-S", "-c", _NINJA_THAT_DIES_WITH_ITS_PARENT, str(os.getpid()), *command]
        if not sys.executable:  # Python inside of another program
            child = list(command)
        self._process = subprocess.Popen(
            child,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _progress(output: str, started: str, seconds: float) -> str:
    finished, of = 0, ""
    under_way = dict.fromkeys(started.splitlines())
    for match in _STATUS.finditer(output):
        finished, of = int(match[1]), f" of {match[2]}"
        under_way.pop(match[3].split(" ", 1)[-1], None)
    return f"{seconds:.0f} s: {finished}{of} steps done, now {', '.join(under_way) or 'linking'}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _seen_from(folder: Path, path: Path) -> str:
    """A relative path within one tree, so that a tree and the objects in it can move together."""
    tree = path.anchor
    for parent in path.parents:
        if (parent / "setup.py").is_file():
            tree = str(parent)
            break
    inside = folder.is_relative_to(tree) and tree != path.anchor
    return os.path.relpath(path, folder) if inside else str(path)


def _shell(arguments: Sequence[str]) -> str:
    """Arguments of a command, for the shell that ninja calls, in ninja's language."""
    return _escape(shlex.join(arguments))


def _path(path: str) -> str:
    """A path of a build statement, in ninja's language, which has no way to write these two."""
    if refused := [character for character in "\n|" if character in path]:
        raise BuildError(f"ninja cannot read a path with {refused[0]!r} in it: {path!r}. Rename the folder")
    return _escape(path).replace(" ", "$ ").replace(":", "$:")


def _escape(text: str) -> str:
    return text.replace("$", "$$")
