"""What each argument of `make_context_handle` accepts, and the exact line where it does not."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jax_bridge.errors import ContextTypeError, ContextWarning

from .context_calls import BOTH, make, make_mesh, notes, refusal


class TestAxisArguments:
    @pytest.mark.parametrize("axis", ["tabel", "Table", "", 0, b"table", 1.5, False])
    def test_names_that_are_not_axes(self, axis: Any) -> None:
        mesh = make_mesh(4, 2)
        error = refusal(mesh, table_axis=axis)
        assert str(error) == f"async_emb axis {axis!r} is not a mesh axis of {mesh}"
        assert not isinstance(error, TypeError)
        assert f"table_axis names axis {axis!r}" in notes(error)
        assert ("The closest is 'table'." in notes(error)) == (axis in ("tabel", "Table", b"table"))
        assert error.corrections

    def test_an_unknown_data_axis(self) -> None:
        mesh = make_mesh(4, 2)
        error = refusal(mesh, data_axis="batch")
        assert error.problems == (f"async_emb axis 'batch' is not a mesh axis of {mesh}",)
        assert "data_axis names axis 'batch'" in notes(error)
        assert error.corrections == ({"data_axis": BOTH},)

    def test_the_same_wrong_name_in_both_is_one_problem(self) -> None:
        error = refusal(table_axis="tabel", data_axis="tabel")
        assert len(error.problems) == 1
        assert "table_axis names axis 'tabel'" in notes(error)
        assert "data_axis names axis 'tabel'" in notes(error)
        assert error.corrections == ({"table_axis": ("table",), "data_axis": ("table",)},)

    @pytest.mark.parametrize("argument", ["table_axis", "data_axis"])
    def test_none(self, argument: str) -> None:
        error = refusal(**{argument: None})
        assert isinstance(error, ContextTypeError)
        assert str(error) == f"async_emb {argument}=None names no axis; the mesh has axes ('data', 'table')"
        assert error.corrections == ({argument: BOTH},)
        assert ("there is no default" in notes(error)) == (argument == "data_axis")

    @pytest.mark.parametrize("argument", ["table_axis", "data_axis"])
    def test_sets_have_no_order(self, argument: str) -> None:
        error = refusal(**{argument: {"table", "data"}})
        assert isinstance(error, ContextTypeError)
        assert str(error) == f"async_emb {argument}={{'data', 'table'}} is a set, which has no order"
        assert error.corrections[0] == {argument: BOTH}
        assert "=frozenset({'data'}) is a frozenset" in str(refusal(**{argument: frozenset({"data"})}))

    @pytest.mark.parametrize(
        ("axis", "name"),
        [
            (PartitionSpec("data"), "P: P('data',)"),  # type: ignore[no-untyped-call]
            ([["data"]], "list: ['data'] inside [['data']]"),
            (("data", None), "NoneType: None inside ('data', None)"),
            ({"data": 4}, "dict: {'data': 4}"),
            (np.array(["data"]), "ndarray: array(['data'], dtype='<U4')"),
        ],
    )
    def test_other_types(self, axis: Any, name: str) -> None:
        error = refusal(table_axis=axis)
        assert isinstance(error, ContextTypeError)
        expected = f"async_emb table_axis must be an axis name, or a tuple or list of axis names, not {name}"
        assert str(error) == expected

    def test_no_axis_and_an_axis_twice(self) -> None:
        error = refusal(table_axis=(), data_axis=["data", "table", "data"])
        assert error.problems == (
            "async_emb table_axis=() names no axis; the mesh has axes ('data', 'table')",
            "async_emb data_axis=('data', 'table', 'data') repeats ['data']",
        )
        assert error.corrections == ({"table_axis": BOTH, "data_axis": BOTH},)

    @pytest.mark.parametrize("axis", ["table", ("table",), ["table"], "table"[0:5], np.str_("table")])
    def test_one_name_in_every_form(self, axis: Any) -> None:
        handle = make(table_axis=axis, data_axis=axis)
        assert handle == make(table_axis="table", data_axis="table")
        assert (handle.table_axis, handle.data_axis) == (("table",), ("table",))

    def test_a_string_is_one_name_and_never_its_letters(self) -> None:
        mesh = make_mesh(4, 2, names=("t", "a"))
        error = refusal(mesh, table_axis="ta", data_axis="ta")
        assert error.problems == (f"async_emb axis 'ta' is not a mesh axis of {mesh}",)
        assert make(mesh, table_axis="table"[0], data_axis="t").group_size == 4

    def test_a_mesh_made_with_a_string(self) -> None:
        mesh = Mesh(np.array(jax.devices("cpu")[:8]), "table")
        assert make(mesh, table_axis="table", data_axis="table").group_size == 8

    def test_integer_axis_names(self) -> None:
        mesh = make_mesh(4, 2, names=(0, 1))
        assert make(mesh, table_axis=0, data_axis=[0]).group_size == 4
        assert make(mesh, table_axis=(np.int64(1), 0), data_axis=(0, 1)).table_axis == (1, 0)
        assert refusal(mesh, table_axis=2, data_axis=0).corrections == (
            {"table_axis": (0,)},
            {"table_axis": (0, 1), "data_axis": (0, 1)},
        )


class TestMeshes:
    @pytest.mark.parametrize(("sizes", "group_size"), [((4, 1), 4), ((1, 4), 4), ((1, 1), 1)])
    def test_axes_of_size_one(self, sizes: tuple[int, ...], group_size: int) -> None:
        handle = make(make_mesh(*sizes), num_devices_per_node=1)
        assert handle.group_size == group_size
        assert handle.flatten_replicas == handle.token_blocks == tuple(range(group_size))
        only = make(make_mesh(*sizes), table_axis="table", data_axis="table", num_devices_per_node=1)
        assert (only.group_size, only.shard_width) == (sizes[1], 64 // sizes[1])

    def test_one_device(self) -> None:
        mesh = make_mesh(1, names=("table",))
        handle = make(
            mesh, table_axis="table", data_axis="table", tokens_per_batch=3, emb_width=5, num_unique=1,
            num_devices_per_node=1,
        )  # fmt: skip
        assert (handle.group_size, handle.flatten_replicas, handle.tokens_per_rank, handle.shard_width) == (
            1,
            (0,),
            3,
            5,
        )

    def test_no_devices(self) -> None:
        error = refusal(Mesh(np.array([], dtype=object), ("t",)), table_axis="t", data_axis="t", tokens_per_batch=0)
        assert error.problems == (
            "async_emb mesh has no devices: axis 't' has size 0",
            "async_emb tokens_per_batch=0 must be positive",
        )
        assert error.corrections == ()
        two = Mesh(np.empty((0, 2), dtype=object), BOTH)
        assert str(refusal(two)) == "async_emb mesh has no devices: axis 'data' has size 0"

    def test_an_abstract_mesh(self) -> None:
        mesh = make_mesh(4, 2).abstract_mesh
        error = refusal(mesh, tokens_per_batch=30)
        assert isinstance(error, ContextTypeError)
        assert error.problems == (
            f"async_emb mesh {mesh} is an AbstractMesh, which has no devices",
            "async_emb tokens_per_batch=30 does not shard evenly over the 8-rank communicator",
        )

    def test_something_else(self) -> None:
        error = refusal({"table": 8}, tokens_per_batch=8.0)
        assert isinstance(error, ContextTypeError)
        assert error.problems == (
            "async_emb mesh must be a jax.sharding.Mesh, not dict: {'table': 8}",
            "async_emb tokens_per_batch=8.0 must be an integer, not float",
        )

    def test_a_device_twice(self) -> None:
        device = jax.devices("cpu")[3]
        mesh = Mesh(np.array([device, device]), ("t",))
        error = refusal(mesh, table_axis="t", data_axis="t")
        assert str(error) == f"async_emb mesh holds devices more than once: ids [3] of {mesh}"

    @pytest.mark.parametrize("name", ["tätle", "a\\b"])
    def test_a_name_of_an_axis_that_ends_xla_is_refused(self, name):
        error = refusal(Mesh(np.array(jax.devices("cpu")[:1]), (name,)), table_axis=name, data_axis=name)
        assert str(error) == f"async_emb mesh axis {name!r} must be named in ASCII, without a backslash"
        assert "Rename the axis" in error.__notes__[0]

    def test_no_axes(self) -> None:
        mesh = Mesh(np.array(jax.devices("cpu")[0]), ())
        assert "Build one with jax.make_mesh" in notes(refusal(mesh, table_axis="t", data_axis="t"))


class TestNumbers:
    COUNTS = ("tokens_per_batch", "emb_width", "num_unique", "num_devices_per_node", "logical_width")

    @pytest.mark.parametrize("argument", COUNTS)
    @pytest.mark.parametrize("value", [0, -8, np.int64(-1)])
    def test_non_positive(self, argument: str, value: int) -> None:
        error = refusal(**{argument: value})
        assert error.problems == (f"async_emb {argument}={int(value)} must be positive",)
        assert f"{argument} is " in notes(error)
        assert [list(correction) for correction in error.corrections] == [[argument]]

    @pytest.mark.parametrize("argument", COUNTS)
    @pytest.mark.parametrize(
        ("value", "shown", "name"),
        [
            (8.0, "8.0", "float"),
            (True, "True", "bool"),
            ("8", "'8'", "str"),
            (float("nan"), "nan", "float"),
            ([8], "[8]", "list"),
        ],
    )
    def test_wrong_types(self, argument: str, value: Any, shown: str, name: str) -> None:
        error = refusal(**{argument: value})
        assert isinstance(error, ContextTypeError)
        assert error.problems == (f"async_emb {argument}={shown} must be an integer, not {name}",)
        if value == 8.0:
            assert "Write 8." in notes(error)
            assert {argument: 8} in error.corrections

    @pytest.mark.parametrize("argument", COUNTS[:4])
    def test_none(self, argument: str) -> None:
        assert str(refusal(**{argument: None})) == f"async_emb {argument}=None must be an integer, not NoneType"

    @pytest.mark.parametrize(
        ("argument", "value", "valid"),
        [
            ("tokens_per_batch", 30.0, (24, 32)),
            ("tokens_per_batch", 15.5, (8, 16)),
            ("emb_width", 7.5, (8,)),
            ("num_unique", 7.5, (7, 8)),
            ("num_devices_per_node", 3.0, (2, 4)),
            ("num_devices_per_node", np.float32(99), (8,)),
        ],
    )
    def test_the_note_on_a_fraction_names_only_valid_numbers(
        self, argument: str, value: float, valid: tuple[int, ...]
    ) -> None:
        error = refusal(**{argument: value})
        assert f"Write {' or '.join(map(str, valid))}." in notes(error)
        assert tuple(correction[argument] for correction in error.corrections) == valid
        for number in valid:
            make(**{argument: number})

    @pytest.mark.parametrize(
        ("argument", "value", "limit", "best"),
        [
            ("tokens_per_batch", 2**40, "the limit, 2147483647", 2**31 - 8),
            ("num_unique", 2**31, "the limit, 2147483647", 32),
            ("emb_width", 2**20 + 8, "the width limit of the kernels, 1048576", 2**20),
        ],
    )
    def test_limits(self, argument: str, value: int, limit: str, best: int) -> None:
        error = refusal(**{argument: value})
        assert error.problems == (f"async_emb {argument}={value} is above {limit}",)
        assert error.corrections == ({argument: best},)
        assert "global" in notes(error)

    def test_the_limits_themselves_pass(self) -> None:
        assert make(tokens_per_batch=2**31 - 8).tokens_per_rank == 2**28 - 1
        assert make(emb_width=2**20).shard_width == 2**17
        with pytest.warns(ContextWarning):
            make(num_unique=2**31 - 1)

    def test_a_number_too_long_to_print(self) -> None:
        assert "(16610 bits) is above the limit" in str(refusal(tokens_per_batch=10**5000))

    def test_an_uneven_number_above_its_limit_is_both(self) -> None:
        assert refusal(tokens_per_batch=2**40 + 1).problems == (
            "async_emb tokens_per_batch=1099511627777 does not shard evenly over the 8-rank communicator",
            "async_emb tokens_per_batch=1099511627777 is above the limit, 2147483647",
        )

    @pytest.mark.parametrize(
        ("value", "division", "valid"),
        [
            (3, "8 = 2 * 3 + 2, remainder 2", [2, 4]),
            (5, "8 = 1 * 5 + 3, remainder 3", [4, 8]),
            (16, "8 = 0 * 16 + 8, remainder 8", [8]),
        ],
    )
    def test_devices_per_node_divide_the_mesh(self, value: int, division: str, valid: list[int]) -> None:
        error = refusal(num_devices_per_node=value)
        message = f"async_emb num_devices_per_node={value} does not divide the 8 devices of the mesh"
        assert error.problems == (message,)
        assert division in notes(error)
        assert [correction["num_devices_per_node"] for correction in error.corrections] == valid

    def test_more_unique_ids_than_tokens_only_warns(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(num_unique=33)
            make(num_unique=1)
        with pytest.warns(ContextWarning, match=r"num_unique=34 is above tokens_per_batch \+ 1 = 33") as caught:
            assert make(num_unique=34).num_unique == 34
        assert issubclass(caught[0].category, UserWarning)
        with warnings.catch_warnings():  # A refused call does not warn, whatever corrections it tries.
            warnings.simplefilter("error")
            refusal(num_unique=10.5, id_policy="Drop")

    def test_padding_columns(self) -> None:
        assert make(emb_width=64, logical_width=50).logical_width == 50
        error = refusal(logical_width=70)
        assert error.problems == ("async_emb logical_width=70 is above emb_width=64",)
        assert error.corrections == ({"emb_width": 72},)
        error = refusal(emb_width=60, logical_width=50)
        assert error.corrections == ({"emb_width": 64},)


class TestOptions:
    @pytest.mark.parametrize(
        ("dtype", "shown"),
        [
            (np.int32, "int32"),
            (np.float64, "float64"),
            (float, "float64"),
            (bool, "bool"),
            (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
            ("float64", "'float64'"),
            ("double trouble", "'double trouble'"),
            (None, "None"),
        ],
    )
    def test_dtypes_that_the_kernels_do_not_know(self, dtype: Any, shown: str) -> None:
        error = refusal(dtype=dtype)
        assert str(error) == f"async_emb dtype={shown} is not supported; use one of float32, bfloat16, float16"
        assert error.corrections == ({"dtype": "float32"},)

    @pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
    def test_id_policies(self, policy: str) -> None:
        assert make(id_policy=policy).id_policy == policy

    @pytest.mark.parametrize(
        ("policy", "closest"), [("Drop", "drop"), ("clip", "clamp"), ("skip", "error"), ("", "error"), (None, "error")]
    )
    def test_unknown_id_policies(self, policy: Any, closest: str) -> None:
        error = refusal(id_policy=policy)
        assert str(error) == f"async_emb id_policy={policy!r} is not one of 'error', 'drop', 'clamp'"
        assert error.corrections == ({"id_policy": closest},)
        assert isinstance(error, TypeError) == (policy is None)

    @pytest.mark.parametrize("padding_id", [None, 0, -1, 5, 2**63 - 1, -(2**63)])
    def test_padding_ids(self, padding_id: int | None) -> None:
        assert make(padding_id=padding_id).padding_id == padding_id

    def test_padding_ids_that_no_token_can_have(self) -> None:
        assert str(refusal(padding_id=2**63)) == f"async_emb padding_id={2**63} is not a 64-bit integer"
        error = refusal(padding_id=3.0)
        assert str(error) == "async_emb padding_id=3.0 must be an integer or None, not float"
        assert error.corrections == ({"padding_id": 3},)
        assert str(refusal(padding_id=False)) == "async_emb padding_id=False must be an integer or None, not bool"

    @pytest.mark.parametrize("argument", ["name", "purpose"])
    def test_names(self, argument: str) -> None:
        assert getattr(make(**{argument: "ÜSERS 2"}), argument) == "ÜSERS 2"
        printable = "must be one line of printable characters, and not empty"
        assert str(refusal(**{argument: ""})) == f"async_emb {argument}='' {printable}"
        assert str(refusal(**{argument: "a\nb"})) == f"async_emb {argument}='a\\nb' {printable}"
        assert str(refusal(**{argument: 3})) == f"async_emb {argument}=3 must be a string, not int"
