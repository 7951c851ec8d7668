"""A job in which a process is replaced, and one that is killed as a whole. Each function is a whole program."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np

from tests.multiprocess import _children
from tests.multiprocess._tables import digest_of, join

STEPS = 9
AT = 4  # steps before the state that all go on from
DIES_AT = 5
PARAMS = {"shift": np.float32(0)}


def go_on(step: Any, state: Any, last: int) -> Any:
    """The steps up to number ``last``, each of which announces the next batch."""
    from tests.jax_bridge import _training as training

    batches = training.make_batches(STEPS)
    pairs = [*zip(batches, [*batches[1:], None], strict=True)]
    return training.train(step, state, pairs[int(state.step) : last])[0]


def finish(step: Any, state: Any) -> str:
    """Trains to the end; the digest of all that is there then."""
    from tests.jax_bridge import _training as training

    return digest_of(training.arrays_of(step, step.flush(go_on(step, state, STEPS))))


def replaced(number: int, size: int, port: int, directory: str, rejoin: bool = False) -> dict[str, Any]:
    """Process 1 dies; one that takes its place goes on with the survivors, from a checkpoint and from a snapshot."""
    from jax_bridge import Checkpoints, FailedContextError
    from jax_bridge.processes import survivors
    from tests.jax_bridge import _training as training

    mesh = join(number, size, port, timeout_seconds=60, rejoin=rejoin)
    snapshot = Path(directory) / "snapshot"
    told = ""
    if not rejoin:
        step = training.make_step(mesh, 1)
        state = go_on(step, training.start(step), AT)
        Checkpoints(f"{directory}/checkpoints", step).save(state)
        taken = step.snapshot(state)
        if number == 0:
            snapshot.write_bytes(pickle.dumps(taken))
        state = go_on(step, state, DIES_AT)
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            finish(step, state)
        except FailedContextError as error:
            told = str(error)
        step.close()
        survivors.start_over([process for process in range(size) if process != 1])
        _children.say(f"closed {number}")
        mesh = mesh_of_all()
    with training.make_step(mesh, 1) as step:
        checkpoints = Checkpoints(f"{directory}/checkpoints", step)
        found = checkpoints.steps()
        from_checkpoint = finish(step, checkpoints.restore(PARAMS))
        from_snapshot = finish(step, step.restore(pickle.loads(snapshot.read_bytes())))
    return {"told": told, "found": found, "from_checkpoint": from_checkpoint, "from_snapshot": from_snapshot}


def mesh_of_all() -> Any:
    import jax

    return jax.sharding.Mesh(np.array(jax.devices()), ("table",))


def train_for_ever(number: int, size: int, port: int, directory: str) -> None:
    """Saves in the middle of the pipeline and goes on, step after step, until it is killed."""
    from jax_bridge import Checkpoints
    from tests.jax_bridge import _training as training

    step = training.make_step(join(number, size, port), 1)
    state = go_on(step, training.start(step), AT)
    Checkpoints(directory, step).save(state)
    batches = training.make_batches(STEPS)
    while True:
        count = int(state.step)
        if count == AT + 2:
            _children.say(f"has gone on {number}")
        state, _ = step(state, batches[count % STEPS], batches[(count + 1) % STEPS])


def resume(number: int, size: int, port: int, directory: str) -> Any:
    from jax_bridge import Checkpoints
    from tests.jax_bridge import _training as training

    with training.make_step(join(number, size, port), 1) as step:
        checkpoints = Checkpoints(directory, step)
        return [checkpoints.latest(), finish(step, checkpoints.restore(PARAMS))]
