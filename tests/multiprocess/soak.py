"""A long run of random shapes and ids over several processes: memory, threads and open files must stay flat.

    python -m tests.multiprocess.soak --minutes 30
    python -m tests.multiprocess.soak --steps 20000

Each turn makes a step of its own over tables of random sizes, trains a random number of batches of random sizes, looks
rows up, takes a snapshot now and then, and closes. Ends with 1 where something grows after the warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Of the turns that are counted: caches and pools still fill up.
WARM_UP = 0.3
LEAST_TURNS = 12
FILES_PER_TURN = 0.02
KIB_PER_TURN = 64.0
SLACK_KIB = 24 * 1024  # a growth that is less than this in all is the noise of an allocator


def soak(number: int, size: int, port: int, seconds: float, steps: int, kinds_of_tables: int) -> dict[str, Any]:
    """One process. All draw the same numbers, and process 0 decides when to end. Shapes are drawn from a few, since
    each compiles programs that XLA keeps; time counts from when all have been compiled."""
    import optax

    from jax_bridge import AsyncEmbedding, RowwiseAdagrad, train_step
    from jax_bridge.processes import starting

    from . import _children, _faulty

    starting.initialize(f"127.0.0.1:{port}", size, number)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("table",))
    shapes = np.random.default_rng(5)
    kinds = [
        {
            "rows": int(shapes.integers(20, 400)),
            "width": int(shapes.integers(3, 40)),
            "tokens": [int(size * n) for n in shapes.integers(1, 30, 2)],
            "staleness": int(turn % 2),
            "dtype": ("float32", "bfloat16")[turn % 2],
        }
        for turn in range(kinds_of_tables)
    ]
    made = {}
    for index, kind in enumerate(kinds):
        table = AsyncEmbedding(
            mesh,
            table_axis="table",
            rows=kind["rows"],
            width=kind["width"],
            name=f"soak {index}",
            dtype=kind["dtype"],
            optimizer=RowwiseAdagrad(learning_rate=0.05, half_life=100),
        )

        def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
            return ((rows["table"].astype(np.float32) * params).sum(-1) ** 2).mean()

        made[index] = train_step(
            {"table": table}, loss_fn, optax.sgd(0.01), ids_of=lambda b: {"table": b}, staleness=kind["staleness"]
        )
    rng = np.random.default_rng(7)
    begin, done, turn = time.monotonic(), 0, 0
    seen: list[list[float]] = []
    while go_on(turn < 2 * kinds_of_tables or (time.monotonic() - begin < seconds and done < steps)):
        index = turn % kinds_of_tables
        kind, step = kinds[index], made[index]
        compiles = turn < 2 * kinds_of_tables
        tokens = kind["tokens"][turn // kinds_of_tables if compiles else int(rng.integers(2))]
        batches = [rng.integers(0, kind["rows"], tokens).astype(np.int32) for _ in range(int(rng.integers(2, 12)))]
        with step:
            state = step.init(np.full(kind["width"], 0.1, np.float32), jax.random.key(turn))
            for batch, upcoming in zip(batches, [*batches[1:], None], strict=True):
                state, _ = step(state, batch, upcoming)
            if compiles or turn % 4 == 0:
                state = step.restore(step.snapshot(state))
            state = step.flush(state)
            step.tables["table"].lookup(state.tables["table"], batches[0][:5])
        turn += 1
        if compiles:
            begin = time.monotonic()
            continue
        done += len(batches)
        gc.collect()
        seen.append([_children.open_files(), len(os.listdir("/proc/self/task")), _faulty.resident_kib()])
    return {"turns": len(seen), "steps": done, "seconds": time.monotonic() - begin, "seen": seen}


def go_on(wish: bool) -> bool:
    """What process 0 wishes, in every process."""
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.int32(wish)))


def judge(results: list[dict[str, Any]]) -> list[str]:
    """Prints the slopes of every process after the warm-up; what grows."""
    problems = []
    for number, result in enumerate(results):
        if result["turns"] < LEAST_TURNS:
            problems.append(f"process {number}: {result['turns']} turns say nothing, at least {LEAST_TURNS} are needed")
            continue
        seen = np.asarray(result["seen"], np.float64)[int(WARM_UP * result["turns"]) :]
        turns = np.arange(len(seen))
        slopes = [float(np.polyfit(turns, column, 1)[0]) for column in seen.T]
        files, threads, kib = slopes
        grown = kib * len(seen)
        print(
            f"process {number}: {result['turns']} turns, {result['steps']} steps, {result['seconds']:.0f} s; "
            f"a turn adds {files:+.4f} open files (now {seen[-1][0]:.0f}), "
            f"{threads:+.4f} threads (now {seen[-1][1]:.0f}), {kib:+.1f} KiB (now {seen[-1][2] / 1024:.0f} MiB)"
        )
        if files > FILES_PER_TURN and files * len(seen) > 2:
            problems.append(f"process {number}: open files grow")
        if threads > FILES_PER_TURN and threads * len(seen) > 4:
            problems.append(f"process {number}: threads grow")
        if kib > KIB_PER_TURN and grown > SLACK_KIB:
            problems.append(f"process {number}: memory grows by {grown / 1024:.0f} MiB in {len(seen)} turns")
    return problems


def run(processes: int, seconds: float, steps: int, directory: Path, kinds_of_tables: int = 6) -> list[dict[str, Any]]:
    from tests.multiprocess.conftest import Job, free_port

    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "ASYNC_EMB_TIMEOUT_SECONDS": "60",
        "MALLOC_ARENA_MAX": "2",  # or the arenas of a hundred threads hide what grows
    }
    given = {"size": processes, "port": free_port(), "seconds": seconds, "steps": steps}
    given["kinds_of_tables"] = kinds_of_tables
    job = Job("tests.multiprocess.soak:soak", given, [environment] * processes, directory)
    try:
        return job.wait(seconds + 120 * kinds_of_tables)
    finally:
        job.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=20_000, help="ends after so many, if that comes first")
    parser.add_argument("--write", type=Path, help="a JSON file with what was seen after each turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run(options.processes, 60 * options.minutes, options.steps, Path(folder))
    if options.write:
        options.write.write_text(json.dumps(results))
    problems = judge(results)
    print("\n".join(problems) if problems else "nothing grows")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
