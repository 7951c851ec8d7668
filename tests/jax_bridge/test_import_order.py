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
    assert run("-c", program) == "trained\n"


# A worker that is spawned reads the program again, and needs nothing of it.
LOADED = """
if __name__ == "__main__":
    import {first}, {second}
    import numpy as np
    from torch.utils.data import DataLoader
    from jax_bridge import dlpack

    array = jax.jit(lambda: jax.numpy.arange(16.0))()
    data = torch.arange(1024, dtype=torch.int32).view(8, 128)
    with dlpack.view(array) as tensor:
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
        for start in ("fork", "spawn"):
            loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=start)
            for i, batch in enumerate(loader):
                adopted = dlpack.adopt(batch)
                assert adopted.unsafe_buffer_pointer() == batch.data_ptr()
                assert np.array_equal(adopted, np.arange(512 * i, 512 * (i + 1)).reshape(4, 128))
            print(start, i + 1)
        assert tensor.sum() == 120
"""


@pytest.mark.parametrize(("first", "second"), [("jax", "torch"), ("torch", "jax")])
def test_loaders_that_fork_and_that_spawn_feed_either_order(first, second, tmp_path):
    """A view stays what it is in the meantime."""
    file = tmp_path / "loaded.py"
    file.write_text(LOADED.format(first=first, second=second))
    assert run(str(file)) == "fork 2\nspawn 2\n"


def run(*arguments: str) -> str:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(REPOSITORY),
    }
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
