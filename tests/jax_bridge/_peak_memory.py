"""A table of 1 GiB is lent, trained, adopted and handed over; what each adds to the peak of this process's memory.

``python -m tests.jax_bridge._peak_memory`` prints one line for each: what was done, and the peak above the memory that
was in use before, in units of the table.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch

from jax_bridge import AsyncEmbedding, RowwiseAdagrad, dlpack, handover, train_step

from ._programs import mesh_of
from ._sharing import addresses_of

ROWS, WIDTH = 1 << 20, 256
TABLE = ROWS * WIDTH * 4  # bytes
TOKENS = 64


def memory(line: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    (kilobytes,) = re.findall(rf"^{line}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


@contextlib.contextmanager
def measured(what: str) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    yield
    print(f"{what} {(memory('VmHWM') - before) / TABLE:.3f}", flush=True)


def zeros(key: Any, shape: tuple[int, int]) -> Any:
    return jax.numpy.zeros(shape)


def main() -> None:
    table = AsyncEmbedding(
        mesh_of(1),
        table_axis="table",
        rows=ROWS,
        width=WIDTH,
        name="t",
        optimizer=RowwiseAdagrad(learning_rate=0.1),
        init=zeros,
    )
    loss: Callable[..., Any] = lambda params, rows, batch: (rows["t"] - params).sum()  # noqa: E731
    with train_step({"t": table}, loss, optax.sgd(0.1), ids_of=lambda batch: {"t": batch}, staleness=1) as step:
        batch = np.arange(TOKENS, dtype=np.int32)
        state = step.init(np.float32(1), jax.random.key(0))
        (address,) = addresses_of(state.tables["t"].weights)
        with measured("view"), dlpack.view(state.tables["t"].weights) as tensor:
            assert tensor.data_ptr() == address
            assert tensor[::1024].sum() == 0
        with measured("step"):
            for _ in range(3):
                state, _ = step(state, batch, batch)
            state = step.flush(state)
            assert addresses_of(state.tables["t"].weights) == [address]
        with measured("lookup"):
            rows = table.lookup(state.tables["t"], batch)
            assert np.all(np.asarray(rows) != 0)
        with measured("embedding_view"), handover.embedding_view(table, state.tables["t"]) as embedding:
            assert embedding.weight.data_ptr() == address
            assert np.array_equal(embedding(torch.from_numpy(batch)).detach().numpy(), rows)
        with measured("to_embedding"):
            embedding = handover.to_embedding(table, state.tables["t"], donate=True)
            assert embedding.weight.data_ptr() == address
        with measured("adopt"):
            array = dlpack.adopt(embedding.weight.detach())
            assert addresses_of(array) == [address]
            assert np.array_equal(array[batch], rows)
        del array, state
        with measured("from_embedding"):
            state = handover.from_embedding(table, embedding)
            jax.block_until_ready(state)
        assert np.array_equal(table.lookup(state, batch), rows)


if __name__ == "__main__":
    main()
