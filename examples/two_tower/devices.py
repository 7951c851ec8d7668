"""Host devices for examples that are programs of their own."""

from __future__ import annotations

import os
import re


def use_host_devices(devices: int) -> None:
    """Makes JAX, which must not have been imported yet, split the host's CPU into `devices` devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
