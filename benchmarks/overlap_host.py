"""One host of the overlap benchmark: does what it is told on standard input, a line of JSON each, and answers likewise.

`python -m benchmarks.overlap_host NUMBER SIZE`, started by benchmarks.overlap on every host at once.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import links

COORDINATOR_PORT = 4000
ANSWER = "ANSWER "


def main() -> None:
    number, size = int(sys.argv[1]), int(sys.argv[2])
    # One thread of dense work a device: the hosts share the machine's cores.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1"
    os.environ["GLOO_SOCKET_IFNAME"] = links.DEVICE
    os.environ["JAX_PLATFORMS"] = "cpu"
    host = Host(number, size)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(f"{ANSWER}{json.dumps(getattr(host, what)(**arguments))}", flush=True)


class Host:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._steps: dict[tuple[str, int], Any] = {}

    def round_trip(self) -> float | None:
        """Seconds between the last host and the first, over the link; None on the first."""
        if self.number == self.size - 1:
            return links.round_trip(0)
        if self.number == 0:
            links.echo(0)
        return None

    def start(self) -> dict[str, Any]:
        from jax_bridge.processes import starting

        starting.initialize(f"{links.address_of(0)}:{COORDINATOR_PORT}", self.size, self.number, timeout_seconds=60)
        import jax
        import torch

        from benchmarks.overlap_steps import Workload

        self._work = Workload()
        return {"jax": jax.__version__, "torch": torch.__version__, "devices": jax.device_count()}

    def measure(
        self, kind: str, staleness: int, forward: int, backward: int, warm_up: int, steps: int
    ) -> dict[str, Any]:
        """`steps` steps after a warm-up: the exposed wait a step, and `pieces`, in seconds. `forward` and `backward`
        are numbers of matrix products."""
        import jax

        import jax_bridge as ae
        from benchmarks.overlap_steps import STEPS

        if (kind, staleness) not in self._steps:
            self._steps[kind, staleness] = STEPS[kind](self._work, staleness)
        step = self._steps[kind, staleness]
        before = after = 0.0
        for k, loss in enumerate(step.run(warm_up + steps + 1, self._work.counts(forward, backward))):
            jax.block_until_ready(loss)
            if k == warm_up - 1:
                ae.start_timeline()
                before = exposed_wait(step.handle)
            if k == warm_up + steps - 1:
                after = exposed_wait(step.handle)
        return {"exposed": (after - before) / steps, **pieces(ae.stop_timeline(), steps)}

    def end(self) -> None:
        for step in self._steps.values():
            step.close()


def exposed_wait(handle: Any) -> float:
    """Seconds that done calls have waited, mean over this process's ranks."""
    import jax

    from jax_bridge import runtime

    # As stats() says it, which divides by the ranks of all processes.
    return runtime.native().stats(handle.context_id)["exposed_wait_ns"] * 1e-9 / jax.local_device_count()


def pieces(events: Sequence[Any], steps: int) -> dict[str, list[float]]:
    """By step, on the first device: the time from one forward to the next, and the forward and backward in it."""
    device = min(event.device for event in events)
    times = collections.defaultdict(list)
    for event in events:
        if event.device == device:
            times[event.name].append(event.nanoseconds * 1e-9)
    found: dict[str, list[float]] = {"step": [], "dense": []}
    for begin, end in itertools.islice(itertools.pairwise(times["forward"]), steps):
        ((forward_ends,), (backward,), (backward_ends,)) = (
            [time for time in times[name] if begin <= time < end]
            for name in ("forward ends", "backward", "backward ends")
        )
        found["step"].append(end - begin)
        found["dense"].append(forward_ends - begin + backward_ends - backward)
    return found


if __name__ == "__main__":
    main()
