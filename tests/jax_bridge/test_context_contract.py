"""The five lines of the validation contract, and what an error with several problems looks like."""

from __future__ import annotations

import ast
import pickle
import re
from typing import Any

import numpy as np
import pytest

from jax_bridge.errors import AsyncEmbError, ContextError, ContextTypeError
from jax_bridge.mesh import pad_width

from .context_calls import BOTH, make, make_mesh, notes, refusal


class TestContract:
    """The five lines that people's code and logs depend on."""

    def test_an_axis_that_the_mesh_does_not_have(self) -> None:
        mesh = make_mesh(4, 2)
        error = refusal(mesh, table_axis="tabel", data_axis="table")
        assert str(error) == f"async_emb axis 'tabel' is not a mesh axis of {mesh}"
        assert str(mesh) == "Mesh('data': 4, 'table': 2, axis_types=(Auto, Auto))"
        assert "table_axis names axis 'tabel'; the mesh has axes 'data' (size 4), 'table' (size 2)." in notes(error)
        assert "The closest is 'table'." in notes(error)
        assert error.corrections == ({"table_axis": ("table",)},)

    def test_a_table_axis_missing_from_data_axis(self) -> None:
        mesh = make_mesh(2, 2, 2, names=("a", "b", "c"))
        error = refusal(mesh, table_axis=("a", "b", "c"), data_axis=["b"])
        assert error.problems == (
            "async_emb requires token shards to vary across the communicator: "
            "table_axis ['a', 'c'] missing from data_axis ('b',)",
        )
        assert error.corrections[0] == {"data_axis": ("b", "a", "c")}
        assert "Write data_axis=('b', 'a', 'c')" in notes(error)

    def test_a_missing_axis_where_adding_it_would_not_do(self) -> None:
        error = refusal(table_axis="table", data_axis="data")
        assert error.problems == (
            "async_emb requires token shards to vary across the communicator: "
            "table_axis ['table'] missing from data_axis ('data',)",
            "async_emb requires exactly one token shard per communicator rank: data_axis ('data',) shards tokens over "
            "4 positions outside table_axis ('table',)",
        )
        assert "Adding ['table'] to data_axis would not be enough: 'data' (size 4)" in notes(error)
        assert error.corrections == (
            {"data_axis": ("table",)},
            {"table_axis": ("data",)},
            {"table_axis": BOTH, "data_axis": BOTH},
        )
        assert "Write data_axis=('table',) (tokens are then the same along 'data'); or table_axis=('data',); or" in (
            notes(error)
        )

    def test_a_missing_axis_of_size_one_counts(self) -> None:
        error = refusal(make_mesh(8, 1), data_axis="data")
        assert str(error).endswith("table_axis ['table'] missing from data_axis ('data',)")
        assert error.corrections == ({"data_axis": BOTH}, {"table_axis": ("data",)})

    def test_a_data_axis_of_size_one_does_not_stand_in_the_way(self) -> None:
        error = refusal(make_mesh(1, 8), table_axis="table", data_axis="data")
        assert len(error.problems) == 1
        assert error.corrections[0] == {"data_axis": BOTH}
        assert "not be enough" not in notes(error)

    def test_data_axes_outside_the_communicator(self) -> None:
        mesh = make_mesh(2, 2, 2, names=("a", "b", "c"))
        error = refusal(mesh, table_axis="c", data_axis=("a", "b", "c"))
        assert error.problems == (
            "async_emb requires exactly one token shard per communicator rank: data_axis ('a', 'b', 'c') shards tokens "
            "over 4 positions outside table_axis ('c',)",
        )
        assert error.corrections == ({"data_axis": ("c",)}, {"table_axis": ("a", "b", "c")})
        assert "reshape the mesh" in notes(error)

    def test_data_axes_of_size_one_may_lie_outside(self) -> None:
        assert make(make_mesh(1, 8), table_axis="table").token_blocks == tuple(range(8))

    def test_uneven_tokens(self) -> None:
        error = refusal(tokens_per_batch=30)
        message = "async_emb tokens_per_batch=30 does not shard evenly over the 8-rank communicator"
        assert error.problems == (message,)
        assert "the global number of tokens in a batch" in notes(error)
        assert "table_axis ('data', 'table') of sizes (4, 2) has 8 ranks: 30 = 3 * 8 + 6, remainder 6." in notes(error)
        assert "the nearest valid tokens_per_batch is 24 or 32" in notes(error)
        assert error.corrections == ({"tokens_per_batch": 24}, {"tokens_per_batch": 32})

    @pytest.mark.parametrize("width", [1, 2, 7, 9, 63])
    def test_an_uneven_width(self, width: int) -> None:
        error = refusal(emb_width=width)
        message = f"async_emb emb_width={width} does not shard evenly over the 8-rank communicator"
        padded = pad_width(width, 8)
        assert error.problems == (message,)
        assert f"the next multiple is emb_width={padded} (pad_width({width}, 8))" in notes(error)
        assert f"remainder {width % 8}" in notes(error)
        assert f"slice the rows to their first {width} columns after the lookup" in notes(error)
        assert error.corrections == ({"emb_width": padded, "logical_width": width},)
        assert make(emb_width=padded).shard_width == padded // 8

    def test_an_uneven_width_at_the_limit_goes_down(self) -> None:
        mesh = make_mesh(3, names=("t",))
        valid = {"table_axis": "t", "data_axis": "t", "tokens_per_batch": 33, "num_devices_per_node": 3}
        error = refusal(mesh, **valid, emb_width=2**20)
        assert error.corrections == ({"emb_width": 2**20 - 1},)
        assert "the widest row is emb_width=1048575" in notes(error)

    def test_numpy_numbers_and_strings_print_as_pythons(self) -> None:
        assert "tokens_per_batch=30 does not" in str(refusal(tokens_per_batch=np.int64(30)))
        assert str(refusal(table_axis=np.str_("tabel"))).startswith("async_emb axis 'tabel' is not")

    def test_the_five_keep_their_order(self) -> None:
        mesh = make_mesh(2, 2, 2, names=("a", "b", "c"))
        wrong: dict[str, Any] = {
            "table_axis": ("a", "b"),
            "data_axis": ("b", "c"),
            "tokens_per_batch": 30,
            "emb_width": 7,
        }
        error = refusal(mesh, **wrong)
        assert error.problems == (
            "async_emb requires token shards to vary across the communicator: "
            "table_axis ['a'] missing from data_axis ('b', 'c')",
            "async_emb requires exactly one token shard per communicator rank: data_axis ('b', 'c') shards tokens over "
            "2 positions outside table_axis ('a', 'b')",
            "async_emb tokens_per_batch=30 does not shard evenly over the 4-rank communicator",
            "async_emb emb_width=7 does not shard evenly over the 4-rank communicator",
        )
        # With a name unknown in data_axis, the communicator is still known.
        error = refusal(mesh, **{**wrong, "data_axis": ("b", "z")})
        assert error.problems == (
            f"async_emb axis 'z' is not a mesh axis of {mesh}",
            "async_emb tokens_per_batch=30 does not shard evenly over the 4-rank communicator",
            "async_emb emb_width=7 does not shard evenly over the 4-rank communicator",
        )
        # With a name unknown in table_axis, it is not; the corrections take care of the numbers all the same.
        error = refusal(mesh, **{**wrong, "table_axis": "z"})
        assert error.problems == (f"async_emb axis 'z' is not a mesh axis of {mesh}",)
        assert error.corrections[0] == {
            "table_axis": ("b", "c"),
            "tokens_per_batch": 28,
            "emb_width": 8,
            "logical_width": 7,
        }


