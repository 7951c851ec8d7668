"""`make gpu-test` skips with a reason where there is no GPU, and never passes empty where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `make gpu-test`")


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, check=False)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine_with_a_gpu(tmp_path) -> str:
    """A PATH on which nvidia-smi lists a GPU."""
    script(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'")
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def test_without_a_gpu_the_suite_is_skipped_and_counted():
    result = run(["tests/gpu/run.sh"], PYTHON=sys.executable)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "GPU suite: 0 passed, " in result.stdout
    assert f" skipped: torch {torch.__version__} " in result.stdout


def test_without_a_gpu_an_interpreter_without_torch_will_do(tmp_path):
    bare = script(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    result = run(["tests/gpu/run.sh"], PYTHON=str(bare))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 passed, " in result.stdout
    assert " skipped: there is no GPU, and " in result.stdout


def test_with_a_gpu_a_torch_without_cuda_is_an_error(machine_with_a_gpu):
    result = run(["tests/gpu/run.sh"], PYTHON=sys.executable, PATH=machine_with_a_gpu)
    assert result.returncode == 1
    assert f"there is a GPU, but torch {torch.__version__} of {sys.executable} is a build without CUDA" in result.stderr


def test_with_a_gpu_missing_tools_are_named(machine_with_a_gpu, tmp_path):
    bare = script(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    result = run(["tests/gpu/run.sh"], PYTHON=str(bare), PATH=machine_with_a_gpu)
    assert result.returncode == 1
    assert "has no torch jax numpy optax ninja pytest hypothesis. Install it: " in result.stderr


def test_a_suite_that_must_run_does_not_pass_empty():
    result = run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], ASYNC_EMB_GPU_SUITE="1")
    assert result.returncode == 1
    assert "the GPU suite cannot run: torch" in result.stdout + result.stderr
