"""What setup.py hands to torch to build, with a torch that only writes it down."""

from __future__ import annotations

import json
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
CPP_EXTENSION = """\
import json, os
from pathlib import Path
from setuptools.command.build_ext import build_ext

CUDA_HOME = "a guess"
FOLDER = Path(__file__).parent

def include_paths():
    return [str(FOLDER)]

def library_paths():
    return [str(FOLDER)]

class BuildExtension(build_ext):
    @classmethod
    def with_options(cls, **options):
        return cls

    def run(self):
        (extension,) = self.extensions
        record = vars(extension) | {"CUDA_HOME": CUDA_HOME, "build_temp": self.build_temp}
        Path(os.environ["RECORD"]).write_text(json.dumps(record, default=str))
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


@pytest.fixture
def setup(checkout, tmp_path):
    """Runs `setup.py build_ext` with a torch of the test's; gives the process, and what torch was to build."""

    def run(version: str, cuda: str | None, **environ: str) -> tuple[subprocess.CompletedProcess[str], dict | None]:
        modules = tmp_path / "modules"
        files = {
            "torch/__init__.py": "",
            "torch/version.py": TORCH_VERSION.format(version=version, cuda=cuda),
            "torch/utils/__init__.py": "",
            "torch/utils/cpp_extension.py": CPP_EXTENSION,
            "torch/utils/ATen/dlpack.h": "",
            "jax/__init__.py": "",
            "jax/ffi.py": "def include_dir():\n    return 'ffi'\n",
        }
        for name, text in files.items():
            (modules / name).parent.mkdir(parents=True, exist_ok=True)
            (modules / name).write_text(text)
        record = tmp_path / "record.json"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNC_EMB", "CUDA"))}
        inherited.pop("TORCH_CUDA_ARCH_LIST", None)
        result = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")],
            cwd=checkout,
            env=inherited | {"PYTHONPATH": str(modules), "RECORD": str(record)} | environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return result, json.loads(record.read_text()) if record.exists() else None

    return run


def test_setup_builds_cuda_where_torch_and_the_machine_have_it(setup, toolkit):
    result, extension = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(toolkit))
    assert result.returncode == 0, result.stderr
    assert {"csrc/cuda/planted.cu", "csrc/faces/cuda_planted.cpp"} <= set(extension["sources"])
    assert ["ASYNC_EMB_WITH_CUDA", "1"] in extension["define_macros"]
    assert ["ASYNC_EMB_CUDA_VERSION", '"13.0"'] in extension["define_macros"]
    nvcc = extension["extra_compile_args"]["nvcc"]
    assert "-gencode=arch=compute_90,code=sm_90" in nvcc
    assert set(build.NVCC_FLAGS) <= set(nvcc)
    assert f"-isystem{toolkit}/include" in extension["extra_compile_args"]["cxx"]
    assert extension["CUDA_HOME"] == str(toolkit)
    assert "native-cuda" in extension["build_temp"]


def test_setup_names_a_nonsense_architecture_and_compiles_nothing(setup, toolkit):
    result, extension = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST="9.0;banana")
    assert result.returncode != 0
    assert "error: TORCH_CUDA_ARCH_LIST='9.0;banana': 'banana' is no architecture" in result.stderr
    assert extension is None


def test_setup_fails_with_the_reason_if_cuda_is_forced(setup, toolkit, tmp_path):
    result, extension = setup(CPU_TORCH, None, CUDA_HOME=str(toolkit), ASYNC_EMB_CUDA="1")
    assert (result.returncode != 0, extension) == (True, None)
    assert f"error: ASYNC_EMB_CUDA=1 asks for CUDA, but torch {CPU_TORCH} is a build without CUDA" in result.stderr
    older = make_toolkit(tmp_path / "cuda-12.4", "12.4")
    result, extension = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(older), ASYNC_EMB_CUDA="1")
    assert (result.returncode != 0, extension) == (True, None)
    assert f"nvcc is of CUDA 12.4, torch {CUDA_TORCH} of CUDA 13.0" in result.stderr


def test_setup_warns_of_another_minor_version_and_builds(setup, tmp_path):
    home = make_toolkit(tmp_path / "cuda-13.2", "13.2")
    result, extension = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(home), ASYNC_EMB_CUDA="1")
    assert result.returncode == 0, result.stderr
    assert "async-emb: nvcc is of CUDA 13.2" in result.stderr
    assert "csrc/cuda/planted.cu" in extension["sources"]


def test_setup_builds_for_cpus_without_nvcc_and_stamps_why(setup, tmp_path):
    result, extension = setup(CUDA_TORCH, "13.0", CUDA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "async-emb: building without CUDA, because CUDA_HOME has no bin/nvcc" in result.stderr
    assert ["ASYNC_EMB_CUDA_REASON", '"CUDA_HOME has no bin/nvcc"'] in extension["define_macros"]
    assert extension["sources"] == [os.path.relpath(path, REPOSITORY) for path in build.sources()]


def test_setup_for_cpus_has_no_word_of_cuda(setup):
    result, extension = setup(CPU_TORCH, None)
    assert result.returncode == 0, result.stderr
    assert "cuda" not in (result.stdout + result.stderr).lower()
    extension.pop("CUDA_HOME")
    assert "cuda" not in json.dumps(extension).lower()
