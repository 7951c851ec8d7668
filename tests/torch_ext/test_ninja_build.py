"""What ninja is told, and what is said of a build that fails."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from torch_ext import build_errors, build_lock, ninja_build
from torch_ext.build_errors import BuildError

from . import tiny_build

ODD_NAMES = ["with spaces", 'it\'s "quoted"', "ünïcödé 表", "$HOME;&`x`", "a:b#c%d", "-dash (paren) [x]*"]


def build(recipe, folder: Path, **options) -> Path:
    return ninja_build.build(recipe, folder, lambda line: None, **options)


def compiled(folder: Path) -> list[str]:
    """The sources that the last build in a folder compiled."""
    return (folder / ninja_build.STARTED).read_text().splitlines()


# ---- odd paths


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_path_is_built_from_and_into(tmp_path, name):
    root = tiny_build.write_sources(tmp_path / name / "src")
    (root / "tiny.cpp").rename(root / f"{name}.cpp")
    recipe = dataclasses.replace(tiny_build.tiny_recipe(root), sources=(root / f"{name}.cpp",))
    module = build(recipe, tmp_path / f"{name} build", keep_objects=False)
    assert tiny_build.number_of(module) == 1


@pytest.mark.parametrize("name", ["a\nb", "a|b"])
def test_a_path_that_ninja_cannot_read_is_refused_by_name(tmp_path, name):
    root = tiny_build.write_sources(tmp_path / name)
    with pytest.raises(BuildError, match=r"ninja cannot read a path with '(\\n|\|)' in it: '.*tiny.cpp'"):
        build(tiny_build.tiny_recipe(root), tmp_path / "build")


# ---- objects that are kept


def test_only_what_has_changed_is_compiled_again(tmp_path):
    root = tiny_build.write_sources(tmp_path / "s r c")
    folder = tmp_path / "build"
    recipe = tiny_build.tiny_recipe(root)
    module = build(recipe, folder)
    assert compiled(folder) == ["tiny.cpp"]
    build(recipe, folder)
    assert compiled(folder) == []
    tiny_build.write_sources(root, number=2)
    os.utime(root / "tiny.cpp", (1, 1))  # the header alone is newer
    build(recipe, folder)
    assert compiled(folder) == ["tiny.cpp"]
    assert tiny_build.number_of(module) == 2
    build(dataclasses.replace(recipe, compile_flags=(*recipe.compile_flags, "-DOTHER")), folder)
    assert compiled(folder) == ["tiny.cpp"]


def test_two_builds_of_one_folder_take_turns(tmp_path):
    root = tiny_build.write_sources(tmp_path / "src")
    folder = tmp_path / "build"
    folder.mkdir()
    holder = build_lock.try_lock(folder / ninja_build.LOCK)
    lines: list[str] = []

    def let_go(line: str) -> None:
        lines.append(line)
        os.close(holder)

    ninja_build.build(tiny_build.tiny_recipe(root), folder, let_go)
    assert len(lines) == 1
    assert lines[0].startswith(f"waiting for process {os.getpid()} on ")
    assert compiled(folder) == ["tiny.cpp"]


def test_a_tree_may_move_with_its_objects(tmp_path):
    tree = tmp_path / "one"
    tiny_build.write_sources(tree / "csrc")
    (tree / "setup.py").touch()
    build(tiny_build.tiny_recipe(tree / "csrc"), tree / "build" / "x")
    tree = tree.rename(tmp_path / "two")
    build(tiny_build.tiny_recipe(tree / "csrc"), tree / "build" / "x")
    assert compiled(tree / "build" / "x") == []


def test_flags_of_one_source_are_no_flags_of_others(tmp_path):
    root = tiny_build.write_sources(tmp_path / "src")
    (root / "other.cpp").write_text("#ifdef ONLY\n#error in both\n#endif\n")
    recipe = dataclasses.replace(
        tiny_build.tiny_recipe(root),
        sources=(root / "tiny.cpp", root / "other.cpp"),
        source_flags={root / "tiny.cpp": ("-DONLY='a b'",)},
    )
    build(recipe, tmp_path / "build")


def test_headers_from_elsewhere_are_copied_once(tmp_path):
    header = tmp_path / "elsewhere.h"
    header.write_text("#pragma once\n")
    root = tiny_build.write_sources(tmp_path / "src")
    recipe = dataclasses.replace(tiny_build.tiny_recipe(root), generated={"other/name.h": header})
    ninja_build.prepare(recipe, tmp_path / "build")
    copy = tmp_path / "build" / "include" / "other" / "name.h"
    os.utime(copy, (1, 1))
    ninja_build.prepare(recipe, tmp_path / "build")
    assert copy.stat().st_mtime == 1
    header.write_text("#pragma once\n#define NEW\n")
    ninja_build.prepare(recipe, tmp_path / "build")
    assert copy.read_text() == header.read_text()


def test_cuda_sources_go_to_nvcc_with_the_same_compiler_behind_it(tmp_path):
    root = tmp_path / "src"
    recipe = dataclasses.replace(
        tiny_build.tiny_recipe(root),
        sources=(root / "a.cpp", root / "b.cu"),
        nvcc="/toolkit/bin/nvcc",
        nvcc_flags=("-gencode=arch=compute_90,code=sm_90",),
    )
    text = ninja_build.ninja_text(recipe, tmp_path / "build")
    assert f"build objects/b.cu.o: cuda {root}/b.cu" in text
    assert f"build objects/a.cpp.o: cxx {root}/a.cpp" in text
    (command,) = (line for line in text.splitlines() if "/toolkit/bin/nvcc" in line)
    assert f"nvcc -ccbin {recipe.compiler[0]} -Xcompiler=-fPIC -I{root} -gencode=arch=compute_90,code=sm_90" in command


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_more_compilers_run_than_the_user_wants(tmp_path, monkeypatch, jobs):
    monkeypatch.setenv("MAX_JOBS", str(jobs))
    monkeypatch.setenv("CXX", str(tiny_build.write_compiler(tmp_path)))
    (tmp_path / "closed").touch()
    root = tiny_build.write_sources(tmp_path / "src")
    sources = [root / f"{number}.cpp" for number in range(4)]
    for source in sources:
        source.touch()
    recipe = dataclasses.replace(tiny_build.tiny_recipe(root), sources=tuple(sources))
    seen = []

    def look(line: str) -> None:
        seen.append((tmp_path / "compilations").read_text().split() if (tmp_path / "compilations").exists() else [])
        if len(seen) > 10 and len(seen[-1]) == len(seen[-6]):  # all that start have started
            (tmp_path / "closed").unlink(missing_ok=True)

    ninja_build.build(recipe, tmp_path / "build", look, interval=0.05)
    stopped = [len(pids) for pids in seen[:11]]
    assert stopped[-1] == jobs


# ---- errors


def test_the_first_line_of_a_failure_has_the_compilers_first_error(tmp_path):
    root = tiny_build.write_sources(tmp_path / "src")
    (root / "tiny.cpp").write_text('#warning "noise"\nint number = one;\nint other = two;\n')
    log = tmp_path / "kept.log"
    with pytest.raises(BuildError) as caught:
        build(tiny_build.tiny_recipe(root), tmp_path / "build", log=log)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("building tiny.so with ")
    assert f"failed: {root}/tiny.cpp:2:14: error: 'one' was not declared in this scope" in first
    assert rest[-1] == f"All of the output is in {log}"
    assert "tiny.cpp:3:13: error: 'two'" in log.read_text()
    assert not any(line.strip().startswith(("echo", str(tiny_build.tiny_recipe(root).compiler[0]))) for line in rest)


def test_a_file_that_the_linker_misses_is_named(tmp_path):
    root = tiny_build.write_sources(tmp_path / "src")
    recipe = dataclasses.replace(tiny_build.tiny_recipe(root), link_flags=("-lno_such_library",))
    with pytest.raises(BuildError) as caught:
        build(recipe, tmp_path / "build")
    assert "cannot find -lno_such_library" in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("[1/2] compiled a\nFAILED: x\ng++ error: y.cpp\nx.h:1:2: fatal error: no y\n", "x.h:1:2: fatal error: no y"),
        ("x.cu(7): error: identifier\n1 error detected\n", "x.cu(7): error: identifier"),
        ("nvcc fatal   : Unsupported gpu architecture\n", "nvcc fatal   : Unsupported gpu architecture"),
        ("ld: x.o: undefined reference to `f()'\ncollect2: error: ld returned 1\n", "undefined reference to `f()'"),
        ("/bin/sh: 1: g++: not found\nninja: build stopped\n", "/bin/sh: 1: g++: not found"),
        ("something else\n", "something else"),
        ("", "no output"),
    ],
)
def test_the_first_error_is_found_in_the_output(output, expected):
    assert build_errors.first_error(output).endswith(expected)


def test_a_compiler_killed_for_memory_is_told_from_an_error_of_ours():
    output = "a.cpp:1:1: error: x\ng++: fatal error: Killed signal terminated program cc1plus\n"
    error = build_errors.compilation_error("building", output, "log")
    assert "Killed signal" in str(error).splitlines()[0]
    assert str(error).endswith("Run it again with MAX_JOBS=1")
