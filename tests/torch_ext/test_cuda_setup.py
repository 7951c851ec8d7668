"""What setup.py compiles, with a torch of the test's, and compilers that only write down how they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ext import build

from .fake_toolkit import CPU_TORCH, CUDA_TORCH, make_toolkit

REPOSITORY = Path(build.__file__).parent.parent

TORCH_VERSION = "__version__ = {version!r}\ncuda = {cuda!r}\n"
COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "a compiler that only takes notes"; exit ;; esac
printf '%s\\n' "${0##*/}" "$@" >"$RECORD/$$"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && echo made >"$2"
  shift
done
"""


@pytest.fixture
def toolkit(tmp_path) -> Path:
    return make_toolkit(tmp_path / "cuda-13.0", "13.0")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    for folder in ("torch_ext", "csrc"):
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (copy / "csrc" / "cuda" / "planted.cu").touch()
    (copy / "csrc" / "faces" / "cuda_planted.cpp").touch()
    return copy


class Record:
    """What was compiled: arguments by source, and how it was linked."""

    def __init__(self, folder: Path) -> None:
        commands = [path.read_text().splitlines() for path in folder.iterdir()]
        self.compiled = {os.path.relpath(c[c.index("-c") + 1], ".."): c for c in commands if "-c" in c}
        # The library that a build makes first, to see whether the compiler works, comes from a source at once.
        self.linked = [c for c in commands if "-c" not in c and any(argument.endswith(".o") for argument in c)]
        self.text = str(commands)

    def of(self, source: str) -> list[str]:
        (command,) = (command for name, command in self.compiled.items() if name.endswith(source))
        return command


@pytest.fixture
def setup(checkout, tmp_path):
    """Runs `setup.py build_ext` with a torch of the test's; gives the process, and what was compiled."""

    def run(version: str, cuda: str | None, **environ: str) -> tuple[subprocess.CompletedProcess[str], Record | None]:
        modules = tmp_path / "modules"
        files = {
            "torch/__init__.py": "raise AssertionError('a build imports torch')",
            "torch/version.py": TORCH_VERSION.format(version=version, cuda=cuda),
            "torch/include/ATen/ATen.h": "",
            "torch/include/ATen/dlpack.h": "",
            "jaxlib/__init__.py": "raise AssertionError('a build imports jaxlib')",
            "jaxlib/include/xla/ffi/api/c_api.h": "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 3\n",
        }
        for name, text in files.items():
            (modules / name).parent.mkdir(parents=True, exist_ok=True)
            (modules / name).write_text(text)
        record = tmp_path / "record"
        shutil.rmtree(record, ignore_errors=True)
        record.mkdir()
        shutil.rmtree(checkout / "build", ignore_errors=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNC_EMB", "CUDA"))}
        inherited.pop("TORCH_CUDA_ARCH_LIST", None)
        own = {"PYTHONPATH": str(modules), "RECORD": str(record), "CXX": str(note_taker(tmp_path / "c++"))}
        result = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")],
            cwd=checkout,
            env=inherited | own | environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return result, Record(record) if any(record.iterdir()) else None

    return run


def note_taker(path: Path) -> Path:
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def let_nvcc_take_notes(toolkit: Path) -> None:
    """Its nvcc answers questions, and refuses to compile; now what it is to compile is written down."""
    nvcc = toolkit / "bin" / "nvcc"
    refusal = 'echo "the compiler was started: $*" >&2; exit 1'
    assert refusal in nvcc.read_text()
    (toolkit / "notes").mkdir()
    nvcc.write_text(nvcc.read_text().replace(refusal, f'{note_taker(toolkit / "notes" / "nvcc")} "$@"'))


def test_setup_builds_cuda_where_torch_and_the_machine_have_it(setup, toolkit, tmp_path):
    let_nvcc_take_notes(toolkit)
    result, record = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(toolkit))
    assert result.returncode == 0, result.stderr
    cuda = record.of("csrc/cuda/planted.cu")
    assert cuda[:3] == ["nvcc", "-ccbin", str(tmp_path / "c++")]
    assert "-gencode=arch=compute_90,code=sm_90" in cuda
    assert set(build.NVCC_FLAGS) <= set(cuda)
    cxx = record.of("csrc/faces/cuda_planted.cpp")
    assert {"-DASYNC_EMB_WITH_CUDA=1", '-DASYNC_EMB_CUDA_VERSION="13.0"', f"-isystem{toolkit}/include"} <= set(cxx)
    assert "-l:libcudart.so.13" in record.linked[0]
    assert f"-L{toolkit}/lib64" in record.linked[0]
    assert (tmp_path / "lib" / "torch_ext" / build.module_file_name()).read_text() == "made\n"


def test_setup_names_a_nonsense_architecture_and_compiles_nothing(setup, toolkit):
    result, record = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST="9.0;banana")
    assert result.returncode != 0
    assert "error: TORCH_CUDA_ARCH_LIST='9.0;banana': 'banana' is no architecture" in result.stderr
    assert record is None


def test_setup_fails_with_the_reason_if_cuda_is_forced(setup, toolkit, tmp_path):
    result, record = setup(CPU_TORCH, None, CUDA_HOME=str(toolkit), ASYNC_EMB_CUDA="1")
    assert (result.returncode != 0, record) == (True, None)
    assert f"error: ASYNC_EMB_CUDA=1 asks for CUDA, but torch {CPU_TORCH} is a build without CUDA" in result.stderr
    older = make_toolkit(tmp_path / "cuda-12.4", "12.4")
    result, record = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(older), ASYNC_EMB_CUDA="1")
    assert (result.returncode != 0, record) == (True, None)
    assert f"nvcc is of CUDA 12.4, torch {CUDA_TORCH} of CUDA 13.0" in result.stderr


def test_setup_warns_of_another_minor_version_and_builds(setup, tmp_path):
    home = make_toolkit(tmp_path / "cuda-13.2", "13.2")
    let_nvcc_take_notes(home)
    result, record = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(home), ASYNC_EMB_CUDA="1")
    assert result.returncode == 0, result.stderr
    assert "async-emb: nvcc is of CUDA 13.2" in result.stderr
    assert record.of("csrc/cuda/planted.cu")[0] == "nvcc"


def test_setup_builds_for_cpus_without_nvcc_and_stamps_why(setup, tmp_path):
    result, record = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "async-emb: building without CUDA, because CUDA_HOME has no bin/nvcc" in result.stderr
    assert '-DASYNC_EMB_CUDA_REASON="CUDA_HOME has no bin/nvcc"' in record.of("csrc/faces/module.cpp")
    assert len(record.compiled) == len(build.sources())


def test_setup_for_cpus_has_no_word_of_cuda(setup):
    result, record = setup(CPU_TORCH, None)
    assert result.returncode == 0, result.stderr
    assert "cuda" not in (result.stdout + result.stderr + record.text).lower()


def test_the_digest_of_the_sources_is_in_the_one_file_that_has_the_stamp(setup, checkout):
    _, record = setup(CPU_TORCH, None)
    stamped = [name for name, command in record.compiled.items() if "-DASYNC_EMB_SOURCES=" in " ".join(command)]
    assert len(stamped) == 1
    assert stamped[0].endswith(build.STAMP_SOURCE)
