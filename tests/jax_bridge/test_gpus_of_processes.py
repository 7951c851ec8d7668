"""A mesh over the GPUs of several processes, on a machine without one: what is refused, by which name, and who is asked
to connect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import torch_ext
from jax_bridge import ContextError, runtime
from jax_bridge.processes import coordination, meeting
from jax_bridge.processes.timeouts import Patience
from torch_ext import nccl, process_groups


def handle_over(processes: list[int]) -> Any:
    devices = [
        SimpleNamespace(id=10 + i, platform="gpu", process_index=process, local_hardware_id=i)
        for i, process in enumerate(processes)
    ]
    return SimpleNamespace(
        name="users",
        mesh=SimpleNamespace(devices=np.array(devices, dtype=object)),
        group_size=len(processes),
        flatten_replicas=tuple(device.id for device in devices),
    )


def test_a_build_without_cuda_refuses_them_by_name():
    if "cuda" in torch_ext.build_info():
        pytest.skip("the native module was built with CUDA")
    with pytest.raises(ContextError, match=r"async_emb context 'users': the mesh is of GPUs, but .*CUDA"):
        runtime.require_devices(handle_over([0, 1]))


def test_a_build_without_nccl_refuses_those_of_several_processes_alone(monkeypatch):
    monkeypatch.setattr(torch_ext, "require_cuda", lambda: None)
    monkeypatch.setattr(nccl, "missing", lambda: "torch has no NCCL")
    runtime.require_devices(handle_over([0, 0]))
    with pytest.raises(ContextError, match="the mesh is of GPUs of several processes, but torch has no NCCL"):
        runtime.require_devices(handle_over([0, 1]))
    monkeypatch.setattr(nccl, "missing", lambda: None)
    runtime.require_devices(handle_over([0, 1]))


def test_a_context_knows_the_numbers_of_its_own_gpus(monkeypatch):
    monkeypatch.setattr(torch_ext, "require_cuda", lambda: None)
    monkeypatch.setattr(nccl, "missing", lambda: None)
    assert runtime._local_gpus(handle_over([0, 1, 0, 1])) == {10: 0, 12: 2}


def connect(monkeypatch: pytest.MonkeyPatch, gpus: dict[int, int], **stand_ins: Any) -> tuple[list[Any], list[Any]]:
    """What the second half of a meeting of two processes connects, with stand-ins for what does it."""
    made: list[Any] = []

    class Transport(SimpleNamespace):
        def end(self) -> None:
            self.ended = True

    def between_hosts(*_: Any, prefix: str, **__: Any) -> Any:
        made.append(Transport(prefix=prefix, ended=False))
        return made[-1]

    def between_gpus(*_: Any, prefix: str, gpu: int, **__: Any) -> Any:
        made.append(Transport(prefix=prefix, gpu=gpu))
        return made[-1]

    monkeypatch.setattr(process_groups, "connect", between_hosts)
    monkeypatch.setattr(nccl, "connect", stand_ins.get("between_gpus", between_gpus))
    monkeypatch.setattr(meeting, "group_processes", lambda handle: [(0, 1)])
    monkeypatch.setattr(meeting, "_store_of", {})
    agreed = SimpleNamespace(id="go", store="127.0.0.1:1", hosts={0: "10.0.0.1", 1: "10.0.0.2"})
    handle = handle_over([1, 0, 1, 0])
    try:
        links = meeting._connect(handle, agreed, (0, 1), 0, Patience(30), gpus)  # type: ignore[arg-type]
    except ContextError as error:
        return [error], made
    return links, made


def test_processes_on_gpus_connect_hosts_twice_and_the_gpu_of_their_first_rank(monkeypatch):
    ((notices, pulse, between_gpus),), _ = connect(monkeypatch, {11: 1, 13: 3})
    assert (notices.prefix, pulse.prefix, between_gpus.prefix) == ("go/0", "go/0/pulse", "go/0")
    assert between_gpus.gpu == 1


def test_processes_on_cpus_connect_hosts_once(monkeypatch):
    (transport,), made = connect(monkeypatch, {})
    assert made == [transport]
    assert transport.prefix == "go/0"


def test_where_gpus_do_not_connect_the_hosts_connections_end_and_the_reason_is_told(monkeypatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise process_groups.ProcessGroupError("GPU 1 could not connect")

    (error,), made = connect(monkeypatch, {11: 1, 13: 3}, between_gpus=fails)
    assert "GPU 1 could not connect" in str(error)
    assert [transport.ended for transport in made] == [True, True]


def test_a_wrong_environment_is_found_before_the_others_count_on_this_process(monkeypatch):
    def wrong() -> None:
        raise process_groups.ProcessGroupError("NCCL_RUNTIME_CONNECT is not set")

    monkeypatch.setattr(nccl, "require_environment", wrong)
    put: list[str] = []
    monkeypatch.setattr(coordination, "put", lambda key, *_, **__: put.append(key))
    handle = handle_over([0, 1])
    handle.purpose = "train"
    with pytest.raises(ContextError, match="NCCL_RUNTIME_CONNECT is not set"):
        meeting._Meeting(handle, (0, 1), 0, Patience(1), on_gpus=True).agree()
    assert put == []
