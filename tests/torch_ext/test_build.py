"""What the build decides before a compiler runs."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest
import torch

import torch_ext
from torch_ext import build

PACKAGE = Path(build.__file__).parent
REPOSITORY = PACKAGE.parent


def test_every_cpp_file_is_built_once():
    assert build.sources() == sorted(
        (path for path in build.csrc_root().rglob("*.cpp") if "cuda" not in (path.parent.name, path.name[:4])),
        key=lambda path: (["cpu", "comm", "c10d", "context", "faces"].index(path.parent.name), path.name),
    )


def test_contraction_is_off_and_no_machine_is_asked_for():
    flags = build.CXX_FLAGS
    assert "-ffp-contract=off" in flags
    assert not any(flag.startswith(("-march", "-mfma", "-ffast-math", "-Ofast")) for flag in flags)


def test_a_build_for_this_machine_differs_in_instructions_alone():
    anywhere, here = build.recipe(), build.recipe(for_this_machine=True)
    assert [flag for flag in here.compile_flags if flag not in anywhere.compile_flags] == list(build.MACHINE_FLAGS)
    assert "-ffp-contract=off" in here.compile_flags
    assert ("CPU" in here.identity) == bool(build.MACHINE_FLAGS)
    assert here.digest() != anywhere.digest() or not build.MACHINE_FLAGS


def test_a_build_depends_on_torch_jaxlib_python_compiler_and_the_ffi(monkeypatch):
    identity = build.recipe().identity
    assert identity["torch"].startswith(f"{torch.__version__} (")
    assert identity["jaxlib"] == jaxlib.__version__
    assert identity["FFI API"] == torch_ext.build_info()["ffi_api"]
    assert identity["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert "compiler" in identity


def test_another_torch_is_another_build(monkeypatch):
    before = build.recipe().digest()
    tools = dataclasses.replace(build.toolchain(), torch_version="2.13.0+other")
    monkeypatch.setattr(build, "toolchain", lambda: tools)
    assert build.recipe().digest() != before


def test_any_source_or_header_changes_the_digest(tmp_path, monkeypatch):
    copy = tmp_path / "csrc"
    shutil.copytree(build.csrc_root(), copy)
    monkeypatch.setattr(build, "csrc_root", lambda: copy)
    digest = build.sources_digest()
    for name in ("core/exp.h", "faces/torch_ops.cpp", "cuda/control_kernels.cu"):
        path = copy / name if (copy / name).exists() else next((copy / "cuda").glob("*.cu"))
        path.write_text(path.read_text() + "\n")
        changed = build.sources_digest()
        assert changed != digest, path
        digest = changed


def test_everything_that_csrc_includes_of_its_own_is_digested():
    known = {path.relative_to(build.csrc_root()) for path in [*build.sources(with_cuda=True), *build.headers()]}
    there = {path.relative_to(build.csrc_root()) for path in build.csrc_root().rglob("*") if path.is_file()}
    assert there == known


def isolated(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter without site-packages: neither torch nor jax can be imported, as in an isolated build."""
    whole = [sys.executable, "-I", "-S", *command]
    return subprocess.run(whole, capture_output=True, text=True, check=False, **options)


# The package without its __init__, as setup.py has it.
STUB = f"""
import sys, types
package = sys.modules["torch_ext"] = types.ModuleType("torch_ext")
package.__path__ = [{str(PACKAGE)!r}]
"""


def test_the_list_of_sources_needs_neither_torch_nor_jax():
    result = isolated(["-c", f"{STUB}from torch_ext import build; assert build.sources()"])
    assert result.returncode == 0, result.stderr


def test_a_build_without_torch_ends_with_the_commands_to_use():
    result = isolated(["-c", f"{STUB}from torch_ext import build; build.recipe()"])
    assert f"{sys.executable} has no torch" in result.stderr
    assert build.REQUIREMENTS_COMMAND in result.stderr
    assert build.INSTALL_COMMAND in result.stderr


@pytest.mark.parametrize("file", ["setup.py", "pyproject.toml", "csrc/cpu/kernels.h", "csrc/faces/torch_ops.cpp"])
def test_a_source_distribution_has_what_a_build_needs(file, sdist_files):
    assert f"async_emb-0.1.0/{file}" in sdist_files


@pytest.fixture(scope="module")
def sdist_files(tmp_path_factory) -> list[str]:
    import tarfile

    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(REPOSITORY, copy, dirs_exist_ok=True, ignore=ignored)
    command = [sys.executable, "setup.py", "--quiet", "sdist"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (archive,) = (copy / "dist").iterdir()
    with tarfile.open(archive) as opened:
        return opened.getnames()
