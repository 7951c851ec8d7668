"""Trains on more host devices than cores, in a process of its own: python -m tests.jax_bridge._many_devices --help."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from collections.abc import Iterator


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True, help="this process may use no more")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--torch-threads", type=int, default=0, help="0 for torch's default")
    parser.add_argument("--busy", action="store_true", help="a Python thread that never rests")
    return parser.parse_args()


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    yield
    ended.set()
    thread.join()


def train(options: argparse.Namespace) -> None:
    import jax
    import numpy as np
    import optax
    import torch
    from jax.sharding import Mesh

    import torch_ext
    from jax_bridge import AsyncEmbedding, RowwiseAdagrad, train_step, with_next

    if options.torch_threads:
        torch.set_num_threads(options.torch_threads)
    torch_ext.native()
    mesh = Mesh(np.array(jax.devices("cpu")[: options.devices]), ("table",))
    names = [f"table{i}" for i in range(options.tables)]
    optimizer = RowwiseAdagrad(learning_rate=0.1)
    tables = {
        name: AsyncEmbedding(
            mesh, table_axis="table", rows=50, width=2 * options.devices, name=name, optimizer=optimizer
        )
        for name in names
    }

    def loss_fn(params, rows, batch):
        return sum(((x @ params - batch["label"]) ** 2).mean() for x in rows.values())

    step = train_step(
        tables, loss_fn, optax.sgd(0.01), ids_of=lambda b: dict.fromkeys(names, b["ids"]), staleness=options.staleness
    )
    rng = np.random.default_rng(0)
    tokens = 4 * options.devices
    rows = torch.rand(20_000, 64)

    def loader():
        for k in range(options.steps):
            if k % 10 == 0:  # torch's threads work, too
                torch.ops.async_emb.gather_rows(rows, torch.randint(0, len(rows), (20_000,)))
            ids = rng.integers(0, 50, tokens).astype(np.int32)
            yield {"ids": ids, "label": (ids % 2).astype(np.float32)}

    # Not before: imports hand Python's lock over thousands of times, and each time a busy thread takes its turn.
    with busy_thread() if options.busy else contextlib.nullcontext(), step:
        state = step.init(np.zeros(2 * options.devices, np.float32), jax.random.key(0))
        losses = []
        for batch, upcoming in with_next(loader()):
            state, metrics = step(state, batch, upcoming)
            losses.append(metrics["loss"])
        step.flush(state)
        for name, counts in step.stats().items():
            assert counts["updates"] == options.steps, (name, counts)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0], losses


def main() -> None:
    options = arguments()
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[: options.cores])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["ASYNC_EMB_TIMEOUT_SECONDS"] = "60"  # what hangs says in which call
    train(options)
    print("finished")


if __name__ == "__main__":
    main()
