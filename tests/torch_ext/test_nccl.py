"""GPUs of several processes, as far as a machine without one can tell: the environment, and what a build lacks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from torch_ext import nccl, process_groups

GOOD = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "NCCL_RUNTIME_CONNECT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
INTERFACES = ["lo", "eth0", "eth1", "docker0"]


def problems(**changes: str | None) -> list[str]:
    environ = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    return nccl.environment_problems(environ, INTERFACES)


def test_an_environment_that_fits_has_no_problems():
    assert problems() == []
    assert problems(CUDA_DEVICE_MAX_CONNECTIONS="16", NCCL_LAUNCH_ORDER_IMPLICIT=" 1 ") == []


@pytest.mark.parametrize("value", [None, "", "0", "2", "yes"])
@pytest.mark.parametrize(
    ("name", "wanted"), [("NCCL_LAUNCH_ORDER_IMPLICIT", "must be 1"), ("NCCL_RUNTIME_CONNECT", "must be 0")]
)
def test_what_would_hang_is_named_with_its_value_and_what_it_must_be(name, wanted, value):
    if (name, value) == ("NCCL_RUNTIME_CONNECT", "0"):
        value = "1"
    (problem,) = problems(**{name: value})
    assert problem.startswith(f"{name} is {value!r}, and {wanted}: " if value else f"{name} is not set, and {wanted}: ")


@pytest.mark.parametrize("value", [None, "1", "8", "15", "-1", "many"])
def test_too_few_hardware_queues_are_named(value):
    (problem,) = problems(CUDA_DEVICE_MAX_CONNECTIONS=value)
    assert problem.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS is {value!r}" if value else "CUDA_DEVICE_MAX_CONNECTIONS")
    assert "must be at least 16" in problem


@pytest.mark.parametrize("value", ["eth", "eth0", "=eth0", "=ib0,eth1", "ib,lo", "^docker", "^=eth0,lo", "^", "="])
def test_an_interface_variable_that_leaves_one_is_fine(value):
    assert problems(NCCL_SOCKET_IFNAME=value) == []


@pytest.mark.parametrize("value", ["ib0", "=eth", "eth01", "ib,ens", "^lo,eth,docker"])
def test_an_interface_variable_that_names_none_is_named_with_what_there_is(value):
    (problem,) = problems(NCCL_SOCKET_IFNAME=value)
    assert problem.startswith(f"NCCL_SOCKET_IFNAME={value} ")
    assert "lo, eth0, eth1, docker0" in problem


def test_everything_that_is_wrong_is_said_at_once_with_what_to_set(monkeypatch):
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(process_groups.ProcessGroupError) as raised:
        nccl.require_environment()
    message = str(raised.value)
    assert "\n" not in message
    for name in [*GOOD, "NCCL_SOCKET_IFNAME=nowhere0"]:
        assert name in message
    assert message.endswith("NCCL_LAUNCH_ORDER_IMPLICIT=1 NCCL_RUNTIME_CONNECT=0 CUDA_DEVICE_MAX_CONNECTIONS=32")
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    nccl.require_environment()


def test_a_build_that_lacks_nccl_or_cuda_says_so(monkeypatch):
    monkeypatch.setattr(nccl, "dist", SimpleNamespace(is_available=lambda: True))
    assert "has no torch.distributed with NCCL" in str(nccl.missing())
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", object, raising=False)
    monkeypatch.setattr(nccl, "load", SimpleNamespace)
    assert nccl.missing() == "the native module was built without CUDA"
    monkeypatch.setattr(nccl, "load", lambda: SimpleNamespace(connect_device_transport=None))
    assert nccl.missing() is None


class Connected(Exception):
    """What a stand-in for NCCL raises when it is called, instead of going on."""


def test_torch_starts_no_thread_that_could_end_the_process(monkeypatch):
    """The variables that decide are set while a group is made, and only then."""
    seen = {}

    class Options:
        def __init__(self, is_high_priority_stream):
            self.config = SimpleNamespace(blocking=None)

    def make(store, rank, size, options):
        seen.update({name: os.environ.get(name) for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG")})
        seen["blocking"], seen["timeout"] = options.config.blocking, options._timeout.total_seconds()
        raise Connected

    make.Options = Options
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_NCCL_DESYNC_DEBUG", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(nccl, "joined_store", lambda address: None)
    monkeypatch.setattr(
        nccl, "dist", SimpleNamespace(ProcessGroupNCCL=make, PrefixStore=lambda prefix, store: (prefix, store))
    )
    with pytest.raises(Connected):
        nccl.connect("127.0.0.1:1", 0, 2, gpu=0, prefix="table", timeout_seconds=7)
    assert seen == {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_DESYNC_DEBUG": "0", "blocking": 0, "timeout": 7.0}
    assert os.environ["TORCH_NCCL_DESYNC_DEBUG"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
