"""The promise of the numerics: from the same ids and gradient rows the same bits, on any number of ranks, run after
run, on every instruction set, in both schedules, and equal to the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from . import _fifty_steps as fifty_steps
from . import _programs as programs
from ._fifty_steps import CASES, PAIRWISE, RANKS, name_of

REPOSITORY = Path(__file__).parents[2]


def test_the_fifty_steps_meet_what_they_should():
    run = fifty_steps.expected(("float32", "decay", "nearest", True))
    skipped = np.flatnonzero(run.valids == 0)
    assert skipped.tolist() == [17, 18, 23]
    assert np.isnan(run.norms[17])
    assert run.norms[18] == np.inf
    assert run.norms[7] == run.norms[29] == 0
    assert 0 < run.norms[31] < 1e-18, "squares are denormal, and count"
    assert 10 < np.count_nonzero(run.norms > 15) < 40
    batches = fifty_steps.batches_of("float32")
    assert max(np.unique(batch.ids, return_counts=True)[1].max() for batch in batches) > 32
    assert all(len(np.unique(batch.ids)) < 47 for batch in batches)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_any_number_of_ranks_gives_the_bits_of_the_oracle(case, ranks):
    run = fifty_steps.run_on(fifty_steps.handle_of(case[0], ranks), case)
    programs.assert_same_run(run, fifty_steps.expected(case))


@pytest.mark.parametrize("case", [case for case in CASES if case not in PAIRWISE], ids=name_of)
def test_every_rule_gives_the_bits_of_the_oracle_on_four_ranks(case):
    run = fifty_steps.run_on(fifty_steps.handle_of(case[0], 4), case)
    programs.assert_same_run(run, fifty_steps.expected(case))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", [PAIRWISE[0], PAIRWISE[-1]], ids=name_of)
def test_staleness_one_gives_the_bits_of_the_simulated_schedule(case, ranks):
    run = fifty_steps.run_on(fifty_steps.handle_of(case[0], ranks), case, staleness=1)
    programs.assert_same_run(run, fifty_steps.expected(case, staleness=1))


def test_staleness_one_differs_from_staleness_zero():
    exact, stale = (fifty_steps.expected(PAIRWISE[0], staleness) for staleness in (0, 1))
    assert not np.array_equal(exact.rows, stale.rows)


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.parametrize("explicit", [False, True], ids=["auto axes", "explicit axes"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_axis_types_and_vma_checks_change_no_bit(staleness, explicit, check_vma):
    case = PAIRWISE[-1]
    name = "explicit" if explicit else "auto"
    handle = fifty_steps.handle_on_mesh(case[0], programs.mesh_of(4, explicit=explicit), name=name)
    run = fifty_steps.run_on(handle, case, staleness=staleness, check_vma=check_vma)
    programs.assert_same_run(run, fifty_steps.expected(case, staleness))


@pytest.mark.parametrize("sizes", [(2, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("data_axis", [("a", "b"), ("b", "a")], ids=str)
def test_tokens_count_in_the_order_of_the_global_array(sizes, data_axis):
    """Ranks are numbered over (a, b). Over (b, a) other ranks hold the blocks, but the global array is the same."""
    case = PAIRWISE[0]
    handle = fifty_steps.handle_on_mesh(case[0], programs.mesh_of(*sizes, names=("a", "b")), data_axis=data_axis)
    assert (handle.token_blocks == tuple(range(handle.group_size))) == (data_axis == ("a", "b"))
    programs.assert_same_run(fifty_steps.run_on(handle, case), fifty_steps.expected(case))


def test_devices_in_any_order_give_the_same_bits():
    case = PAIRWISE[0]
    backwards = jax.sharding.Mesh(np.array(jax.devices("cpu")[3::-1]), ("table",))
    handle = fifty_steps.handle_on_mesh(case[0], backwards, name="backwards")
    programs.assert_same_run(fifty_steps.run_on(handle, case), fifty_steps.expected(case))


@pytest.mark.parametrize("staleness", [0, 1])
def test_twenty_repetitions_give_the_same_digest(staleness):
    case = PAIRWISE[-1]
    handle = fifty_steps.handle_of(case[0], 4)
    digests = {fifty_steps.run_on(handle, case, staleness=staleness).digest() for _ in range(20)}
    assert digests == {fifty_steps.expected(case, staleness).digest()}


def instruction_sets() -> list[str]:
    """Those that this machine has, by the names that ASYNC_EMB_CPU takes."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ["baseline"]
    needs = {
        "avx2": {"avx2", "f16c"},
        "avx512": {"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    }
    return ["baseline", *(name for name, needed in needs.items() if needed <= flags)]


@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_gives_the_bits_of_the_oracle(name):
    process = subprocess.run(
        [sys.executable, "-m", "tests.jax_bridge._fifty_steps", "3"],
        cwd=REPOSITORY,
        env=os.environ | {"ASYNC_EMB_CPU": name},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    used, *digests = process.stdout.split()
    assert used == name
    assert digests == [fifty_steps.expected(case).digest() for case in fifty_steps.ONE_OF_EACH_DTYPE]
