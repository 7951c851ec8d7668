"""Ranks, groups and token blocks, against hand-written layouts and against where JAX itself puts the shards."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_bridge.errors import ContextError, ContextTypeError
from jax_bridge.mesh import pad_width, replica_groups, token_blocks

MESHES = {(8,): ("table",), (4, 2): ("data", "table"), (2, 2, 2): ("a", "b", "c")}


def make_mesh(sizes: tuple[int, ...], axis_type: AxisType = AxisType.Auto) -> Mesh:
    # Shuffled, so that a device's id never happens to be its position.
    devices = np.array(jax.devices("cpu")[:8])[[5, 2, 7, 0, 3, 6, 1, 4]].reshape(sizes)
    return Mesh(devices, MESHES[sizes], axis_types=(axis_type,) * len(sizes))


def ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def block_of_each_device(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, int]:
    """Where JAX puts block b of an array sharded over `axes`: device id to b."""
    # Arrays cannot be placed on a mesh with manual axes; the layout does not depend on that.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    blocks = math.prod(mesh.shape[axis] for axis in axes)
    indices = NamedSharding(mesh, PartitionSpec(axes)).devices_indices_map((blocks,))  # type: ignore[no-untyped-call]
    return {device.id: index[0].indices(blocks)[0] for device, index in indices.items()}  # type: ignore[attr-defined]


def ordered_choices_of_axes() -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    return [
        (sizes, axes)
        for sizes, names in MESHES.items()
        for count in range(1, len(names) + 1)
        for axes in itertools.permutations(names, count)
    ]


def test_one_axis_is_one_group_in_mesh_order() -> None:
    mesh = make_mesh((8,))
    assert replica_groups(mesh, "table") == (8, (5, 2, 7, 0, 3, 6, 1, 4))


def test_groups_follow_the_other_axes() -> None:
    mesh = make_mesh((4, 2))  # [[5, 2], [7, 0], [3, 6], [1, 4]]
    assert replica_groups(mesh, "table") == (2, (5, 2, 7, 0, 3, 6, 1, 4))
    assert replica_groups(mesh, "data") == (4, (5, 7, 3, 1, 2, 0, 6, 4))


def test_the_order_of_the_axes_numbers_the_ranks() -> None:
    mesh = make_mesh((4, 2))
    assert replica_groups(mesh, ("data", "table")) == (8, (5, 2, 7, 0, 3, 6, 1, 4))
    assert replica_groups(mesh, ("table", "data")) == (8, (5, 7, 3, 1, 2, 0, 6, 4))


def test_groups_of_several_axes_among_three() -> None:
    mesh = make_mesh((2, 2, 2))  # a=0: [[5, 2], [7, 0]]; a=1: [[3, 6], [1, 4]]
    # Over (c, a), c varies slowest; one group for b=0 and one for b=1.
    assert replica_groups(mesh, ("c", "a")) == (4, (5, 3, 2, 6, 7, 1, 0, 4))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit, AxisType.Manual])
@pytest.mark.parametrize(("sizes", "axes"), ordered_choices_of_axes())
def test_a_rank_is_the_block_that_jax_places_there(
    sizes: tuple[int, ...], axes: tuple[str, ...], axis_type: AxisType
) -> None:
    mesh = make_mesh(sizes, axis_type)
    group_size, flatten_replicas = replica_groups(mesh, axes)
    rank_of = block_of_each_device(mesh, axes)
    assert group_size == math.prod(mesh.shape[axis] for axis in axes)
    assert sorted(flatten_replicas) == sorted(ids(mesh))
    for position, device_id in enumerate(flatten_replicas):
        assert rank_of[device_id] == position % group_size
    others = tuple(name for name in mesh.axis_names if name not in axes)
    if others:
        group_of = block_of_each_device(mesh, others)
        for position, device_id in enumerate(flatten_replicas):
            assert group_of[device_id] == position // group_size


@pytest.mark.parametrize(("sizes", "table_axis"), ordered_choices_of_axes())
def test_token_blocks_are_where_jax_places_the_tokens(sizes: tuple[int, ...], table_axis: tuple[str, ...]) -> None:
    mesh = make_mesh(sizes)
    group_size, flatten_replicas = replica_groups(mesh, table_axis)
    for data_axis in itertools.permutations(table_axis):
        blocks = token_blocks(mesh, table_axis, data_axis)
        block_of = block_of_each_device(mesh, data_axis)
        assert sorted(blocks) == list(range(group_size))
        for position, device_id in enumerate(flatten_replicas):
            assert blocks[position % group_size] == block_of[device_id]


def test_token_blocks_by_hand() -> None:
    mesh = make_mesh((4, 2))
    # Rank (d, t) is 2d + t; its block over ("table", "data") is 4t + d.
    assert token_blocks(mesh, ("data", "table"), ("table", "data")) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert token_blocks(mesh, ("data", "table"), ("data", "table")) == tuple(range(8))


def test_data_axes_of_size_one_move_no_block() -> None:
    devices = np.array(jax.devices("cpu")[:8]).reshape(1, 4, 2)
    mesh = Mesh(devices, ("one", "data", "table"))
    assert token_blocks(mesh, ("data", "table"), ("table", "one", "data")) == (0, 4, 1, 5, 2, 6, 3, 7)


def test_one_name_and_a_sequence_of_one_are_the_same() -> None:
    mesh = make_mesh((4, 2))
    assert replica_groups(mesh, "table") == replica_groups(mesh, ("table",)) == replica_groups(mesh, ["table"])
    assert token_blocks(mesh, "table", ["table"]) == token_blocks(mesh, ("table",), "table") == (0, 1)


def test_a_mesh_of_one_device() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[3:4]), ("table",))
    assert replica_groups(mesh, "table") == (1, (3,))
    assert token_blocks(mesh, "table", "table") == (0,)


def test_axis_names_may_be_integers() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), (0, 1))
    assert replica_groups(mesh, 0) == (2, (0, 4, 1, 5, 2, 6, 3, 7))
    assert replica_groups(mesh, np.int64(1)) == (4, tuple(range(8)))
    for wrong in (False, True, 0.0, 1.0):
        with pytest.raises(ContextError, match="is not a mesh axis of"):
            replica_groups(mesh, wrong)


@pytest.mark.parametrize("argument", ["tabel", "", 0, b"table"])
def test_unknown_axes_are_refused_in_the_words_of_the_contract(argument: object) -> None:
    mesh = make_mesh((4, 2))
    with pytest.raises(ContextError) as caught:
        replica_groups(mesh, argument)
    assert str(caught.value) == f"async_emb axis {argument!r} is not a mesh axis of {mesh}"


@pytest.mark.parametrize("argument", [None, {"table"}, frozenset({"table"}), object(), [["table"]]])
def test_axes_of_a_wrong_type_are_refused(argument: object) -> None:
    with pytest.raises(ContextTypeError, match="async_emb axes"):
        replica_groups(make_mesh((4, 2)), argument)


def test_layouts_of_meshes_without_devices_are_refused() -> None:
    with pytest.raises(ContextError, match="axis 't' has size 0"):
        replica_groups(Mesh(np.array([], dtype=object), ("t",)), "t")
    with pytest.raises(ContextTypeError, match="AbstractMesh"):
        replica_groups(AbstractMesh((8,), ("t",)), "t")  # type: ignore[arg-type]
    with pytest.raises(ContextTypeError, match="Mesh, not dict"):
        replica_groups({"t": 8}, "t")  # type: ignore[arg-type]


def test_token_blocks_need_one_block_a_rank() -> None:
    mesh = make_mesh((4, 2))
    with pytest.raises(ContextError, match=r"table_axis \['table'\] missing from data_axis \('data',\)"):
        token_blocks(mesh, "table", "data")
    with pytest.raises(ContextError, match="shards tokens over 4 positions outside"):
        token_blocks(mesh, "table", ("data", "table"))


@pytest.mark.parametrize(
    ("width", "group_size", "padded"),
    [(1, 1, 1), (7, 8, 8), (8, 8, 8), (9, 8, 16), (50, 3, 51), (2**40 + 1, 2, 2**40 + 2)],
)
def test_pad_width(width: int, group_size: int, padded: int) -> None:
    assert pad_width(width, group_size) == padded


@pytest.mark.parametrize(("width", "group_size"), [(0, 8), (-8, 8), (8, 0), (8, -1)])
def test_pad_width_refuses_non_positive_sizes(width: int, group_size: int) -> None:
    with pytest.raises(ValueError, match="positive width and group_size"):
        pad_width(width, group_size)
