"""``AsyncEmbedding``: one table, sharded over the devices of a mesh, with its optimizer and its contexts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torch_ext.common.batches import pad_width

from . import global_ops, runtime
from .context import AsyncEmbContextHandle, IdPolicy, make_context_handle
from .errors import ContextError, ContextWarning, PipelineError
from .ffi import TransformationError
from .optimizers import RowOptimizer
from .placing import fetch, put
from .table_contexts import TableContexts
from .token_ids import as_int32, as_integers, require_in_table
from .validation.table_checks import TableArguments, check_table, ranks_of

Initializer = Callable[[Any, tuple[int, int]], Any]


class TableState(NamedTuple):
    """A table's arrays. Steps take it and give it back; in between nothing works on it.

    Attributes:
        weights: [rows, padded width], sharded by columns over the table axes.
        optimizer: the optimizer's arrays, [rows] each, replicated.
    """

    weights: Any
    optimizer: dict[str, Any]


class AsyncEmbedding:
    """An embedding table that is looked up and trained on the side of a jitted step.

    Args:
        mesh: the mesh of the program.
        table_axis: mesh axis, or axes, that shard the table's columns.
        rows: number of rows, at least 1.
        width: columns of a row. A width that the number of ranks does not divide is padded; the padding never shows.
        name: names the table in messages and contexts; two tables of one program need two names.
        optimizer: how gradients change the table.
        data_axis: mesh axes that shard a batch's tokens; the table axes, in their order, unless given.
        dtype: float32, bfloat16 or float16, of weights, rows and gradient rows.
        init: function (key, (rows, width)) -> float array; normal with standard deviation 0.05 unless given.
        id_policy: what an id outside of [0, rows) does: "error" (reported when the step has finished; the step drops
            it), "drop" (reads zeros, trains nothing) or "clamp".
        padding_id: the id that reads zeros and is never trained, or None.
        num_unique: most distinct ids in a batch; the number of tokens unless given.

    Raises:
        ContextError: with every problem of the configuration, each saying what to change.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        table_axis: str | Sequence[Hashable],
        rows: int,
        width: int,
        name: str,
        optimizer: RowOptimizer,
        data_axis: str | Sequence[Hashable] | None = None,
        dtype: Any = np.float32,
        init: Initializer | None = None,
        id_policy: IdPolicy = "error",
        padding_id: int | None = None,
        num_unique: int | None = None,
    ) -> None:
        data_axis = table_axis if data_axis is None else data_axis
        checked_dtype = check_table(
            TableArguments(
                mesh=mesh,
                table_axis=table_axis,
                data_axis=data_axis,
                rows=rows,
                width=width,
                name=name,
                optimizer=optimizer,
                dtype=dtype,
                init=init,
                id_policy=id_policy,
                padding_id=padding_id,
                num_unique=num_unique,
            )
        )
        self.mesh = mesh
        self.table_axis = table_axis
        self.data_axis = data_axis
        self.rows = int(rows)
        self.width = int(width)
        self.name = name
        self.optimizer = optimizer
        self.dtype = checked_dtype
        self.id_policy: IdPolicy = id_policy
        self.padding_id = padding_id
        self._num_unique = num_unique
        self._initializer = init or _normal
        self._contexts = TableContexts(self._make_handle)
        self.padded_width = pad_width(self.width, self._ranks())

    # ---- state ----

    def init(self, key: Any) -> TableState:
        """A fresh state: the same bits on any number of ranks."""
        runtime.require_devices(self.smallest_handle())
        made = jax.eval_shape(lambda key: jnp.asarray(self._initializer(key, (self.rows, self.width))), key)
        self._require_shape("what init returns", made, self.width, any_dtype=True)
        return TableState(self._make_weights(key), self._place_optimizer(self.optimizer.init(self.rows)))

    def from_arrays(self, weights: Any, optimizer: dict[str, Any] | None = None) -> TableState:
        """A state from host arrays, whatever the layout before.

        Args:
            weights: [rows, width], of any real dtype: converted to the table's as ``ndarray.astype`` does (float64 to
                float32 rounds to nearest even). Bits of bfloat16 that ``np.savez`` has left without a name are taken as
                they are.
            optimizer: the optimizer's arrays, of exactly its dtypes and shapes; fresh ones unless given.
        """
        runtime.require_devices(self.smallest_handle())
        weights = with_dtype(weights, self.dtype)
        if weights.shape != (self.rows, self.width):
            raise ContextError(
                f"async_emb {self.name!r}: weights have shape {list(weights.shape)}, but the table is "
                f"[{self.rows}, {self.width}]"
            )
        fresh = self.optimizer.init(self.rows)
        optimizer = fresh if optimizer is None else optimizer
        if {n: (x.shape, x.dtype) for n, x in fresh.items()} != {
            n: (np.shape(x), np.asarray(x).dtype) for n, x in optimizer.items()
        }:
            raise ContextError(
                f"async_emb {self.name!r}: the optimizer's arrays are {sorted(optimizer)}, but {self.optimizer!r} "
                f"needs { {n: f'{x.dtype.name}{list(x.shape)}' for n, x in fresh.items()} }"
            )
        placed = TableState(self._place_weights(weights), self._place_optimizer(optimizer))
        return jax.block_until_ready(placed)  # the caller's arrays were read where they lie

    def to_arrays(self, state: TableState) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
        """The logical table [rows, width] and the optimizer's arrays, as host arrays, whatever the layout."""
        self.require_own(state)
        weights = fetch(state.weights)[:, : self.width].copy()
        return weights, {name: fetch(x) for name, x in state.optimizer.items()}

    def require_own(self, state: TableState) -> None:
        """Raises ContextError for a state that another table has made: of another shape, dtype or optimizer."""
        wanted: dict[str, Any] = {"weights": ((self.rows, self.padded_width), np.dtype(self.dtype).name)}
        wanted |= {key: ((self.rows,), x.dtype.name) for key, x in self.optimizer.init(1).items()}
        found = {key: (np.shape(x), x.dtype.name) for key, x in {"weights": state.weights, **state.optimizer}.items()}
        if found == wanted:
            return
        shown, needed = (
            {key: f"{dtype}{list(shape)}" for key, (shape, dtype) in arrays.items()} for arrays in (found, wanted)
        )
        error = ContextError(
            f"async_emb {self.name!r}: the state is of another table: it has {shown}, but this table's has {needed}"
        )
        error.add_note("Give the table that made the state, by init, from_arrays or a step.")
        raise error

    def read_weights(self, read: Callable[[int, int], np.ndarray[Any, Any]]) -> Any:
        """The table's weights, of which each process has read what its devices hold. Not for a step yet: ``own`` them.

        Args:
            read: (first, last) -> columns [rows, last - first] of the logical table.
        """
        held: dict[int, Any] = {}  # by first column: replicas hold the same

        def block(index: Any) -> Any:
            first, last, _ = index[1].indices(self.padded_width)
            if first not in held:
                held[first] = np.zeros((self.rows, last - first), self.dtype)
                if first < self.width:
                    held[first][:, : min(last, self.width) - first] = read(first, min(last, self.width))
            return held[first]

        shape = (self.rows, self.padded_width)
        return jax.make_array_from_callback(shape, self._weights_sharding(), block, dtype=self.dtype)

    def own(self, weights: Any, optimizer: dict[str, Any]) -> TableState:
        """A state of weights that are on the mesh, padded, and of the optimizer's host arrays: a copy of both, which a
        step may take."""
        return TableState(self._copy_weights(weights), self._place_optimizer(optimizer))

    # ---- evaluation ----

    def lookup(self, state: TableState, token_ids: Any) -> Any:
        """The rows of ``token_ids``, [*token_ids.shape, width]: for evaluation, of any batch size, also between steps.

        It has contexts of its own, and waits for its result. Call it on arrays, not inside of a jitted function.

        Raises:
            IdError: an id outside of [0, rows), with the policy "error".
            TransformationError: the call is inside of jax.jit, jax.grad, jax.vmap or the like.
        """
        self._require_arrays({"token_ids": token_ids, "state": state})
        ids = self.prepare_ids(fetch(token_ids))
        flat = ids.reshape(-1)
        if state.weights.is_deleted():
            raise PipelineError(
                f"async_emb {self.name!r}: this table was given to a step since, which has taken its buffer. Look up "
                "in the tables of the state that the last call returned"
            )
        self._require_shape("the table's weights", state.weights, self.padded_width)
        if flat.size == 0:
            return jnp.zeros((*ids.shape, self.width), self.dtype)
        # Powers of two, so that evaluation over many batch sizes compiles a handful of programs.
        ranks = self._ranks()
        tokens = ranks * max(8, 1 << (-(-flat.size // ranks) - 1).bit_length())
        handle = self.handle(tokens, "lookup")
        # The tail repeats the last id: any id reads the same whatever its neighbours are.
        padded = np.concatenate([flat, np.full(tokens - flat.size, flat[-1], flat.dtype)])
        placed = put(padded, NamedSharding(self.mesh, global_ops.token_spec(handle)))
        self._require_arrays({"the call": placed})  # a function that is being traced may have closed over arrays
        runtime.open_context(handle)  # it may have been closed since the program was traced
        try:
            rows = jax.block_until_ready(_lookup(placed, state.weights, handle))
        except BaseException:
            runtime.close_context(handle)  # the next lookup opens it anew, whatever this one has left
            raise
        # On the host, where a new shape compiles nothing.
        return jax.device_put(fetch(rows)[: flat.size].reshape(*ids.shape, self.width))

    def _require_arrays(self, given: dict[str, Any]) -> None:
        traced = [what for what, x in given.items() if any(isinstance(y, jax.core.Tracer) for y in jax.tree.leaves(x))]
        if not traced:
            return
        error = TransformationError(
            f"async_emb {self.name!r}: AsyncEmbedding.lookup was called inside of jax.jit, jax.grad, jax.vmap or "
            f"another transformation (traced: {', '.join(traced)}), but it is for evaluation on the host"
        )
        error.add_note(
            "Call it outside, on ids of any shape at once, and give its rows to the transformed function. A step of "
            "your own is written with step.program, or with lookup_start and lookup_done inside of jax.shard_map."
        )
        raise error

    def _require_shape(self, what: str, x: Any, width: int, *, any_dtype: bool = False) -> None:
        if np.shape(x) == (self.rows, width) and (any_dtype or x.dtype == self.dtype):
            return
        raise ContextError(
            f"async_emb {self.name!r}: {what} is {x.dtype.name}{list(np.shape(x))}, but the table needs "
            f"{self.dtype.name}[{self.rows}, {width}]"
        )

    def prepare_ids(self, token_ids: Any) -> Any:
        """Token ids as the native calls take them: int32 (int64 stays with x64), NumPy or jax.

        Raises:
            IdError: they are not integers, or, with the policy "error", a host array has one outside of [0, rows).
        """
        ids = as_integers(token_ids, self.name)
        if self.id_policy == "error" and isinstance(ids, np.ndarray):
            require_in_table(ids, table=self.name, rows=self.rows, padding_id=self.padding_id)
        return as_int32(ids)

    # ---- contexts ----

    def handle(self, tokens_per_batch: int, purpose: str = "train") -> AsyncEmbContextHandle:
        """The context handle for batches of this many tokens (all dimensions of the ids together)."""
        return self._contexts.handle(tokens_per_batch, purpose)

    def stats(self) -> dict[str, float]:
        """Counters of the contexts that train, summed (see ``runtime.stats``); empty before the first step."""
        return self._contexts.stats()

    def check(self) -> None:
        """Raises what a context has to say (see ``runtime.check``). Every step must have finished."""
        self._contexts.check()

    def require_working(self) -> None:
        """Raises FailedContextError where a context has failed. Steps may run."""
        self._contexts.require_working()

    def has_news(self) -> bool:
        """Whether ``check`` would raise, as far as one can tell while steps run. Never waits.

        Raises:
            FailedContextError: a context has failed.
        """
        return self._contexts.has_news()

    def close(self) -> None:
        """Closes every context. The next step opens what it needs again."""
        self._contexts.close()

    def close_failed(self) -> None:
        """Closes the contexts that have failed."""
        self._contexts.close_failed()

    def smallest_handle(self) -> AsyncEmbContextHandle:
        """The handle for a batch of one token on each rank: for what does not depend on the batch."""
        return self.handle(self._ranks())

    def open_handles(self, purpose: str | None = None) -> list[AsyncEmbContextHandle]:
        """Of the contexts that are open, all or those of one purpose."""
        return self._contexts.open(purpose)

    def _ranks(self) -> int:
        return ranks_of(self.mesh, self.table_axis)

    def _make_handle(self, tokens_per_batch: int, purpose: str) -> AsyncEmbContextHandle:
        num_unique = tokens_per_batch if self._num_unique is None else self._num_unique
        with warnings.catch_warnings():
            # A bound for the largest batch is too large for the others, and for the check at construction.
            warnings.simplefilter("ignore", ContextWarning)
            return make_context_handle(
                self.mesh,
                self.table_axis,
                data_axis=self.data_axis,
                tokens_per_batch=tokens_per_batch,
                emb_width=pad_width(self.width, self._ranks()),
                num_unique=num_unique,
                num_devices_per_node=int(np.size(self.mesh.devices)),
                name=self.name,
                dtype=self.dtype,
                logical_width=self.width,
                id_policy=self.id_policy,
                padding_id=self.padding_id,
                purpose=purpose,
            )

    # ---- placing arrays ----

    def _weights_sharding(self) -> NamedSharding:
        axes = self.table_axis if isinstance(self.table_axis, (tuple, list)) else (self.table_axis,)
        return NamedSharding(self.mesh, P(None, tuple(axes)))

    # Through computations, compiled once: XLA then owns the buffers, and a step can take them. A host array that XLA
    # only borrows could not be updated in place.

    @functools.cached_property
    def _make_weights(self) -> Callable[[Any], Any]:
        return jax.jit(
            lambda key: self._padded(jnp.asarray(self._initializer(key, (self.rows, self.width)))),
            out_shardings=self._weights_sharding(),
        )

    @functools.cached_property
    def _place_weights(self) -> Callable[[Any], Any]:
        place = jax.jit(self._padded, out_shardings=self._weights_sharding())
        if self.dtype.itemsize != 2:
            return place
        # XLA:CPU pads numbers of two bytes as float32, which changes NaNs, so they are placed as integers. By two
        # programs, or it would move the one conversion past the other.
        padding = ((0, 0), (0, self.padded_width - self.width))
        place_bits = jax.jit(lambda x: jnp.pad(jnp.copy(x), padding), out_shardings=self._weights_sharding())
        named = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, self.dtype), out_shardings=self._weights_sharding())
        return lambda weights: named(place_bits(weights.view(np.uint16)))

    @functools.cached_property
    def _copy_weights(self) -> Callable[[Any], Any]:
        return jax.jit(jnp.copy, out_shardings=self._weights_sharding())

    @functools.cached_property
    def _place_optimizer(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=NamedSharding(self.mesh, P()))

    def _padded(self, logical: Any) -> Any:
        # A copy, or where there is nothing to pad the result could be the source's own buffer.
        return jnp.pad(jnp.copy(logical.astype(self.dtype)), ((0, 0), (0, self.padded_width - self.width)))


def with_dtype(array: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A host array of ``dtype``. ``np.savez`` keeps bfloat16's bits but not its name: they are taken as they are."""
    array = np.asarray(array)
    if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    return array.astype(dtype, copy=False)


def _normal(key: Any, shape: tuple[int, int]) -> Any:
    return 0.05 * jax.random.normal(key, shape, jnp.float32)


@functools.partial(jax.jit, static_argnames="handle")
def _lookup(token_ids: Any, weights: Any, handle: AsyncEmbContextHandle) -> Any:
    return global_ops.lookup_now(token_ids, weights, handle)
