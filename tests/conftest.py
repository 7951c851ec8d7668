"""What every test shares: eight CPU devices in one process, asked for before jax is imported."""

from __future__ import annotations

import os

_DEVICE_COUNT = "--xla_force_host_platform_device_count"

if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT}=8".strip()
# The GPU suite sets this itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
