"""Jobs in which one process, the victim, comes to harm in the middle of a step. Each function is a whole program."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from . import _children

# Where it happens, and which native call of the victim comes next: after this many of them.
POINTS = ("lookup start", "lookup wait", "update start", "update wait", "checkpoint")
FAULTS = ("kill", "stop", "link")
CONFIGURATIONS = ("batch size", "num_unique", "learning rate", "rows")
HURT_STEP = 3


def clock() -> float:
    """Seconds, the same in all processes of a machine."""
    return time.monotonic()


def hurt(fault: str, port: int) -> None:
    """What happens to the victim. Returns only where it lives on."""
    (_children.DIRECTORY / "hurt").write_text(repr(clock()))
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "link":
        cut_links(port)
    else:
        raise ValueError(fault)


def cut_links(coordinator_port: int) -> int:
    """Ends every TCP connection of this process, but those to JAX's coordinator, which would end the process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.type != socket.SOCK_STREAM or end.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if coordinator_port in (end.getpeername()[1], end.getsockname()[1]):
                continue
            end.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def report(work: Callable[[], None], close: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What a process has to say about the end of its work, and about closing."""
    from jax_bridge.processes import starting

    told: dict[str, Any] = {"type": None, "text": "", "notes": [], "at": 0.0}
    try:
        work()
    except Exception as error:
        told = {
            "type": type(error).__name__,
            "text": str(error),
            "notes": list(getattr(error, "__notes__", ())),
        }
    told["at"] = clock()
    with contextlib.suppress(Exception):
        close()
    told["closed_at"] = clock()
    starting.shutdown()
    told["ended_at"] = clock()
    return told


def join(number: int, size: int, port: int) -> Any:
    from jax_bridge.processes import starting

    starting.initialize(f"127.0.0.1:{port}", size, number, timeout_seconds=60)
    return jax.sharding.Mesh(np.array(jax.devices()), ("table",))


# ---- A step of one's own


class OwnStep:
    """One table; a program for each call, so that anything can happen between two of them."""

    ROWS, WIDTH, TOKENS = 40, 16, 32

    def __init__(self, mesh: Any, *, name: str = "own", changed: str = "") -> None:
        import jax_bridge as ae

        if changed == "batch size":
            self.TOKENS *= 2
        if changed == "rows":
            self.ROWS += 1
        self.rate = 0.2 if changed == "learning rate" else 0.1
        self.mesh = mesh
        self.handle = ae.make_context_handle(
            mesh,
            "table",
            data_axis="table",
            tokens_per_batch=self.TOKENS,
            emb_width=self.WIDTH,
            num_unique=self.TOKENS - (changed == "num_unique"),
            num_devices_per_node=len(mesh.local_devices),
            name=name,
            dtype=np.float32,
        )
        self.ids = np.random.default_rng(1).integers(0, 40, self.TOKENS).astype(np.int32)

    def reset(self) -> None:
        """Fresh arrays, on a context that is open."""
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        import jax_bridge as ae
        from jax_bridge.placing import put

        ae.open_context(self.handle)
        self.table = put(
            np.random.default_rng(0).normal(size=(self.ROWS, self.WIDTH)).astype(np.float32),
            NamedSharding(self.mesh, P(None, "table")),
        )
        self.state = put(np.zeros(self.ROWS, np.float32), NamedSharding(self.mesh, P()))
        self.placed = put(self.ids, NamedSharding(self.mesh, P("table")))

    @functools.cached_property
    def programs(self) -> tuple[Any, ...]:
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        import jax_bridge as ae

        columns, tokens, everywhere = P(None, "table"), P("table"), P()
        on_shards = functools.partial(jax.shard_map, mesh=self.mesh)
        handle = self.handle

        def start(table: Any, ids: Any) -> Any:
            return ae.lookup_start(ids, table, jnp.zeros(1), handle)

        def done(pin: Any) -> Any:
            rows = ae.lookup_done(pin, handle)
            return rows, pin

        def update(table: Any, state: Any, rows: Any, pin: Any) -> Any:
            pin = ae.stage_update(rows * 0.5, None, None, True, pin, handle)
            return ae.rowwise_adagrad_update_start(
                table, state, pin, handle, learning_rate=self.rate, eps=1e-8, decay_factor=1.0
            )

        def update_done(pin: Any) -> Any:
            norm, _, _, _ = ae.rowwise_adagrad_update_done(pin, handle)
            return norm

        return (
            jax.jit(on_shards(start, in_specs=(columns, tokens), out_specs=(columns, tokens)), donate_argnums=0),
            jax.jit(on_shards(done, in_specs=tokens, out_specs=(tokens, tokens))),
            jax.jit(
                on_shards(
                    update, in_specs=(columns, everywhere, tokens, tokens), out_specs=(columns, everywhere, tokens)
                ),
                donate_argnums=(0, 1),
            ),
            jax.jit(on_shards(update_done, in_specs=tokens, out_specs=everywhere)),
        )

    def calls(self) -> Iterator[str]:
        """One step, a call at a time; yields before each."""
        import jax_bridge as ae

        start, done, update, update_done = self.programs
        yield "lookup start"
        self.table, pin = start(self.table, self.placed)
        yield "lookup wait"
        rows, pin = done(pin)
        jax.block_until_ready(rows)
        yield "update start"
        self.table, self.state, pin = update(self.table, self.state, rows, pin)
        yield "update wait"
        self.norm = jax.block_until_ready(update_done(pin))
        ae.check(self.handle)

    def step(self) -> float:
        for _ in self.calls():
            pass
        return float(self.norm)

    def save(self) -> Any:
        from jax_bridge import placing

        return placing.fetch(self.table)

    def run(self, steps: int, before: Callable[[int, str], None] = lambda step, call: None) -> None:
        from jax_bridge import runtime
        from jax_bridge.processes import survivors

        try:
            for step in range(1, steps + 1):
                for call in self.calls():
                    before(step, call)
                before(step, "checkpoint")
                self.save()
        except jax.errors.JaxRuntimeError as error:
            runtime.require_working(self.handle)  # its own words, instead of XLA's around them
            survivors.blame([self.handle], error, f"step {step}")
            raise


def own_step(number: int, size: int, port: int, fault: str, point: str, victim: int) -> Any:
    import jax_bridge as ae
    from jax_bridge.processes import survivors

    mesh = join(number, size, port)
    step = OwnStep(mesh, changed=point if fault == "configuration" and number == victim else "")

    def before(at: int, call: str) -> None:
        if number == victim and (at, call) == (HURT_STEP, point):
            hurt(fault, port)

    def work() -> None:
        if fault == "configuration":
            mark_start(number)
        step.reset()
        step.run(HURT_STEP + 2, before)

    def close() -> None:
        ae.close_context(step.handle)
        survivors.say_failed(range(size))

    return report(work, close)


def mark_start(number: int) -> None:
    if number == 0:
        (_children.DIRECTORY / "hurt").write_text(repr(clock()))


# ---- TrainStep


def train(number: int, size: int, port: int, fault: str, point: str, victim: int, staleness: int = 1) -> Any:
    """The two tables of tests/jax_bridge/_training.py. The fault comes by itself, while the step runs."""
    from jax_bridge import RowwiseAdagrad
    from tests.jax_bridge import _training as training

    mesh = join(number, size, port)
    tables: dict[str, Any] = {}
    shapes = dict(training.IDS_SHAPE)
    if fault == "configuration" and number == victim:
        if point == "learning rate":
            tables["optimizer"] = RowwiseAdagrad(learning_rate=0.2, half_life=20)
        elif point == "num_unique":
            tables["num_unique"] = 17
        elif point == "batch size":
            shapes = {name: (48, *shape[1:]) for name, shape in shapes.items()}
        elif point == "rows":
            training.ROWS["users"] += 4
    step = training.make_step(mesh, staleness, tables=tables)
    rng = np.random.default_rng(0)
    batches = [training.make_batch(rng, shapes) for _ in range(9)]
    holder: dict[str, Any] = {}

    def work() -> None:
        if fault == "configuration":
            mark_start(number)
        state = training.start(step)
        for count, (batch, upcoming) in enumerate(zip(batches, [*batches[1:], None], strict=True)):
            if number == victim and fault != "configuration" and count == HURT_STEP + 1:
                if point == "checkpoint":
                    hurt(fault, port)
                else:
                    jax.block_until_ready(state)
                    hurt_at(fault, port, point, step)
            if count == HURT_STEP + 1:
                holder["snapshot"] = step.snapshot(state)
            state, _ = step(state, batch, upcoming)
        step.flush(state)

    return report(work, step.close)


CALLS = {
    "lookup start": "stage_calls",  # of the step before: its lookup start has gone
    "lookup wait": "lookup_begin_calls",
    "update start": "lookup_done_calls",
    "update wait": "update_begin_calls",
}


def hurt_at(fault: str, port: int, point: str, step: Any) -> None:
    """Arms a thread that watches the native calls of this process, and comes in right after one of them."""
    from jax_bridge import runtime

    handle = step.program.handles["users"]
    name = CALLS[point]
    seen = runtime.stats(handle)[name]

    def watch() -> None:
        while runtime.stats(handle)[name] == seen:
            time.sleep(0.0002)
        hurt(fault, port)

    threading.Thread(target=watch, daemon=True).start()


# ---- Signals, stuck and slow processes, many contexts, and going on


def interrupted(number: int, size: int, port: int, point: str) -> Any:
    """The last process stops at a point of its fifth step, and the test interrupts process 1, which waits for it."""
    from tests.jax_bridge import _training as training

    signal.signal(signal.SIGINT, signal.default_int_handler)
    step = training.make_step(join(number, size, port), 1)
    batches = training.make_batches(8)

    def work() -> None:
        with step:
            state = training.start(step)
            for count, (batch, upcoming) in enumerate(itertools.pairwise(batches)):
                if count == 4 and number == size - 1:
                    jax.block_until_ready(state)
                    hurt_at("stop", port, point, step)
                state, _ = step(state, batch, upcoming)

    if number == 1:
        _children.end_as_a_program(work)
    return report(work)


def exits(number: int, size: int, port: int, point: str) -> None:
    """Process 1 leaves the program with status 3. The others do not expect it."""
    from tests.jax_bridge import _training as training

    def work() -> None:
        step = training.make_step(join(number, size, port), 1)
        if number == 1 and point == "before start":
            sys.exit(3)
        state = training.start(step)
        for count, (batch, upcoming) in enumerate(itertools.pairwise(training.make_batches(8))):
            if number == 1 and count == 3:
                sys.exit(3)  # the lookup of this batch has been started
            state, _ = step(state, batch, upcoming)

    _children.end_as_a_program(work)


def late(number: int, size: int, port: int, seconds: float) -> Any:
    """Process 1 comes to the third step's lookup_done so much later than the others."""
    from jax_bridge.processes import survivors

    def before(step: int, call: str) -> None:
        if number == 1 and (step, call) == (3, "lookup wait"):
            (_children.DIRECTORY / "hurt").write_text(repr(clock()))
            time.sleep(seconds)

    step = OwnStep(join(number, size, port))

    def work() -> None:
        step.reset()
        step.run(4, before)

    return report(work, lambda: survivors.say_failed(range(size)))


def many_contexts(number: int, size: int, port: int, count: int = 20) -> Any:
    """[open files, threads, resident KiB] after each time that a context was made, used and closed."""
    import jax_bridge as ae

    step = OwnStep(join(number, size, port))
    seen = []
    for _ in range(count):
        step.reset()
        step.step()
        ae.close_context(step.handle)
        time.sleep(0.1)
        seen.append([_children.open_files(), len(os.listdir("/proc/self/task")), resident_kib()])
    return seen


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
