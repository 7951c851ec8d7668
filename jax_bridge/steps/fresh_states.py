"""States of a training step that no step has returned: of arrays that a caller has, and with nothing under way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import global_ops
from ..embedding import AsyncEmbedding, TableState
from ..placing import put, spans_processes
from .step_program import StepState


class FreshStates:
    """For the tables of one step."""

    def __init__(self, tables: Mapping[str, AsyncEmbedding]) -> None:
        self._tables = tables
        mesh = next(iter(tables.values())).mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._spans_processes = spans_processes(mesh)

    def make(self, params: Any, opt_state: Any, tables: dict[str, TableState], step: Any) -> StepState:
        """The dense arrays are copied, because a donated state must own its buffers, and the caller keeps theirs."""
        tree = (params, opt_state, np.asarray(step, np.int32))
        if self._spans_processes:  # what a process has for itself, all have alike
            tree = jax.tree.map(lambda x: put(x, self._replicated), tree)
        params, opt_state, step = self._copied(tree)
        return StepState(params, opt_state, tables, self.pins(), step)

    def pins(self) -> dict[str, Any]:
        """Of lookups that are not armed."""
        return {name: global_ops.first_gate(table.smallest_handle()) for name, table in self._tables.items()}

    @functools.cached_property
    def _copied(self) -> Callable[[Any], Any]:
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=self._replicated)
