"""How many compilers run at once: what ``MAX_JOBS`` says, or else what cores and memory allow.

A container's own limits count, those of control groups (version 1 and 2), which /proc/meminfo does not know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_ext.build_errors import BuildError

# A file that includes ATen needs about this much memory to compile.
BYTES_PER_JOB = 2 * 1024**3


def parallel_jobs(environ: Mapping[str, str] | None = None, system: Path = Path("/")) -> int:
    """The number of compilers to run at once, at least 1.

    Args:
      environ: the environment; that of the process if None. Its ``MAX_JOBS`` is taken as it is.
      system: the folder that has ``proc`` and ``sys``.

    Raises BuildError if ``MAX_JOBS`` is not a positive whole number.
    """
    wish = (os.environ if environ is None else environ).get("MAX_JOBS", "").strip()
    if not wish:
        return max(1, min(available_cores(system), available_bytes(system) // BYTES_PER_JOB))
    if not wish.isascii() or not wish.isdigit() or int(wish) == 0:
        raise BuildError(
            f"MAX_JOBS={wish!r} is not a positive whole number.\n"
            "Correct it, or unset it to run as many compilers as cores and memory allow"
        )
    return int(wish)


def available_cores(system: Path = Path("/")) -> int:
    """The cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu", system):
        quota = _numbers(group / "cpu.max")  # "200000 100000"
        quota = quota or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
            cores = min(cores, quota[0] // quota[1])
    return max(1, cores)


def available_bytes(system: Path = Path("/")) -> int:
    """The memory that this process may still take."""
    available = sys.maxsize
    if free := _field(system / "proc" / "meminfo", "MemAvailable:"):
        available = free * 1024
    for group in _control_groups("memory", system):
        for limit, current, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if bound := _numbers(group / limit):
                # The kernel gives up what it keeps of files before it refuses memory.
                reclaimable = _field(group / "memory.stat", cached) or 0
                used = sum(_numbers(group / current)) - reclaimable
                available = min(available, bound[0] - max(0, used))
    return max(0, available)


def _control_groups(controller: str, system: Path) -> Iterator[Path]:
    """The folders of the control groups that bound this process, the innermost first."""
    for line in _text(system / "proc" / "self" / "cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        mount = system / "sys" / "fs" / "cgroup"
        if controllers:  # version 1
            if controller not in controllers.split(","):
                continue
            mount /= controller
        # In a container without its own namespace the inner folders are not there; its root is at the mount.
        group = mount / name.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _numbers(path: Path) -> list[int]:
    """The numbers of a file; none if it is missing, or says "max"."""
    words = _text(path).split()
    return [int(word) for word in words] if all(word.lstrip("-").isdigit() for word in words) else []


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
