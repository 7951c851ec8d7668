"""Views, steps, adopted tensors, deletions and collections in random order: every read shows what it should, or raises.

`tests/asan.sh` runs these under the address sanitizer too.
"""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_bridge import PipelineError, dlpack, loans

from . import _training as training
from ._sharing import addresses_of

INTERLEAVINGS = 2000
ACTIONS = 5  # in each
NAME = "items"


class World:
    """A table in training beside tensors and arrays on shared memory, and a copy of what each must show.

    A tensor or array is a list of one, so that it can be dropped.
    """

    def __init__(self, step: Any, batches: list[Any], choices: random.Random) -> None:
        self.step, self.batches, self.choices = step, batches, choices
        self.state = training.start(step)
        self.weights = step.tables[NAME].to_arrays(self.state.tables[NAME])[0]
        self.alive: list[tuple[contextlib.ExitStack, torch.Tensor]] = []  # views of the table
        self.ended: list[torch.Tensor] = []
        self.adopted: list[tuple[jax.Array, np.ndarray[Any, Any]]] = []
        self.tensors: list[torch.Tensor] = []  # some of them adopted

    def act(self) -> None:
        self.choices.choice(
            [self.view, self.view, self.leave, self.leave, self.train, self.train, self.adopt, self.write, self.drop,
             self.delete, self.collect, self.fill_freed_memory]
        )()  # fmt: skip
        self.check()

    def view(self) -> None:
        block = contextlib.ExitStack()
        tensor = block.enter_context(dlpack.view(self.state.tables[NAME].weights))
        assert [tensor.data_ptr()] == addresses_of(self.state.tables[NAME].weights)
        self.alive.append((block, tensor))

    def leave(self) -> None:
        if self.alive:
            block, tensor = self.alive.pop(self.choices.randrange(len(self.alive)))
            self.ended = [*self.ended[-3:], tensor, tensor[1:], tensor.detach()]
            block.close()

    def train(self) -> None:
        batch, before = self.choices.choice(self.batches), self.state.tables[NAME].weights
        if self.alive:
            with pytest.raises(PipelineError, match="torch has a view"):
                self.step(self.state, batch)
            assert not before.is_deleted()
            return
        address = addresses_of(before)
        self.state, _ = self.step(self.state, batch)
        assert before.is_deleted()
        assert addresses_of(self.state.tables[NAME].weights) == address
        now = self.step.tables[NAME].to_arrays(self.state.tables[NAME])[0]
        assert not np.array_equal(now, self.weights)
        self.weights = now

    def adopt(self) -> None:
        tensor = torch.full((64,), float(self.choices.randrange(100)))
        array = dlpack.adopt(tensor)
        assert dlpack.shares_memory(array, tensor)
        self.adopted.append((array, tensor.numpy().copy()))
        self.tensors.append(tensor)

    def write(self) -> None:
        if self.alive and self.choices.random() < 0.5:
            row = self.choices.randrange(training.ROWS[NAME])
            self.alive[-1][1][row] = 1.5
            self.weights[row] = 1.5
        elif self.adopted:
            place = self.choices.randrange(len(self.adopted))
            array, values = self.adopted[place]
            for tensor in self.tensors:
                if tensor.data_ptr() == addresses_of(array)[0]:
                    tensor[3] = values[3] = -1

    def drop(self) -> None:
        """A holder of shared memory goes; the others keep theirs."""
        for holders in (self.tensors, self.adopted, self.ended):
            if holders and self.choices.random() < 0.5:
                holders.pop(self.choices.randrange(len(holders)))

    def delete(self) -> None:
        if self.adopted:
            array, _ = self.adopted.pop(self.choices.randrange(len(self.adopted)))
            array.delete()

    def collect(self) -> None:
        gc.collect(0)

    def fill_freed_memory(self) -> None:
        junk = [torch.full((64,), 777.0), torch.full((training.ROWS[NAME], training.WIDTH[NAME]), 777.0)]
        more = [jnp.asarray(np.full(x.shape, 777, np.float32)) for x in junk]
        jax.block_until_ready(more)

    def check(self) -> None:
        for _, tensor in self.alive:
            assert np.array_equal(tensor.numpy(), self.weights)
        for array, values in self.adopted:
            assert np.array_equal(np.asarray(array), values)
        if self.ended:
            with pytest.raises(RuntimeError, match="has ended"):
                self.choices.choice(self.ended).sum()

    def close(self) -> None:
        for block, _ in self.alive:
            block.close()
        assert np.array_equal(self.step.tables[NAME].to_arrays(self.state.tables[NAME])[0], self.weights)


def test_no_read_is_stale_in_two_thousand_interleavings():
    batches = training.make_batches(4)
    steps = 0
    with training.make_step(1, 0) as step:
        for seed in range(INTERLEAVINGS // 50):
            world = World(step, batches, random.Random(seed))
            for _ in range(50):  # one after the other on the same state
                for _ in range(ACTIONS):
                    world.act()
                world.close()
                world.alive.clear()
            steps += int(world.state.step)
            del world
    gc.collect()
    assert steps > INTERLEAVINGS / 4
    assert not loans._claims, "what was shared is forgotten"