class TestSeveralProblems:
    def test_all_are_listed_in_the_order_of_the_checks(self) -> None:
        error = refusal(
            table_axis=BOTH,
            data_axis="table",
            tokens_per_batch=30,
            emb_width=7,
            num_unique=0,
            num_devices_per_node=3,
            dtype="int8",
            id_policy="wrap",
            padding_id="0",
            name="",
            logical_width=0,
        )
        assert error.problems == (
            "async_emb num_unique=0 must be positive",
            "async_emb logical_width=0 must be positive",
            "async_emb dtype='int8' is not supported; use one of float32, bfloat16, float16",
            "async_emb id_policy='wrap' is not one of 'error', 'drop', 'clamp'",
            "async_emb padding_id='0' must be an integer or None, not str",
            "async_emb name='' must be one line of printable characters, and not empty",
            "async_emb requires token shards to vary across the communicator: "
            "table_axis ['data'] missing from data_axis ('table',)",
            "async_emb tokens_per_batch=30 does not shard evenly over the 8-rank communicator",
            "async_emb emb_width=7 does not shard evenly over the 8-rank communicator",
            "async_emb num_devices_per_node=3 does not divide the 8 devices of the mesh",
        )
        assert len(error.corrections) == 6  # Three ways out for the axes, each with the lower and the upper numbers.
        for number, problem in enumerate(error.problems[1:], start=2):
            assert f"Problem {number} of 10: {problem}" in notes(error)

    def test_the_valid_set_comes_last_and_passes(self) -> None:
        for wrong in ({"tokens_per_batch": 30}, {"emb_width": True}, {"num_unique": -1}, {"num_devices_per_node": 16}):
            refusal(**wrong)
        assert make() == make()

    def test_the_class_is_that_of_the_first_problem(self) -> None:
        assert type(refusal(emb_width=7)) is ContextError
        assert type(refusal(emb_width=7.0)) is ContextTypeError
        assert type(refusal(emb_width=0, num_unique=7.0)) is ContextError
        for error in (refusal(emb_width=7), refusal(emb_width=7.0)):
            assert isinstance(error, AsyncEmbError)
            assert isinstance(error, ValueError)

    def test_the_message_is_one_line_and_advice_is_in_the_notes(self) -> None:
        error = refusal(emb_width=7, tokens_per_batch=30)
        assert "\n" not in str(error)
        assert len(error.__notes__) > 3

    def test_an_error_survives_pickling(self) -> None:
        error = refusal(emb_width=7)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.problems, copy.corrections) == (str(error), error.problems, error.corrections)
        assert notes(copy) == notes(error)

    def test_advice_on_missing_axes_is_followed_to_the_letter(self) -> None:
        mesh = make_mesh(2, 2, 2, names=("a", "b", "c"))
        for table, data in [(("a", "b"), ("b",)), (("a", "b"), ("c",)), (("a",), ("b", "c")), (("c", "a"), ("b", "a"))]:
            error = refusal(mesh, table_axis=table, data_axis=data)
            advised = re.findall(r"(?:Write|; or) data_axis=(\([^)]*\))", notes(error))
            assert advised
            for value in advised:
                make(mesh, table_axis=table, data_axis=ast.literal_eval(value))
