"""torch and JAX in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("first", ["jax", "torch"])
def test_the_frameworks_may_be_imported_in_either_order(first):
    """And the native module may be there before JAX, or come after JAX has started its backend."""
    program = {
        "jax": "import jax; jax.devices(); import torch",
        "torch": "import torch, torch_ext; torch_ext.native(); import jax",
    }[first]
    program += """
from tests.jax_bridge import _per_shard as per_shard
from tests.jax_bridge._programs import assert_same_run
handle, start, batches = per_shard.make_handle(2), per_shard.make_start(), per_shard.make_batches(2)
run = per_shard.run_exact(per_shard.exact_step(handle), handle, start, batches)
assert_same_run(run, per_shard.oracle(start, batches))
rows = torch.ops.async_emb.gather_rows(torch.arange(12.0).reshape(6, 2), torch.tensor([5, 1], dtype=torch.int32))
assert rows.tolist() == [[10.0, 11.0], [2.0, 3.0]], rows
print("trained")
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "trained\n"
