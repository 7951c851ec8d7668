"""The whole native module, built at first use in a fresh process with an empty cache. Takes minutes of compilation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_ext
from torch_ext import build

REPOSITORY = Path(__file__).resolve().parent.parent.parent

# Updates and lookups, as a digest of their bits.
CODE = """
import hashlib, json, sys
import torch, torch_ext
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    table, state = torch.randn(200, 24).to(dtype), torch.rand(200)
    for step in range(5):
        ids = torch.randint(0, 200, (500,))
        grads = torch.randn(500, 24).to(dtype)
        unique, offsets, positions = torch_ext.unique_ids(ids)
        sums, statistics = torch_ext.segment_sum(grads, offsets, positions)
        torch_ext.rowwise_adagrad_(table, state, unique, sums, statistics, learning_rate=0.1, eps=1e-8,
                                   rounding="stochastic", seed=1, rounding_step=step)
    for tensor in (table, state, torch_ext.gather_rows(table, ids)):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
json.dump([torch_ext.native().__file__, digest.hexdigest()], sys.stdout)
"""


def run(packages: Path, cache: Path) -> tuple[Path, str, str]:
    own = {"PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1", "ASYNC_EMB_CACHE": str(cache)}
    command = [sys.executable, "-c", CODE]
    result = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    file, digest = json.loads(result.stdout)
    return Path(file), digest, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not os.environ.get("ASYNC_EMB_WHOLE_BUILD"), reason="`make first-use-test` runs it: it takes minutes"
)
def test_the_first_use_builds_all_of_it_once_and_gives_the_bits_of_the_installed_module(tmp_path):
    for package in ("torch_ext", "jax_bridge", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=ignored)
    cache = tmp_path / "cache with spaces"
    built, digest, said = run(tmp_path, cache)
    assert built.parent.parent == cache
    assert [path.name for path in cache.iterdir()] == [built.parent.name]
    assert "the native module is not installed: there is no" in said
    assert " steps done, now " in said
    again, same, nothing = run(tmp_path, cache)
    assert (again, same) == (built, digest)
    assert "async-emb:" not in nothing
    installed = Path(torch_ext.native().__file__)
    elsewhere, bits, _ = run(installed.parent.parent, cache)
    assert elsewhere == installed
    assert bits == digest
    assert json.loads((built.parent / "build.json").read_text())["sources"].keys() == {
        path.relative_to(build.csrc_root()).as_posix() for path in build.sources()
    }
