"""A torch `DataLoader` feeds the two towers in JAX, without a copy.

    python -m examples.two_tower.torch_loader --synthetic 20000

The loader's workers hand batches over in shared memory, as torch tensors; each device of JAX adopts its part of a batch
where it lies. A batch's memory lives as long as JAX reads it, and goes back to torch by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from examples.two_tower.devices import use_host_devices
from examples.two_tower.settings import Settings
from examples.two_tower.synthetic import SyntheticStream


def main(
    synthetic: Annotated[int, typer.Option(help="How many examples to generate.")] = 20_000,
    batch: Annotated[int, typer.Option(help="Examples in a step.")] = 1024,
    devices: Annotated[int, typer.Option(help="Host devices to split tables and batches over.")] = 2,
    workers: Annotated[int, typer.Option(help="Processes that make batches; 0 makes them in this one.")] = 1,
    start: Annotated[str, typer.Option(help="How workers start: spawn, forkserver, or fork.")] = "spawn",
) -> None:
    """Train one epoch and print the loss at both ends, and how many bytes of batches were copied."""
    use_host_devices(devices)
    settings = Settings(batch=batch, devices=devices, epochs=1)
    stream = SyntheticStream(synthetic, settings.seed, settings.test_fraction)
    losses, shared, total = train(settings, stream, loader_of(stream, settings, workers, start))
    print(f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"{shared:,} of {total:,} bytes of batches were read where torch has put them")


def loader_of(stream: SyntheticStream, settings: Settings, workers: int, start: str) -> Any:
    """A loader of whole batches: dictionaries of tensors, whose memory begins at multiples of 64 bytes."""
    from torch.utils.data import DataLoader

    from examples.two_tower.torch_batches import Batches

    return DataLoader(
        Batches(stream, settings),
        batch_size=None,  # the stream makes whole batches
        num_workers=workers,
        multiprocessing_context=start if workers else None,
    )


def train(settings: Settings, stream: SyntheticStream, loader: Any) -> tuple[list[float], int, int]:
    """(losses, bytes of batches that JAX shared, bytes of all batches)."""
    # JAX comes after the flags of use_host_devices, and not into the loader's workers.
    import jax

    from examples.two_tower.async_tables import AsyncTrainer
    from examples.two_tower.train import make_mesh
    from jax_bridge import dlpack

    mesh = make_mesh(settings.devices)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("table"))
    shared = total = 0

    def adopted() -> Iterator[Mapping[str, jax.Array]]:
        nonlocal shared, total
        for tensors in loader:
            arrays = {name: dlpack.adopt(tensor, sharding=rows) for name, tensor in tensors.items()}
            shared += sum(x.nbytes for name, x in arrays.items() if dlpack.shares_memory(x, tensors[name]))
            total += sum(tensor.nbytes for tensor in tensors.values())
            yield arrays

    trainer = AsyncTrainer(settings, stream, mesh)
    try:
        losses = [trainer.step(batch, upcoming) for batch, upcoming in trainer.pairs(adopted())]
        trainer.flush()
        return [float(loss) for loss in losses], shared, total
    finally:
        trainer.close()


if __name__ == "__main__":
    typer.run(main)
