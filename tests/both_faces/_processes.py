"""What one process of a job does; started by test_processes.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torch_ext import AsyncEmbedding, FailedContextError, RowwiseAdagrad

from . import through_torch
from .cases import CASES, Case, name_of

PROCESSES = 2


def cases() -> list[Case]:
    """A few of all, one for each thing that processes tell each other."""
    wanted = (
        "a-rank-without-ids",
        "bad-ids,-error",
        "a-NaN-step",
        "not-to-be-applied",
        "clipping",
        "odd-width",
        "lazy",
    )
    return [case for case in CASES if any(part in name_of(case) for part in wanted)]


def run(rank: int, folder: str, job: str) -> None:
    """Joins the other process and does ``job``; an exception ends the process with a code of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=PROCESSES)
    globals()[job](rank, Path(folder))
    dist.destroy_process_group()


def train_cases(rank: int, folder: Path) -> None:
    for number, case in enumerate(cases()):
        with through_torch.make(case, None) as table:
            rows, reports, errors = through_torch.train(table, case.batches())
            arrays = table.to_arrays()
            stats = table.stats()
        assert stats["bytes_sent"] > 0, "the processes have talked"
        saved = {key: array.view(np.uint8) for key, array in arrays.items() if array.ndim}
        saved["rows"] = np.stack([through_torch.to_numpy(x) for x in rows]).view(np.uint8)
        saved["reports"] = np.array([(r.norm, r.valid) for r in reports], np.float32)
        saved["errors"] = np.array([f"{step}: {text}" for step, text in errors])
        np.savez(folder / f"{number}-{rank}.npz", **saved)


def train_beside_ddp(rank: int, folder: Path) -> None:
    """A model whose dense part DistributedDataParallel keeps alike on all ranks."""
    torch.save(ddp_run(rank, PROCESSES), folder / f"ddp-{rank}.pt")


def ddp_run(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.ModuleDict(
        {
            "users": AsyncEmbedding(
                10, 6, name="users", optimizer=RowwiseAdagrad(learning_rate=0.125), gradient_scale=1 / size
            ),
            "tower": torch.nn.Linear(6, 3),
        }
    )
    tower = torch.nn.parallel.DistributedDataParallel(_Model(model)) if size > 1 else _Model(model)
    dense = torch.optim.SGD(model["tower"].parameters(), lr=0.125)
    for step in range(4):
        ids = (torch.arange(8) * (step + 1)) % 10
        share = 8 // size
        loss = tower(ids[rank * share : (rank + 1) * share])
        dense.zero_grad()
        loss.backward()
        model["users"].step()
        dense.step()
    model["users"].flush()
    state = model.state_dict()
    model["users"].close()
    return state


class _Model(torch.nn.Module):
    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.parts["tower"](self.parts["users"](ids)).square().mean()


def lose_the_other(rank: int, folder: Path) -> None:
    """Process 1 ends between two steps; process 0 is told which rank, in which call of which step."""
    table = AsyncEmbedding(10, 6, name="users", optimizer=RowwiseAdagrad(learning_rate=0.1))
    table(torch.arange(4)).sum().backward()
    table.step()
    table.finish()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    try:
        table(torch.arange(4))
    except FailedContextError as error:
        (folder / "said-0.txt").write_text(str(error))
    table.close()


def mean_different_tables(rank: int, folder: Path) -> None:
    table = AsyncEmbedding(10, 6, name="users", optimizer=RowwiseAdagrad(learning_rate=0.1), padding_id=rank)
    try:
        table(torch.arange(4))
    except ValueError as error:
        (folder / f"different-{rank}.txt").write_text(str(error))
