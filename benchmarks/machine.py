"""What a figure has to be read with: date, machine and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "jax", "jaxlib", "numpy", "fbgemm-gpu-cpu", "wrap-torch2jax")


def describe() -> dict[str, Any]:
    """Date, processor, cores, memory in GiB, and versions; a package that is not installed is None."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def in_a_line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{machine['date'][:10]}; {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"Python {machine['python']}, {versions}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
