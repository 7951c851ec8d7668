"""Memory that a step must not take: what torch has a view of at the moment, and what torch owns.

XLA takes a donated buffer only if nobody else holds it; otherwise it copies in silence, and the other holder goes on
with memory that the table has left. So whoever donates asks here first. ``jax_bridge.dlpack`` makes the entries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .errors import PipelineError

_numbers = itertools.count()
# By number. Entries of torch's memory go when JAX lets go of it, on any thread and in the middle of anything: no lock.
_claims: dict[int, Claim] = {}


@dataclasses.dataclass(frozen=True)
class Claim:
    """Bytes [first, last) of this process's memory.

    Attributes:
        kind: "view" where torch borrows memory of JAX's, "adopted" where JAX shares memory of torch's.
        what: the array, for messages.
    """

    kind: Literal["view", "adopted"]
    first: int
    last: int
    what: str


def claim(kind: Literal["view", "adopted"], first: int, size: int, what: str) -> int:
    """Enters ``size`` bytes from the address ``first`` on. Returns the number to ``release`` them by."""
    number = next(_numbers)
    _claims[number] = Claim(kind, first, first + size, what)
    return number


def release(number: int) -> None:
    """Forgets a claim."""
    _claims.pop(number, None)


def claims_on(first: int, size: int) -> list[Claim]:
    """Those on any of ``size`` bytes from the address ``first`` on."""
    last = first + size
    return [claim for claim in tuple(_claims.values()) if max(claim.first, first) < min(claim.last, last)]


def blocks_of(array: Any) -> Iterator[tuple[int, int]]:
    """(address, bytes) of every shard of an array that is in this process and not empty."""
    for shard in array.addressable_shards:
        if shard.data.nbytes:
            yield shard.data.unsafe_buffer_pointer(), shard.data.nbytes


def require_donatable(*trees: Any) -> None:
    """Raises PipelineError where donating an array of these trees would copy it in silence.

    That is while torch has a view of it, and where torch owns its memory. ``train_step`` asks before every step; call
    this before a compiled step of your own that donates::

        require_donatable(table, row_state)
        table, row_state = step(table, row_state, batch)    # jax.jit(..., donate_argnums=(0, 1))
    """
    if not _claims:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees[0] if len(trees) == 1 else trees):
        if not _has_memory(leaf):
            continue
        for first, size in blocks_of(leaf):
            for claim in claims_on(first, size):
                raise _refused(jax.tree_util.keystr(path), claim)


def _has_memory(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and not leaf.is_deleted()
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def _refused(where: str, claim: Claim) -> PipelineError:
    array = f"the array at {where}" if where else "an array"
    if claim.kind == "view":
        error = PipelineError(
            f"async_emb: {array} was to be donated while torch has a view of it ({claim.what}): XLA would copy it in "
            "silence, and the view would go on showing the old values"
        )
        error.add_note("Leave the `with view(...)` block first, and call again with the same state: nothing has run.")
        return error
    error = PipelineError(
        f"async_emb: {array} was to be donated, but torch owns its memory ({claim.what}, adopted): XLA would copy it "
        "in silence, and torch would go on with the old values"
    )
    error.add_note(
        "Give the step memory of XLA's: AsyncEmbedding.from_arrays for a table, adopt(tensor, copy=True) for another "
        "array. What is to be trained on both sides starts in JAX, and is lent to torch with view. Nothing has run."
    )
    return error
