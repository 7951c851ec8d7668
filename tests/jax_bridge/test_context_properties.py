"""Random meshes and arguments: a call passes exactly if a plain restatement of the rules says so, and every correction
that a refusal offers passes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from jax_bridge.context import make_context_handle
from jax_bridge.errors import ContextError

SIZES = [(), (1,), (3,), (8,), (4, 2), (1, 8), (8, 1), (2, 3), (2, 2, 2), (1, 4, 2), (2, 1, 1, 2)]
NAMES = ["data", "table", "model", "t"]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.sampled_from(SIZES))
    devices = draw(st.permutations(jax.devices("cpu")[:8]))[: math.prod(sizes)]
    names = tuple(draw(st.permutations(NAMES))[: len(sizes)])
    axis_types = tuple(draw(st.sampled_from(list(AxisType))) for _ in sizes)
    grid = np.empty(sizes, dtype=object)
    grid.flat[:] = devices
    return Mesh(grid, names, axis_types=axis_types)


def axes(mesh: Mesh) -> st.SearchStrategy[Any]:
    known = st.sampled_from(mesh.axis_names or NAMES)
    name = known | known | known | st.sampled_from([*NAMES, "tabel", "DATA", "", 0, b"table"])
    return st.one_of(
        st.permutations(mesh.axis_names).map(tuple),
        name,
        st.lists(name, max_size=3),
        st.sets(known, max_size=2),
        st.none(),
    )


def numbers(*likely: int) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(likely),
        st.integers(-3, 100),
        st.sampled_from([2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**70, 8.0, 7.5, -0.5, np.int64(24), np.float32(6)]),
    )


def right_call(mesh: Mesh) -> dict[str, Any]:
    return {
        "table_axis": mesh.axis_names,
        "data_axis": mesh.axis_names,
        "tokens_per_batch": 144,
        "emb_width": 144,
        "num_unique": 8,
        "num_devices_per_node": 1,
        "logical_width": None,
        "dtype": "float32",
        "id_policy": "error",
        "padding_id": None,
    }


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mesh, dict[str, Any]]:
    """A right call with up to four arguments drawn anew, mostly to wrong values."""
    mesh = draw(meshes())
    anew: dict[str, st.SearchStrategy[Any]] = {
        "table_axis": axes(mesh),
        "data_axis": axes(mesh),
        "tokens_per_batch": numbers(24, 48),
        "emb_width": numbers(24, 48),
        "num_unique": numbers(1, 24),
        "num_devices_per_node": numbers(1, mesh.devices.size),
        "logical_width": numbers(20),
        "dtype": st.sampled_from(["bfloat16", "float64"]),
        "id_policy": st.sampled_from(["clamp", "Drop"]),
        "padding_id": st.sampled_from([0, 2**63, 1.5]),
    }
    spoiled = draw(st.lists(st.sampled_from(list(anew)), max_size=4, unique=True))
    return mesh, right_call(mesh) | {argument: draw(anew[argument]) for argument in spoiled}


def is_right(mesh: Mesh, call: dict[str, Any]) -> bool:
    """The rules, restated without a thought for what to say about a violation."""
    table, data = call["table_axis"], call["data_axis"]
    if isinstance(table, set) or isinstance(data, set) or table is None or data is None:
        return False
    table = (table,) if isinstance(table, (str, bytes, int)) else tuple(table)
    data = (data,) if isinstance(data, (str, bytes, int)) else tuple(data)
    if not table or len(set(table)) < len(table) or len(set(data)) < len(data):
        return False
    if not set(table) | set(data) <= set(mesh.axis_names) or not set(table) <= set(data):
        return False
    if any(mesh.shape[axis] > 1 for axis in set(data) - set(table)):
        return False
    ranks = math.prod(mesh.shape[axis] for axis in table)
    width = call["emb_width"]
    logical_width = width if call["logical_width"] is None else call["logical_width"]
    counts = [call["tokens_per_batch"], width, call["num_unique"], call["num_devices_per_node"], logical_width]
    if not all(isinstance(count, (int, np.integer)) and count > 0 for count in counts):
        return False
    return (
        call["tokens_per_batch"] % ranks == 0
        and width % ranks == 0
        and call["tokens_per_batch"] < 2**31
        and width <= 2**20
        and call["num_unique"] < 2**31
        and logical_width <= width
        and mesh.devices.size % call["num_devices_per_node"] == 0
        and call["dtype"] != "float64"
        and call["id_policy"] != "Drop"
        and call["padding_id"] not in (2**63, 1.5)
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_a_call_passes_or_every_correction_does(call: tuple[Mesh, dict[str, Any]]) -> None:
    mesh, arguments = call
    refused: ContextError | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            handle = make_context_handle(mesh, **arguments)
        except ContextError as error:
            refused = error
        event("passed" if refused is None else "refused")
        assert is_right(mesh, arguments) == (refused is None)
        if refused is None:
            assert handle.group_size * handle.tokens_per_rank == arguments["tokens_per_batch"]
            assert handle.group_size * handle.shard_width == arguments["emb_width"]
            assert sorted(handle.token_blocks) == list(range(handle.group_size))
            assert sorted(handle.flatten_replicas) == sorted(device.id for device in mesh.devices.flat)
            return
        assert "\n" not in str(refused)
        assert refused.problems[0] == str(refused)
        assert len(set(refused.problems)) == len(refused.problems)
        # Every wrong value above is near a right one, unless the mesh has no axis to name.
        assert refused.corrections or not mesh.axis_names
        for correction in refused.corrections:
            assert is_right(mesh, arguments | correction)
            make_context_handle(mesh, **(arguments | correction))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(meshes().filter(lambda mesh: mesh.axis_names), st.data())
def test_one_wrong_number_changes_nothing_else(mesh: Mesh, data: st.DataObject) -> None:
    arguments = right_call(mesh)
    wrong = data.draw(st.sampled_from(["tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node"]))
    arguments[wrong] = data.draw(numbers(7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make_context_handle(mesh, **arguments)
        except ContextError as error:
            for correction in error.corrections:
                # A width that is padded is told apart from its padding; nothing else moves.
                assert wrong in correction
                assert set(correction) <= {wrong, "logical_width" if wrong == "emb_width" else wrong}
