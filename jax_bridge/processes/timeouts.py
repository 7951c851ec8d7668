"""How long anything waits for another process."""

from __future__ import annotations

import math
import os
import time

from torch_ext.common.timeouts import DEFAULT_TIMEOUT_SECONDS, timeout_seconds

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "bound_collectives", "timeout_seconds"]

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25

_XLA_BOUNDS = ("xla_cpu_collective_timeout_seconds", "xla_cpu_collective_call_terminate_timeout_seconds")


def bound_collectives() -> None:
    """Lets XLA's own collectives between CPU devices end with an error where a process does not come: a second after
    the contexts' timeout, for those can say who it is. What XLA_FLAGS says of them stays.

    Without it such a collective waits for half an hour, and XLA ends the process (SIGABRT) when one of its devices has
    waited 40 s for another one. Options of a single program do not reach these two: XLA reads them from XLA_FLAGS, when
    JAX makes its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    bound = min(math.ceil(timeout_seconds()) + 1, 2**31 - 1)
    missing = [f"--{name}={bound}" for name in _XLA_BOUNDS if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


class Patience:
    """How long one wait may last, and the pauses between two looks at what is waited for, which grow."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()
        self._pause = _FIRST_PAUSE_SECONDS

    def passed(self) -> float:
        return time.monotonic() - self._start

    def remaining(self) -> float:
        return max(0.0, self.seconds - self.passed())

    def over(self) -> bool:
        return self.remaining() == 0

    def pause(self) -> None:
        """JAX's service has no wait for a change of a directory."""
        time.sleep(min(self._pause, self.remaining()))
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def quicken(self) -> None:
        """Pauses are short again: what is waited for now comes soon."""
        self._pause = _FIRST_PAUSE_SECONDS
