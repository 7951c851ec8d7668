"""ninja and the compiler are found, or the error names what is missing, where it was looked for and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from torch_ext import build_tools, ninja_build
from torch_ext.build_errors import BuildError

from . import tiny_build


def first_line(environ: dict[str, str]) -> str:
    with pytest.raises(BuildError) as caught:
        build_tools.find_compiler(environ)
    return str(caught.value).splitlines()[0]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Neither the folder of the interpreter nor the package of ninja has it."""
    monkeypatch.setattr(build_tools, "search_path", lambda environ=None: str(tmp_path))
    monkeypatch.setattr(build_tools, "_folders_of_the_package", lambda: iter(()))
    return tmp_path


# ---- with an interpreter that was started by its full path (case B2)


def test_a_process_with_an_empty_path_builds(tmp_path):
    root = tiny_build.write_sources(tmp_path / "src")
    environ = {"PATH": "", "ASYNC_EMB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, tiny_build.__file__, str(root)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert '"number": 1' in result.stdout


def test_ninja_beside_the_interpreter_comes_first(monkeypatch, tmp_path):
    beside = tmp_path / "bin"
    beside.mkdir()
    ninja = script(beside / "ninja", "exit 1")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert build_tools.find_ninja({"PATH": ""}) == str(ninja)


def test_ninja_is_found_where_its_package_put_it(nowhere, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ninja = script(elsewhere / "ninja", "exit 1")
    monkeypatch.setattr(build_tools, "_folders_of_the_package", lambda: iter([str(elsewhere)]))
    assert build_tools.find_ninja() == str(ninja)


def test_without_ninja_the_error_names_it_the_path_and_the_command(nowhere):
    with pytest.raises(BuildError) as caught:
        build_tools.find_ninja()
    first, *rest = str(caught.value).splitlines()
    assert first == f"ninja, which runs the compilers, was not found. Searched: {nowhere}"
    assert rest[-1].strip() == "python -m pip install ninja"


def test_a_process_without_ninja_says_so_in_its_first_line(tmp_path):
    venv.create(tmp_path / "environment", symlinks=True, with_pip=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "c++").symlink_to(shutil.which("c++"))
    environ = {"PATH": str(tmp_path / "bin"), "ASYNC_EMB_CACHE": str(tmp_path / "cache")}
    python = tmp_path / "environment" / "bin" / "python"
    command = [python, tiny_build.__file__, str(tiny_build.write_sources(tmp_path / "src"))]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    first = result.stderr.splitlines()[0]
    assert first.startswith(f"ninja, which runs the compilers, was not found. Searched: {python.parent}{os.pathsep}")
    assert str(tmp_path / "bin") in first
    assert f"Install it for {python}:" in result.stderr


def test_the_package_of_ninja_says_where_its_program_is():
    if shutil.which("ninja", path=os.path.dirname(sys.executable)) is None:
        pytest.skip("ninja is not a package of this environment")
    assert os.path.realpath(os.path.dirname(sys.executable)) in [
        os.path.realpath(folder) for folder in build_tools._folders_of_the_package()
    ]


# ---- the compiler


def test_a_missing_compiler_of_the_variable_is_named_at_once(tmp_path):
    line = first_line({"CXX": str(tmp_path / "g++-99"), "PATH": "/usr/bin:/bin"})
    assert line.startswith(f"the C++ compiler of CXX='{tmp_path}/g++-99' was not found")
    assert "/usr/bin:/bin" in line


def test_a_process_with_a_missing_compiler_says_so_in_its_first_line(tmp_path):
    environ = os.environ | {"CXX": str(tmp_path / "missing"), "ASYNC_EMB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, tiny_build.__file__, str(tiny_build.write_sources(tmp_path / "src"))]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"CXX='{tmp_path}/missing' was not found" in result.stderr.splitlines()[0]
    assert not (tmp_path / "cache").exists()


def test_without_any_compiler_the_error_names_those_looked_for(tmp_path, nowhere):
    line = first_line({})
    assert line == f"no C++ compiler was found: none of c++, g++, clang++. Searched: {nowhere}"


def test_a_compiler_that_does_not_run_is_told_from_one_that_is_missing(tmp_path):
    broken = script(tmp_path / "broken", "echo 'cannot find libisl.so' >&2; exit 127")
    assert "does not run: " in first_line({"CXX": str(broken)})
    assert "ends with status 127, and says 'cannot find libisl.so'" in first_line({"CXX": str(broken)})
    broken.write_text("#!/bin/sh\nkill -SEGV $$\n")
    assert "is ended by SIGSEGV" in first_line({"CXX": str(broken)})
    broken.write_text("#!/nowhere/sh\n")
    assert "cannot be run: " in first_line({"CXX": str(broken)})


def test_the_variable_may_have_arguments(tmp_path):
    wrapper = script(tmp_path / "a wrapper", 'exec "$@"')
    compiler = build_tools.find_compiler({"CXX": f"'{wrapper}' g++ -pipe", "PATH": os.environ["PATH"]})
    assert compiler.command == (str(wrapper), "g++", "-pipe")
    assert "g++" in compiler.version
    assert first_line({"CXX": "'g++"}).startswith('CXX="\'g++" is no command')


# ---- a compiler that says yes


def test_a_compiler_that_makes_nothing_is_told_from_one_that_works(tmp_path):
    build_tools.require_working(build_tools.find_compiler().command, ("-std=c++20",))
    with pytest.raises(BuildError, match="says that all went well, but has made no file") as caught:
        build_tools.require_working(["/bin/true"])
    assert str(caught.value).startswith("the C++ compiler /bin/true says")


def test_a_compiler_that_cannot_do_what_is_asked_is_told_with_its_reason():
    compiler = build_tools.find_compiler().command
    with pytest.raises(BuildError, match=r"cannot make a library: it ends with status 1, and says: .*c\+\+1066"):
        build_tools.require_working(compiler, ("-std=c++1066",))


def test_a_build_with_a_compiler_that_makes_nothing_says_so_and_does_not_begin(tmp_path):
    environ = os.environ | {"CXX": "/bin/true", "ASYNC_EMB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, tiny_build.__file__, str(tiny_build.write_sources(tmp_path / "src"))]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("the C++ compiler /bin/true says that all went well, but has made no file")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_build_that_ends_well_without_a_module_is_an_error(tmp_path, monkeypatch):
    """One that works until it links what was asked for."""
    idle = script(tmp_path / "idle", 'case "$*" in *tiny.so*) exit 0 ;; esac\nexec c++ "$@"')
    monkeypatch.setenv("CXX", str(idle))
    recipe = tiny_build.tiny_recipe(tiny_build.write_sources(tmp_path / "src"))
    with pytest.raises(BuildError, match=rf"^building tiny.so with {idle} made nothing: all steps went well"):
        ninja_build.build(recipe, tmp_path / "build", lambda line: None)
