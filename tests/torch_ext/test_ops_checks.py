"""Wrong arguments are refused before anything is written, with messages that show the values and say what to do."""

from __future__ import annotations

import pytest
import torch

from torch_ext import gather_rows, gradient_norm, rowwise_adagrad_, rowwise_adagrad_lazy_, segment_sum, unique_ids

from .batches import assert_same_bits

RULE = {"learning_rate": 0.1, "eps": 1e-6}
LAZY_RULE = {**RULE, "accum_decay_rate": 0.0, "weight_decay_rate": 0.0}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """A valid update of rows 1 and 3 of [5, 2], with some arguments replaced."""
    return {
        "table": torch.ones(5, 2),
        "row_state": torch.ones(5),
        "unique": int32(1, 3),
        "sums": torch.ones(2, 2),
        "statistics": torch.full((2,), 2.0),
        **changes,
    }


class TestIds:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("bad", [-2, 5, 2**31 - 1])
    def test_an_id_outside_of_the_table_names_value_position_and_rows(self, dtype, bad):
        ids = torch.tensor([[0, -1], [bad, 99]], dtype=dtype)
        message = rf"gather_rows: ids\[2\] of the flattened ids is {bad}, outside of \[0, 5\) \(2 of 4 ids are\)"
        with pytest.raises(IndexError, match=message):
            gather_rows(torch.ones(5, 2), ids)

    def test_an_id_of_more_than_32_bits_is_not_wrapped_around(self):
        with pytest.raises(IndexError, match=r"ids\[0\] .* is 4294967296"):
            gather_rows(torch.ones(5, 2), torch.tensor([2**32]))
        with pytest.raises(IndexError, match=r"ids\[0\] .* is 4294967296"):
            unique_ids(torch.tensor([2**32]))

    def test_a_table_without_rows(self):
        assert gather_rows(torch.ones(0, 2), int32(-1)).tolist() == [[0.0, 0.0]]
        with pytest.raises(IndexError, match=r"is 0, outside of \[0, 0\)"):
            gather_rows(torch.ones(0, 2), int32(0))

    def test_float_ids(self):
        with pytest.raises(
            TypeError, match=r"ids has dtype float32, supported are int32, int64; convert it with ids\.to"
        ):
            gather_rows(torch.ones(5, 2), torch.ones(3))


class TestTensors:
    def test_dtype(self):
        message = r"gather_rows: table has dtype float64, supported are float32, bfloat16, float16"
        with pytest.raises(TypeError, match=message):
            gather_rows(torch.ones(5, 2, dtype=torch.float64), int32(0))

    def test_shape(self):
        with pytest.raises(ValueError, match=r"table must have the shape \[rows, width\], got \[5\]"):
            gather_rows(torch.ones(5), int32(0))

    def test_strides(self):
        with pytest.raises(
            ValueError, match=r"\[5, 2\] has strides \[1, 5\]; make it contiguous with table.contiguous"
        ):
            gather_rows(torch.ones(2, 5).t(), int32(0))

    def test_sparse(self):
        with pytest.raises((ValueError, NotImplementedError), match=r"[Ss]parse"):
            gather_rows(torch.ones(5, 2).to_sparse(), int32(0))


class TestSegments:
    @pytest.mark.parametrize(
        ("offsets", "positions", "message"),
        [
            (int32(), int32(), r"offsets is empty; for no unique ids it is \[0\]"),
            (int32(1, 2), int32(0, 1), r"offsets\[0\] is 1, it must be 0"),
            (int32(0, 1, 1), int32(0), r"offsets\[1\] = 1 and offsets\[2\] = 1; pass what unique_ids returned"),
            (int32(0, 3), int32(0, 1), r"offsets ends with 3, but there are 2 positions"),
        ],
    )
    def test_offsets(self, offsets, positions, message):
        with pytest.raises(ValueError, match=message):
            segment_sum(torch.ones(4, 2), offsets, positions)

    @pytest.mark.parametrize("position", [-1, 4])
    def test_positions(self, position):
        with pytest.raises(IndexError, match=rf"positions\[1\] is {position}, but grads has 4 rows"):
            segment_sum(torch.ones(4, 2), int32(0, 2), int32(0, position))


class TestUpdates:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"row_state": torch.ones(4)}, ValueError, r"row_state has shape \[4\], its dimension 0 must be 5"),
            ({"row_state": torch.ones(5).half()}, TypeError, r"row_state has dtype float16, supported are float32"),
            ({"unique": torch.tensor([1, 3])}, TypeError, r"unique has dtype int64, supported are int32"),
            ({"unique": int32(3, 3)}, ValueError, r"unique\[0\] = 3 and unique\[1\] = 3"),
            ({"unique": int32(3, 1)}, ValueError, r"unique must ascend"),
            ({"unique": int32(1, 5)}, IndexError, r"unique\[1\] is 5, outside of \[0, 5\)"),
            ({"unique": int32(-1, 5)}, IndexError, r"unique\[0\] is -1"),
            ({"sums": torch.ones(3, 2)}, ValueError, r"sums has shape \[3, 2\], its dimension 0 must be 2"),
            ({"sums": torch.ones(2, 4)}, ValueError, r"its dimension 1 must be 2, the width of table"),
            ({"statistics": torch.ones(1)}, ValueError, r"statistics has shape \[1\]"),
        ],
    )
    def test_tensors_that_do_not_fit_change_nothing(self, changes, error, message):
        given = arguments(**changes)
        with pytest.raises(error, match=message):
            rowwise_adagrad_(**given, **RULE)
        assert_same_bits(given["table"], torch.ones(5, 2))

    @pytest.mark.parametrize(
        ("numbers", "message"),
        [
            ({"learning_rate": float("nan")}, "learning_rate = nan is not a finite float32 number"),
            ({"eps": 1e39}, r"eps = 1e\+39 is not a finite float32 number"),
            ({"max_grad_norm": -1.0}, "max_grad_norm = -1 must not be negative"),
            ({"rounding": "up"}, "rounding = 'up' must be 'nearest' or 'stochastic'"),
            ({"rounding": "stochastic"}, "pass seed and rounding_step"),
            ({"rounding": "stochastic", "seed": 1}, "pass rounding_step"),
            ({"rounding": "stochastic", "seed": -1, "rounding_step": 0}, r"seed = -1 must lie in \[0, 4294967295\]"),
        ],
    )
    def test_numbers_out_of_range_change_nothing(self, numbers, message):
        given = arguments()
        with pytest.raises(ValueError, match=message):
            rowwise_adagrad_(**given, **{**RULE, **numbers})
        assert_same_bits(given["table"], torch.ones(5, 2))

    @pytest.mark.parametrize("step", [-1, 2**31])
    def test_steps_fit_in_32_bits(self, step):
        with pytest.raises(ValueError, match=f"step.* {step}"):
            rowwise_adagrad_lazy_(**arguments(last_step=int32(0, 0, 0, 0, 0)), step=step, **LAZY_RULE)

    def test_last_step_has_an_entry_for_each_row(self):
        with pytest.raises(ValueError, match=r"last_step has shape \[2\], its dimension 0 must be 5"):
            rowwise_adagrad_lazy_(**arguments(last_step=int32(0, 0)), step=1, **LAZY_RULE)

    def test_inference_tensors_are_not_updated_outside_of_inference_mode(self):
        with torch.inference_mode():
            table = torch.ones(5, 2)
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
            rowwise_adagrad_(**arguments(table=table), **RULE)

    def test_statistics_of_the_norm(self):
        with pytest.raises(TypeError, match="statistics has dtype float64"):
            gradient_norm(torch.ones(2, dtype=torch.float64))
