"""Context handles: what a pipeline of one table on one mesh is, checked before anything is compiled or allocated."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from torch_ext.common.context_key import id_of, key_of

from .errors import ContextWarning, raise_problems
from .mesh import replica_groups, token_blocks
from .validation.axes import AxisNames
from .validation.checks import Arguments, check, size_warning
from .validation.corrections import find_corrections

IdPolicy = Literal["error", "drop", "clamp"]


@dataclasses.dataclass(frozen=True)
class AsyncEmbContextHandle:
    """Names one pipeline: a table, the devices that hold it, and the sizes that everyone must agree on.

    Made by `make_context_handle`, which checks. Immutable and hashable, so it can be a static argument of `jax.jit`.
    Two handles are equal if all their fields are. `dataclasses.replace` gives a changed handle a new `context_id`, but
    checks nothing.

    Attributes:
        context_id: 63-bit hash of `key()`, the same in every process and run.
        group_size: ranks in a communicator, the product of the table axes' sizes.
        flatten_replicas: device ids of every communicator in rank order, concatenated.
        tokens_per_rank: tokens of a batch that one rank holds.
        shard_width: columns of a row that one rank holds.
        emb_width: columns of a whole row, padding included; `group_size * shard_width`.
        num_unique: the most unique ids that a batch may hold.
        num_devices_per_node: devices of the mesh on one node.
        mesh: the mesh.
        table_axis: names of the mesh axes that shard the columns, in rank order.
        data_axis: names of the mesh axes that shard the tokens, in the order of the global token array.
        name: the table's name in messages.
        dtype: of the table, of looked up rows and of gradient rows.
        logical_width: columns that are not padding; the first ones.
        id_policy: what an id outside the table does: "error", "drop" or "clamp".
        padding_id: the token id that reads zeros and is never trained, or None.
        purpose: what the pipeline is for; contexts that differ in it alone are separate.
        token_blocks: for each rank, the index of its block in the global token array.
    """

    context_id: int = dataclasses.field(init=False)
    group_size: int
    flatten_replicas: tuple[int, ...]
    tokens_per_rank: int
    shard_width: int
    emb_width: int
    num_unique: int
    num_devices_per_node: int
    mesh: Mesh
    table_axis: tuple[Hashable, ...]
    data_axis: tuple[Hashable, ...]
    name: str
    dtype: np.dtype[Any]
    logical_width: int
    id_policy: IdPolicy
    padding_id: int | None
    purpose: str = "train"
    token_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "context_id", id_of(self.key()))

    @property
    def tokens_per_batch(self) -> int:
        return self.tokens_per_rank * self.group_size

    def key(self) -> str:
        """Everything that must agree between ranks, as canonical JSON: sorted keys, no spaces, ASCII.

        Names of mesh axes are not in it. What they decide (who is which rank, who holds which tokens) is.
        """
        agreed = {
            "name": self.name,
            "purpose": self.purpose,
            "group_size": self.group_size,
            "platform": self.mesh.devices.flat[0].platform,
            "devices": self.flatten_replicas,
            "token_blocks": self.token_blocks,
            "tokens_per_rank": self.tokens_per_rank,
            "shard_width": self.shard_width,
            "emb_width": self.emb_width,
            "logical_width": self.logical_width,
            "num_unique": self.num_unique,
            "num_devices_per_node": self.num_devices_per_node,
            "dtype": self.dtype.name,
            "id_policy": self.id_policy,
            "padding_id": self.padding_id,
        }
        return key_of(agreed)

    def attrs(self) -> dict[str, np.int64 | np.ndarray[Any, np.dtype[np.int64]]]:
        """The attributes of the native calls: int64 scalars, and for flatten_replicas an int64 array."""
        return {
            "context_id": np.int64(self.context_id),
            "group_size": np.int64(self.group_size),
            "flatten_replicas": np.asarray(self.flatten_replicas, dtype=np.int64),
            "tokens_per_rank": np.int64(self.tokens_per_rank),
            "shard_width": np.int64(self.shard_width),
            "emb_width": np.int64(self.emb_width),
            "num_unique": np.int64(self.num_unique),
            "num_devices_per_node": np.int64(self.num_devices_per_node),
        }


def make_context_handle(
    mesh: Mesh,
    table_axis: AxisNames,
    *,
    data_axis: AxisNames,
    tokens_per_batch: int,
    emb_width: int,
    num_unique: int,
    num_devices_per_node: int,
    name: str = "table",
    dtype: DTypeLike = ml_dtypes.bfloat16,
    logical_width: int | None = None,
    id_policy: IdPolicy = "error",
    padding_id: int | None = None,
    purpose: str = "train",
) -> AsyncEmbContextHandle:
    """Checks a configuration and names it. Compiles nothing, opens nothing.

    Args:
        mesh: the mesh that the program runs on; axis types (auto, explicit, manual) make no difference.
        table_axis: the mesh axes that shard the table's columns: one name, or a tuple or list of several. Their order
            numbers the ranks. Axes of the mesh that are neither here nor in `data_axis` hold copies.
        data_axis: the mesh axes that shard the tokens, in the order of the global token array. They must be the table
            axes, in any order; further axes may only have size 1.
        tokens_per_batch: tokens in a batch, over all ranks; a multiple of the number of ranks, at most 2^31 - 1.
        emb_width: columns of a row, over all ranks; a multiple of the number of ranks (see `pad_width`), at most 2^20.
        num_unique: the most unique ids that a batch may hold, over all ranks, at most 2^31 - 1. More than
            `tokens_per_batch + 1` warns.
        num_devices_per_node: devices of the mesh on one node; divides the number of devices of the mesh.
        name: the table's name in messages.
        dtype: of the table and its rows: float32, bfloat16 or float16.
        logical_width: columns that are not padding; all of them if None.
        id_policy: what an id outside the table does: "error" (raise after the step), "drop" or "clamp".
        padding_id: the token id that reads zeros and is never trained.
        purpose: keeps apart the contexts of one table, such as training and evaluation.

    Raises:
        ContextError: with one problem a line in `problems`, notes that say what to change, and `corrections`, keyword
            arguments that have been checked to pass. It is a `ContextTypeError` if the first problem is a wrong type.
    """
    arguments = Arguments(
        mesh=mesh,
        table_axis=table_axis,
        data_axis=data_axis,
        tokens_per_batch=tokens_per_batch,
        emb_width=emb_width,
        num_unique=num_unique,
        num_devices_per_node=num_devices_per_node,
        name=name,
        purpose=purpose,
        dtype=dtype,
        logical_width=logical_width,
        id_policy=id_policy,
        padding_id=padding_id,
    )
    checked = check(arguments)
    if checked.problems:
        raise_problems(checked.problems, find_corrections(arguments, checked), call="make_context_handle")
    assert checked.table is not None
    assert checked.data is not None
    assert checked.dtype is not None
    sizes = checked.integers
    if warning := size_warning(sizes):
        warnings.warn(ContextWarning(warning), stacklevel=2)
    group_size, flatten_replicas = replica_groups(mesh, checked.table.names)
    return AsyncEmbContextHandle(
        group_size=group_size,
        flatten_replicas=flatten_replicas,
        tokens_per_rank=sizes["tokens_per_batch"] // group_size,
        shard_width=sizes["emb_width"] // group_size,
        emb_width=sizes["emb_width"],
        num_unique=sizes["num_unique"],
        num_devices_per_node=sizes["num_devices_per_node"],
        mesh=mesh,
        table_axis=checked.table.names,
        data_axis=checked.data.names,
        name=str(name),
        dtype=checked.dtype,
        logical_width=sizes["logical_width"],
        id_policy=id_policy,
        padding_id=checked.padding_id,
        purpose=str(purpose),
        token_blocks=token_blocks(mesh, checked.table.names, checked.data.names),
    )
