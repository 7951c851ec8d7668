"""What the build decides before a compiler runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ext import build

CONFIG_FILE = Path(build.__file__)
REPOSITORY = CONFIG_FILE.parent.parent


def test_every_cpp_file_is_built_once():
    assert build.sources() == sorted(
        (path for path in build.csrc_root().rglob("*.cpp") if path.parent.name != "cuda"),
        key=lambda path: (["cpu", "comm", "c10d", "context", "faces"].index(path.parent.name), path.name),
    )


def test_contraction_is_off_and_no_machine_is_asked_for():
    flags = build.CXX_FLAGS
    assert "-ffp-contract=off" in flags
    assert not any(flag.startswith(("-march", "-mfma", "-ffast-math", "-Ofast")) for flag in flags)


def test_ninja_is_found_with_an_empty_path(monkeypatch):
    monkeypatch.setenv("PATH", "")
    path = build.build_environment()["PATH"]
    assert shutil.which("ninja", path=path)
    assert shutil.which("sh", path=path)


def test_jobs_are_bounded_by_memory(monkeypatch):
    monkeypatch.setattr(build, "_available_memory_bytes", lambda: 3 * 1024**3)
    assert build.parallel_jobs() == 1
    monkeypatch.setattr(build, "_available_memory_bytes", lambda: 0)
    assert build.parallel_jobs() == 1
    monkeypatch.setattr(build, "_available_memory_bytes", lambda: 2**50)
    assert build.parallel_jobs() == len(os.sched_getaffinity(0))


def test_the_users_number_of_jobs_wins(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "7")
    assert "MAX_JOBS" not in build.build_environment()


def isolated(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in this interpreter without site-packages: neither torch nor jax can be imported."""
    load = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('config', {str(CONFIG_FILE)!r})\n"
        "config = sys.modules['config'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(config)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", load + script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_list_of_sources_needs_neither_torch_nor_jax():
    result = isolated("assert config.sources()")
    assert result.returncode == 0, result.stderr


def test_a_build_without_torch_ends_with_the_commands_to_use():
    result = isolated("config.toolchain()")
    assert "torch cannot be imported" in result.stderr
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
