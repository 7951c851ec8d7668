"""What of the GPU suite can be tried without a GPU: its cases, on the CPU pipeline, and its driver, on a stand-in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jax_bridge import runtime
from tests.jax_bridge import _programs as programs

from .._cases import Case, Outcome, all_cases, assert_like_the_oracle, backwards, id_cases, of_fifty_steps
from .._native_ranks import NativeRanks
from ._stand_in import StandIn

# Fifty steps run on CPU in tests/jax_bridge/test_same_bits.py already.
CASES = [case for case in all_cases() if not case.name.startswith("fifty steps")]


def run_on_cpu(case: Case) -> Outcome:
    handle = programs.handle_on(
        programs.mesh_of(case.ranks),
        tokens=case.tokens,
        width=case.width,
        logical_width=case.logical_width or case.width,
        dtype=case.dtype,
        id_policy=case.id_policy,
        padding_id=case.padding_id,
        num_unique=case.num_unique or case.tokens,
        name=case.name,
    )
    run, stats, error = programs.observe(handle, case.start, case.batches, case.rule, staleness=case.staleness)
    reported = None if error is None else "unique" if "num_unique" in str(error) else "id"
    return Outcome(run, stats, reported)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cpu_pipeline_gives_the_bits_of_the_oracle(case):
    assert_like_the_oracle(run_on_cpu(case), case)


def run_on_stand_in(case: Case) -> Outcome:
    with NativeRanks(case, device="cpu", native=StandIn()) as ranks:
        return ranks.run()


FEW = [
    *(case for case in CASES if case.name.startswith(("width 33", "width 3,", "width 64", "a NaN"))),
    *id_cases(),
    of_fifty_steps(3, ("bfloat16", "lazy decay", "stochastic", False), staleness=1),
    backwards(of_fifty_steps(4, ("float16", "decay", "stochastic", True))),
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_driver_makes_the_calls_that_give_them(case):
    assert_like_the_oracle(run_on_stand_in(case), case)


def test_the_driver_notices_a_wrong_bit():
    (case,) = (case for case in id_cases() if case.name == "64-bit ids")
    outcome = run_on_stand_in(case)
    other = dataclasses.replace(case, start=case.start._replace(row_state=case.start.row_state + 1))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_like_the_oracle(outcome, other)


def test_the_driver_raises_what_one_rank_raised_and_leaves_none_waiting():
    (case,) = (case for case in id_cases() if case.name == "an empty rank")
    with NativeRanks(case, device="cpu", native=StandIn()) as ranks:

        def body(rank: Any, number: int) -> None:
            if number == 2:
                raise ZeroDivisionError("of rank 2")
            rank.lookup_begin(rank.inputs(case.batches[0]).ids)
            rank.lookup_done()

        with pytest.raises((ZeroDivisionError, RuntimeError)):
            ranks.on_ranks(body)


def test_the_driver_opens_contexts_as_the_package_does(monkeypatch):
    opened: list[dict[str, Any]] = []
    handle = programs.handle_on(programs.mesh_of(2), tokens=8, width=4, name="fields")

    class Recorder:
        def is_open(self, context_id: int) -> bool:
            return False

        def open_context(self, fields: dict[str, Any]) -> None:
            opened.append(fields)

    monkeypatch.setattr(runtime, "native", Recorder)
    runtime.open_context(handle)
    with NativeRanks(next(id_cases()), device="cpu", native=StandIn()) as ranks:
        assert set(opened[0]) == set(ranks.fields())
        assert {n: type(v) for n, v in opened[0].items() if v is not None} == {
            n: type(v) for n, v in ranks.fields().items() if n != "padding_id"
        }
