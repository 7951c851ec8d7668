"""Two towers trained in JAX are judged by a ranking metric in torch, on the tables where they lie.

    python -m examples.two_tower.torch_ranking --synthetic 20000

Each user of the test part ranks all items. Recall@k is the share of the liked items that are among the first k, NDCG@k
weighs them by their place (Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of IR techniques"); both are
means over users who like something.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from examples.two_tower.data import Examples
from examples.two_tower.devices import use_host_devices
from examples.two_tower.settings import Settings
from examples.two_tower.synthetic import SyntheticStream

if TYPE_CHECKING:
    from examples.two_tower.async_tables import AsyncTrainer


def main(
    synthetic: Annotated[int, typer.Option(help="How many examples to generate.")] = 20_000,
    k: Annotated[int, typer.Option(help="Length of the ranking that counts.")] = 20,
) -> None:
    """Train one epoch in JAX, and print what torch says of the ranking before and after."""
    use_host_devices(1)  # a view is of one device's memory
    settings = Settings(devices=1, epochs=1)
    stream = SyntheticStream(synthetic, settings.seed, settings.test_fraction)
    from examples.two_tower.async_tables import AsyncTrainer
    from examples.two_tower.train import make_mesh

    trainer = AsyncTrainer(settings, stream, make_mesh(1))
    try:
        print("before:", *evaluate(trainer, stream.test, k))
        for batch, upcoming in trainer.pairs(stream.batches(settings.batch, settings.seed, 0)):
            trainer.step(batch, upcoming)
        trainer.flush()
        print("after: ", *evaluate(trainer, stream.test, k))
    finally:
        trainer.close()


def evaluate(trainer: AsyncTrainer, test: Examples, k: int) -> tuple[str, str]:
    """Recall and NDCG at k, in words."""
    with lent(trainer) as (embeddings, params):
        scores, liked = rank(embeddings, params, test)
        recall, ndcg = recall_and_ndcg(scores, liked, k)
    return f"recall@{k} {recall:.4f}", f"NDCG@{k} {ndcg:.4f}"


@contextlib.contextmanager
def lent(trainer: AsyncTrainer) -> Iterator[tuple[dict[str, torch.nn.Embedding], Any]]:
    """The tables as ordinary embeddings and the dense parameters as tensors, all in the memory that JAX has them in."""
    import jax

    from jax_bridge import dlpack, handover

    with contextlib.ExitStack() as views:
        embeddings = {
            name: views.enter_context(handover.embedding_view(table, trainer.state.tables[name]))
            for name, table in trainer.tables.items()
        }
        params = jax.tree.map(lambda x: views.enter_context(dlpack.view(x)), trainer.state.params)
        yield embeddings, params


@torch.no_grad()
def rank(
    embeddings: Mapping[str, torch.nn.Embedding], params: Any, test: Examples
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, liked): [users, items] for the users of the test part, float32 and bool."""
    users, place = np.unique(test.users, return_inverse=True)
    user, _ = tower(params["users"], embeddings["users"](torch.from_numpy(users)))
    item, item_bias = tower(params["items"], embeddings["items"].weight)
    liked = torch.zeros(len(users), len(item), dtype=torch.bool)
    positive = test.labels > 0.5
    liked[place[positive], test.items[positive]] = True
    return user @ item.T + item_bias, liked  # what is the same for all items of a user moves no item


def tower(params: Mapping[str, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As in `model.py`: a vector for each row, and its bias."""
    hidden = torch.relu(rows @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"], rows @ params["bias"]


def recall_and_ndcg(scores: torch.Tensor, liked: torch.Tensor, k: int) -> tuple[float, float]:
    """Both at k, for scores and bools [users, items]; users without a liked item do not count."""
    some = liked.any(dim=1)
    scores, liked = scores[some], liked[some]
    k = min(k, scores.shape[1])
    hits = liked.gather(1, scores.topk(k).indices).float()
    discount = 1 / torch.log2(torch.arange(k) + 2.0)
    ideal = torch.stack([discount[:n].sum() for n in liked.sum(dim=1).tolist()])
    recall = hits.sum(dim=1) / liked.sum(dim=1)
    return float(recall.mean()), float(((hits @ discount) / ideal).mean())


if __name__ == "__main__":
    typer.run(main)
