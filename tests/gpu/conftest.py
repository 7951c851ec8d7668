"""The GPU suite: every test file in this folder is marked `gpu` and needs a GPU, and CUDA in torch, jax and ours.

Where something is missing each test is skipped with that reason, and the reason is printed with the number of tests.
Under `make gpu-test` on a machine with a GPU (ASYNC_EMB_GPU_SUITE=1) it ends the run instead, as a failure, and so does
a run in which no test passes: the suite never passes empty.

Files here must be importable without a GPU, so that their tests can be counted. What the suite can try of itself
without one is in `on_cpu`, and runs with all other tests.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

# Streams that share a hardware queue would wait for each other; read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

FOLDER = Path(__file__).parent
REQUIRED = os.environ.get("ASYNC_EMB_GPU_SUITE") == "1"

_passed = 0
_skipped = 0


@functools.cache
def missing() -> str | None:
    """What stands in the way of a run on a GPU, or None."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    import torch_ext

    try:
        torch_ext.require_cuda()
    except torch_ext.NativeModuleError as error:
        return str(error)
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"jax {jax.__version__} has no GPU: {str(error).splitlines()[0]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.parent == FOLDER]
    if not own:
        return
    reason = missing()
    if reason is not None and REQUIRED:
        pytest.exit(f"the GPU suite cannot run: {reason}", returncode=1)
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"GPU suite: {reason}"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _passed, _skipped
    if Path(report.nodeid.split("::")[0]).parent.name != FOLDER.name:
        return
    _passed += report.when == "call" and report.passed
    _skipped += report.skipped


def pytest_sessionfinish(session: pytest.Session) -> None:
    if REQUIRED and _passed == 0 and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REQUIRED and _passed == 0:
        terminalreporter.write_line("GPU suite: FAILED, because not one test passed", red=True)
    elif _skipped and not _passed:
        terminalreporter.write_line(f"GPU suite: 0 passed, {_skipped} skipped: {missing()}")
