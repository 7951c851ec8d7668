"""Row optimizers: how the gradient rows of a step change a table.

An optimizer's rule runs in the native kernels; what is here makes the operands of one step, on the mesh. A learning
rate may be a schedule (a function of the step, as in optax): nothing recompiles when it changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from torch_ext.common import row_optimizers
from torch_ext.common.row_optimizers import Schedule as Schedule

if TYPE_CHECKING:
    import jax

    from .context import AsyncEmbContextHandle


@runtime_checkable
class RowOptimizer(Protocol):
    """What a step needs of an optimizer. The state is a dictionary of arrays with one entry for each row,
    replicated."""

    def init(self, rows: int) -> dict[str, Any]:
        """The state of an untouched table of ``rows`` rows, as host arrays."""
        ...

    def update_start(
        self, weights: Any, state: dict[str, Any], step: Any, gate: Any, handle: AsyncEmbContextHandle
    ) -> tuple[Any, dict[str, Any], Any]:
        """Starts to apply the staged gradients of ``step`` (int32, 0 for the first). Returns (weights, state, pin)."""
        ...


class RowwiseAdagrad(row_optimizers.RowwiseAdagrad):
    __doc__ = row_optimizers.RowwiseAdagrad.__doc__

    def update_start(
        self, weights: Any, state: dict[str, Any], step: Any, gate: Any, handle: AsyncEmbContextHandle
    ) -> tuple[Any, dict[str, Any], Any]:
        import jax.numpy as jnp  # here, because settings are checked without JAX too

        from . import global_ops

        rate = jnp.asarray(
            self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate, jnp.float32
        )
        common: dict[str, Any] = {
            "learning_rate": rate,
            "eps": self.eps,
            "max_grad_norm": self.max_grad_norm,
            "rounding": self.rounding,
            **self.decays(rate),
        }
        if self.rounding == "stochastic":
            common |= {"seed": np.uint32(self.seed), "rounding_step": jnp.asarray(step).astype(jnp.uint32)}
        if self.lazy:
            weights, accumulator, last_step, pin = global_ops.rowwise_adagrad_lazy_update_start(
                weights,
                state["accumulator"],
                state["last_step"],
                jnp.asarray(step + 1, jnp.int32),  # an untouched row was last touched at 0
                gate,
                handle,
                **common,
            )
            return weights, {"accumulator": accumulator, "last_step": last_step}, pin
        weights, accumulator, pin = global_ops.rowwise_adagrad_update_start(
            weights, state["accumulator"], gate, handle, **common
        )
        return weights, {"accumulator": accumulator}, pin


def state_shape(optimizer: RowOptimizer, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of an optimizer's state."""
    import jax

    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in optimizer.init(rows).items()}
