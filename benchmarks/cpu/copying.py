"""What a plain copy of the machine moves in a second: the measure for everything that memory bounds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import Times


def plain_copy(read_and_written: int) -> Callable[[], object]:
    """A run that moves about so many bytes, half of them read and half written, between buffers that exist."""
    source = torch.ones(max(1, read_and_written // 8), dtype=torch.float32)
    destination = torch.zeros_like(source)  # its pages are there
    return lambda: destination.copy_(source)


def bandwidth(times: Times, read_and_written: int) -> float:
    """Bytes a second, read and written together, of ``plain_copy``."""
    return read_and_written / (times.p50 * 1e-6)
