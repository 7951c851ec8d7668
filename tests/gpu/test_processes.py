"""Two processes of one GPU each, over NCCL: fifty steps give the oracle's bits, and a wrong environment is named.

NCCL takes no two ranks of a communicator on one GPU, so a machine with a single card cannot run this.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.jax_bridge import _fifty_steps as fifty

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"GPU suite: {torch.cuda.device_count()} GPUs, but two are needed, because NCCL takes no two ranks of a "
    "communicator on one",
)

ROOT = Path(__file__).parent.parent.parent
PROCESSES = 2
CASES = [*fifty.ONE_OF_EACH_DTYPE]
FITS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "NCCL_RUNTIME_CONNECT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
PROGRAM = """
import json, sys
from tests.multiprocess import _tables
print("RESULT", json.dumps(_tables.fifty_steps(**json.loads(sys.argv[1]))), flush=True)
"""


def outputs(**environment: str) -> list[tuple[int, str]]:
    """Exit status and output of each process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for number in range(PROCESSES):
        arguments = {"number": number, "size": PROCESSES, "port": port, "cases": CASES, "stalenesses": [0, 1]}
        own = {
            "CUDA_VISIBLE_DEVICES": str(number),
            "ASYNC_EMB_TIMEOUT_SECONDS": "30",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
                cwd=ROOT,
                env={**os.environ, **own, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        texts = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, text) for child, text in zip(children, texts, strict=True)]


def test_fifty_steps_give_the_bits_of_the_oracle():
    wanted = [fifty.expected(case, staleness).digest() for staleness in (0, 1) for case in CASES]
    for number, (status, text) in enumerate(outputs(**FITS)):
        assert status == 0, f"process {number}: {text}"
        result = json.loads(text.split("RESULT ", 1)[1])
        assert result["process"] == number
        assert result["digests"] == wanted
        assert all(sent > 0 for sent in result["sent"])


def test_an_environment_that_would_hang_is_refused_by_name():
    for status, text in outputs(**{**FITS, "NCCL_RUNTIME_CONNECT": "1"}):
        assert status != 0
        assert "NCCL_RUNTIME_CONNECT is '1', and must be 0" in text
