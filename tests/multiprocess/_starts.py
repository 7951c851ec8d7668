"""How the processes of these tests start. Each function is the whole program of a process."""

from __future__ import annotations

import os
import socket
from typing import Any

from tests.multiprocess._children import outcome


def from_environment(number: int, size: int, port: int) -> Any:
    import jax

    from jax_bridge.processes import starting

    job = starting.initialize(timeout_seconds=40)
    again = starting.initialize(timeout_seconds=40)
    other = outcome(lambda: starting.initialize("127.0.0.1:9", 7, 3))
    return [job.process_id, job.num_processes, job == again, jax.process_index(), jax.device_count(), other]


def refused_starts(number: int, size: int, port: int) -> Any:
    from jax_bridge.processes import starting

    def within(environment: dict[str, str], *arguments: Any) -> dict[str, Any]:
        os.environ.update(environment)
        try:
            return outcome(lambda: starting.initialize(*arguments, timeout_seconds=1))
        finally:
            for name in environment:
                del os.environ[name]

    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results = {
        "nothing": within({}),
        "rank": within({**torchrun, "RANK": "2"}),
        "half": within({"RANK": "1"}),
        "contradiction": within(torchrun, None, 4),
        "alone": within({}, f"127.0.0.1:{port}", 2, 0),
        "unreachable": within({}, f"127.0.0.1:{port}", 2, 1),
    }
    with socket.create_server(("127.0.0.1", port)):
        results["taken"] = within({}, f"127.0.0.1:{port}", 2, 0)
    import jax

    jax.devices()
    results["late"] = within(torchrun)
    return results


def different_sizes(number: int, size: int, port: int) -> Any:
    from jax_bridge.processes import starting

    return outcome(lambda: starting.initialize(f"127.0.0.1:{port}", size + number, number, timeout_seconds=20))
