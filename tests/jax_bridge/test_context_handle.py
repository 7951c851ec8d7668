"""What a context handle holds, and what its id depends on."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_bridge.context import AsyncEmbContextHandle

from .context_calls import BOTH, VALID, make, make_mesh, refusal


class TestHandle:
    def test_the_fields_and_their_order(self) -> None:
        names = [field.name for field in dataclasses.fields(AsyncEmbContextHandle)]
        assert names[:11] == [
            "context_id",
            "group_size",
            "flatten_replicas",
            "tokens_per_rank",
            "shard_width",
            "emb_width",
            "num_unique",
            "num_devices_per_node",
            "mesh",
            "table_axis",
            "data_axis",
        ]
        assert names[11:] == ["name", "dtype", "logical_width", "id_policy", "padding_id", "purpose", "token_blocks"]

    def test_sizes_are_those_of_a_rank(self) -> None:
        mesh = make_mesh(4, 2)
        handle = make(mesh, tokens_per_batch=48, emb_width=80, num_unique=7, num_devices_per_node=4)
        assert (handle.group_size, handle.flatten_replicas) == (8, tuple(range(8)))
        assert (handle.tokens_per_rank, handle.tokens_per_batch) == (6, 48)
        assert (handle.shard_width, handle.emb_width, handle.logical_width) == (10, 80, 80)
        assert (handle.num_unique, handle.num_devices_per_node) == (7, 4)
        assert (handle.mesh, handle.table_axis, handle.data_axis) == (mesh, BOTH, BOTH)
        assert handle.token_blocks == tuple(range(8))

    def test_defaults(self) -> None:
        handle = make()
        assert (handle.name, handle.dtype, handle.id_policy) == ("table", np.dtype(ml_dtypes.bfloat16), "error")
        assert (handle.padding_id, handle.purpose) == (None, "train")

    def test_data_axis_in_another_order_than_table_axis(self) -> None:
        handle = make(data_axis=("table", "data"))
        assert handle.flatten_replicas == tuple(range(8))
        assert handle.token_blocks == (0, 4, 1, 5, 2, 6, 3, 7)
        assert handle.context_id != make().context_id

    def test_table_axis_in_another_order_than_the_mesh(self) -> None:
        handle = make(table_axis=("table", "data"))
        assert handle.flatten_replicas == (0, 2, 4, 6, 1, 3, 5, 7)
        assert handle.token_blocks == (0, 2, 4, 6, 1, 3, 5, 7)

    def test_axes_in_neither_argument_hold_copies(self) -> None:
        handle = make(make_mesh(2, 2, 2, names=("a", "b", "c")), table_axis=("c", "a"), data_axis=("a", "c"))
        assert handle.group_size == 4
        assert handle.flatten_replicas == (0, 4, 1, 5, 2, 6, 3, 7)
        assert handle.token_blocks == (0, 2, 1, 3)

    def test_it_is_immutable_and_a_static_argument(self) -> None:
        handle = make()
        with pytest.raises(dataclasses.FrozenInstanceError):
            handle.group_size = 4  # type: ignore[misc]
        assert handle == make()
        assert hash(handle) == hash(make())
        assert handle != make(num_unique=7)
        double = jax.jit(lambda x, handle: x * handle.group_size, static_argnums=1)
        assert double(2.0, handle) == 16.0

    def test_attributes_are_64_bit_integers(self) -> None:
        handle = make(tokens_per_batch=48, num_devices_per_node=4)
        attrs = handle.attrs()
        assert list(attrs) == [
            "context_id",
            "group_size",
            "flatten_replicas",
            "tokens_per_rank",
            "shard_width",
            "emb_width",
            "num_unique",
            "num_devices_per_node",
        ]
        assert all(value.dtype == np.int64 for value in attrs.values())
        for name, value in attrs.items():
            np.testing.assert_array_equal(value, getattr(handle, name))
            assert isinstance(value, np.ndarray if name == "flatten_replicas" else np.int64)

    @pytest.mark.parametrize("axis_type", list(AxisType))
    def test_axis_types_make_no_difference(self, axis_type: AxisType) -> None:
        assert make(make_mesh(4, 2, axis_type=axis_type)).context_id == make().context_id
        assert str(refusal(make_mesh(4, 2, axis_type=axis_type), emb_width=7)) == str(refusal(emb_width=7))

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [
            (jnp.float32, "float32"),
            (np.float32, "float32"),
            ("float32", "float32"),
            (np.dtype("float16"), "float16"),
            (jnp.float16, "float16"),
            (jnp.bfloat16, "bfloat16"),
            (ml_dtypes.bfloat16, "bfloat16"),
            ("bfloat16", "bfloat16"),
        ],
    )
    def test_dtypes_in_every_spelling(self, dtype: Any, name: str) -> None:
        assert make(dtype=dtype).dtype.name == name

    def test_numbers_may_be_numpys_and_become_pythons(self) -> None:
        numbers = {name: np.int32(VALID[name]) for name in VALID if isinstance(VALID[name], int)}
        handle = make(**numbers, logical_width=np.uint8(60), padding_id=np.int64(-1))
        assert handle == make(logical_width=60, padding_id=-1)
        for name in (
            "tokens_per_rank",
            "emb_width",
            "num_unique",
            "num_devices_per_node",
            "logical_width",
            "padding_id",
        ):
            assert type(getattr(handle, name)) is int

    def test_nothing_is_compiled(self) -> None:
        seen: list[str] = []
        mesh = make_mesh(4, 2)

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            seen.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        make(mesh)
        refusal(mesh, table_axis="tabel")
        assert seen == []
        jax.jit(lambda x: x + 41.5)(1.0)  # The listener does hear of compilations.
        assert seen


class TestContextId:
    def test_it_is_the_same_in_every_run(self) -> None:
        # A change here is a change of what ranks that run different versions agree on.
        key = (
            '{"devices":[0,2,4,6,1,3,5,7],"dtype":"float16","emb_width":64,"group_size":4,"id_policy":"clamp",'
            '"logical_width":60,"name":"users","num_devices_per_node":8,"num_unique":8,"padding_id":0,"platform":"cpu",'
            '"purpose":"train","shard_width":16,"token_blocks":[0,1,2,3],"tokens_per_rank":8}'
        )
        handle = make(
            table_axis="data",
            data_axis="data",
            name="users",
            dtype="float16",
            logical_width=60,
            id_policy="clamp",
            padding_id=0,
        )
        assert handle.key() == key
        assert handle.context_id == 6876832742879030888

    def test_it_is_the_same_in_every_process(self) -> None:
        program = (
            "import jax, numpy as np; from jax.sharding import Mesh\n"
            "from jax_bridge.context import make_context_handle\n"
            "mesh = Mesh(np.array(jax.devices('cpu')).reshape(4, 2), ('data', 'table'))\n"
            f"handle = make_context_handle(mesh, **{VALID!r})\n"
            "print(handle.context_id, handle.key())"
        )
        root = Path(__file__).parents[2]
        for seed in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
            out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
            assert out.stdout.decode().strip() == f"{make().context_id} {make().key()}"

    def test_it_fits_a_signed_64_bit_attribute(self) -> None:
        for number in range(100):
            assert 0 <= make(name=f"table {number}").context_id < 2**63

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "users"},
            {"purpose": "eval"},
            {"dtype": "float32"},
            {"tokens_per_batch": 40},
            {"emb_width": 72},
            {"logical_width": 63},
            {"num_unique": 7},
            {"num_devices_per_node": 4},
            {"id_policy": "drop"},
            {"padding_id": 0},
            {"table_axis": ("table", "data")},
            {"data_axis": ("table", "data")},
            {"table_axis": "data", "data_axis": "data"},
        ],
    )
    def test_it_differs_where_anything_that_must_agree_differs(self, change: dict[str, Any]) -> None:
        assert make(**change).context_id != make().context_id
        assert make(**change).key() != make().key()

    def test_it_follows_the_order_of_devices(self) -> None:
        mesh = make_mesh(4, 2)
        turned = Mesh(mesh.devices[::-1], BOTH)
        assert make(turned).context_id != make(mesh).context_id

    def test_names_of_axes_do_not_matter(self) -> None:
        renamed = make_mesh(4, 2, names=("x", "y"))
        assert make(renamed, table_axis=("x", "y"), data_axis=("x", "y")).key() == make().key()

    def test_a_replaced_handle_has_an_id_of_its_own(self) -> None:
        evaluation = dataclasses.replace(make(), purpose="eval", tokens_per_rank=3)
        assert evaluation == make(purpose="eval", tokens_per_batch=24)
        assert evaluation.context_id == make(purpose="eval", tokens_per_batch=24).context_id

    def test_the_key_is_one_line_of_ascii(self) -> None:
        key = make(name="Bücher").key()
        assert key.isascii()
        assert key.isprintable()
