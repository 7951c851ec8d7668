"""What the processes of these tests do with tables. Each function is the whole program of a process."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import jax
import numpy as np


def join(number: int, size: int, port: int, **options: Any) -> Any:
    """Joins the job; a mesh over the devices of all its processes."""
    from jax_bridge.processes import starting

    starting.initialize(f"127.0.0.1:{port}", size, number, **options)
    return jax.sharding.Mesh(np.array(jax.devices()), ("table",))


def fifty_steps(number: int, size: int, port: int, cases: list[list[Any]], stalenesses: list[int]) -> dict[str, Any]:
    """The digest of each run of the fifty steps: everything that they give, on every process. And the bytes that each
    has sent."""
    from tests.jax_bridge import _fifty_steps as fifty
    from tests.jax_bridge import _programs as programs

    mesh = join(number, size, port)
    digests, sent = [], []
    for staleness in stalenesses:
        for dtype, *rule in cases:
            handle = fifty.handle_on_mesh(dtype, mesh, name=f"fifty steps of {dtype}")
            outcome = programs.observe(
                handle, fifty.start_of(dtype), fifty.batches_of(dtype), fifty.rule_of(*rule), staleness=staleness
            )
            digests.append(outcome.run.digest())
            sent.append(outcome.stats["bytes_sent"])
    return {"process": jax.process_index(), "digests": digests, "sent": sent}


def digest_of(tree: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def train(number: int, size: int, port: int, staleness: int) -> dict[str, Any]:
    """A run of the two tables of tests/jax_bridge/_training.py, with a snapshot in its middle and a lookup beside."""
    from tests.jax_bridge import _training as training

    mesh = join(number, size, port)
    return {"process": jax.process_index(), **trained(training.make_step(mesh, staleness))}


def trained(step: Any) -> dict[str, Any]:
    from tests.jax_bridge import _training as training

    batches = training.make_batches(8)
    with step:
        state, history = training.train(step, training.start(step), [*itertools.pairwise(batches[:5])])
        looked_up = step.tables["users"].lookup(state.tables["users"], np.array([[5, 7, 5]]))
        snapshot = step.snapshot(state)
        state, more = training.train(step, state, [*zip(batches[4:], [*batches[5:], None], strict=True)])
        state = step.flush(state)
        through = training.arrays_of(step, state)
        state = step.restore(snapshot)
        state, _ = training.train(step, state, [*zip(batches[4:], [*batches[5:], None], strict=True)])
        again = training.arrays_of(step, step.flush(state))
        stats = step.stats()
    return {
        "through": digest_of(through),
        "again": digest_of(again),
        # But for the loss, which XLA sums in an order that depends on the processes.
        "history": digest_of([{name: x for name, x in m.items() if name != "loss"} for m in [*history, *more]]),
        "looked_up": digest_of(np.asarray(looked_up)),
        "snapshot": digest_of({key: value for key, value in snapshot.items() if value is not None}),
        "lookups": stats["users"]["lookups"],
    }
