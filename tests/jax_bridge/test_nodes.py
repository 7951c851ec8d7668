"""num_devices_per_node and the order of the devices, against the processes that a mesh really has."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh

from jax_bridge import ContextError, make_context_handle
from jax_bridge.validation.nodes import node_sizes


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as the checks look at."""

    id: int
    process_index: int
    platform: str = "cpu"


def mesh_of(processes: list[int]) -> Mesh:
    devices = np.array([Device(2048 * process + i, process) for i, process in enumerate(processes)])
    return Mesh(devices, ("table",))


def handle_of(processes: list[int], per_node: int) -> object:
    return make_context_handle(
        mesh_of(processes),
        "table",
        data_axis="table",
        tokens_per_batch=48,
        emb_width=24,
        num_unique=48,
        num_devices_per_node=per_node,
    )


@pytest.mark.parametrize(
    ("processes", "valid"),
    [
        ([0, 0, 0, 0], [1, 2, 4]),  # one process tells nothing about nodes
        ([0, 0, 1, 1], [2, 4]),
        ([0, 1, 2, 3], [1, 2, 4]),
        ([0, 1, 0, 1], [4]),
        ([1, 1, 0, 0], [2, 4]),
        ([0, 0, 0, 1, 1, 1], [3, 6]),
        ([0, 0, 0, 1], [4]),
    ],
)
def test_a_node_holds_whole_processes(processes, valid):
    assert node_sizes(mesh_of(processes)) == valid
    for per_node in range(1, len(processes) + 1):
        if per_node in valid:
            handle_of(processes, per_node)
        else:
            with pytest.raises(ContextError, match="async_emb num_devices_per_node="):
                handle_of(processes, per_node)


def test_a_split_process_is_named_with_its_positions_and_what_to_write():
    with pytest.raises(ContextError) as caught:
        handle_of([0, 0, 1, 1], 1)
    assert str(caught.value) == (
        "async_emb num_devices_per_node=1 puts devices of process 0 on two nodes, but a process runs on one"
    )
    notes = "\n".join(caught.value.__notes__)
    assert "Positions 0 and 1 are of process 0 and would lie on nodes 0 and 1" in notes
    assert "the processes in the order of the mesh are [0, 0, 1, 1]" in notes
    assert "The nearest valid num_devices_per_node is 2." in notes
    assert "order the devices" not in notes
    assert caught.value.corrections == ({"num_devices_per_node": 2},)


def test_an_order_that_mixes_processes_is_advised_to_be_sorted():
    with pytest.raises(ContextError) as caught:
        handle_of([0, 1, 0, 1], 2)
    notes = "\n".join(caught.value.__notes__)
    assert "Or order the devices of the mesh by process (jax.make_mesh does)." in notes
    assert caught.value.corrections == ({"num_devices_per_node": 4},)
