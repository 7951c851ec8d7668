"""What every test shares: eight CPU devices in one process, asked for before jax is imported.

Beside each other (``make test TEST_ARGS="-n 2 --dist loadgroup"``) tests of one file stay together, and those that
start processes of their own, most of which have time limits to keep, follow one after the other.
"""

from __future__ import annotations

import os

import pytest

_DEVICE_COUNT = "--xla_force_host_platform_device_count"

if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT}=8".strip()
# The GPU suite sets this itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        several = item.get_closest_marker("multiprocess") is not None
        item.add_marker(pytest.mark.xdist_group("processes" if several else item.nodeid.partition("::")[0]))
