"""What a lookup gives: the table's own bits, zeros for padding and for ids that are dropped, and never another row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_bridge.errors import IdError

from . import _programs as programs
from ._programs import Batch, Rule, fresh

REPOSITORY = Path(__file__).parents[2]
ROWS, WIDTH = 8, 80
BAD_IDS = [-1, 8, 9, 2**31 - 1, -(2**31)]
POLICIES = ["error", "drop", "clamp"]


def table_of() -> np.ndarray:
    return np.arange(1, ROWS * WIDTH + 1, dtype=np.float32).reshape(ROWS, WIDTH)


def look_up(ids, *, table=None, ranks=2, **options):
    """The outcome of one lookup, followed by an update with gradients of zero, which changes nothing."""
    ids = np.asarray(ids, np.int32)
    start = fresh(table_of() if table is None else table)
    width = start.table.shape[1]
    options = {"dtype": start.table.dtype, "name": "lookup semantics"} | options
    handle = programs.handle_on(programs.mesh_of(ranks), tokens=ids.size, width=width, **options)
    batch = Batch(ids, np.zeros((ids.size, width), start.table.dtype))
    outcome = programs.observe(handle, start, [batch], Rule())
    programs.assert_same_bits(outcome.run.table, start.table)
    programs.assert_same_bits(outcome.run.row_state, start.row_state)
    return outcome


def read_as(bad: int, policy: str) -> np.ndarray:
    """The row that an id outside of the table reads as."""
    return np.zeros(WIDTH, np.float32) if policy != "clamp" else table_of()[0 if bad < 0 else -1]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_id_outside_of_the_table_never_reads_a_wrong_row(policy, bad):
    alone = look_up([bad] * 4, id_policy=policy)
    assert np.array_equal(alone.run.rows[0], np.tile(read_as(bad, policy), (4, 1)))
    assert alone.stats["bad_ids"] == 4
    mixed = look_up([5, bad, 0, 7], id_policy=policy)
    assert np.array_equal(mixed.run.rows[0], [table_of()[5], read_as(bad, policy), table_of()[0], table_of()[7]])
    assert mixed.stats["bad_ids"] == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bad", BAD_IDS)
def test_policy_error_is_raised_after_the_step_with_id_position_rows_and_step(bad, ranks):
    error = look_up([5, 7, bad, 0], ranks=ranks, name="guarded").error
    assert isinstance(error, IdError)
    assert str(error) == (
        f"async_emb 'guarded': token id {bad} at position 2 of lookup step 1 is outside of the table's rows [0, 8)"
    )
    assert "id_policy='drop'" in "".join(error.__notes__)


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_the_other_policies_raise_nothing(policy):
    assert look_up([5, -1, 8, 0], id_policy=policy).error is None


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_first_offender_of_the_first_step_is_named(ranks):
    handle = programs.handle_on(programs.mesh_of(ranks), tokens=4, width=WIDTH, name="guarded")
    grads = np.zeros((4, WIDTH), np.float32)
    batches = [Batch(np.array(ids, np.int32), grads) for ids in ([0, 1, 2, 3], [0, -7, 99, 3], [55, 0, 0, 0])]
    outcome = programs.observe(handle, fresh(table_of()), batches, Rule())
    assert "token id -7 at position 1 of lookup step 2" in str(outcome.error)
    assert outcome.stats["bad_ids"] == 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("padding_id", [3, 0, -1, 8, 100])
def test_padding_reads_zeros_and_is_no_error_wherever_it_lies(padding_id, ranks):
    outcome = look_up([padding_id, 1, padding_id, 2], ranks=ranks, padding_id=padding_id)
    zeros = np.zeros(WIDTH, np.float32)
    assert np.array_equal(outcome.run.rows[0], [zeros, table_of()[1], zeros, table_of()[2]])
    assert outcome.error is None
    assert (outcome.stats["padding_ids"], outcome.stats["bad_ids"]) == (2, 0)


@pytest.mark.parametrize(("padding_id", "landing", "elsewhere"), [(0, -5, 9), (7, 9, -5)])
def test_an_id_clamped_onto_padding_reads_zeros(padding_id, landing, elsewhere):
    outcome = look_up([landing, padding_id, elsewhere, 2], padding_id=padding_id, id_policy="clamp")
    zeros = np.zeros(WIDTH, np.float32)
    assert np.array_equal(outcome.run.rows[0], [zeros, zeros, table_of()[7 - padding_id], table_of()[2]])
    assert (outcome.stats["padding_ids"], outcome.stats["bad_ids"]) == (1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_pattern_survives(dtype, ranks):
    """NaN payloads, signalling NaNs, infinities, denormals and -0.0 included."""
    if dtype == np.float32:
        patterns = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32)
        patterns[:6] = [0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x80000000, 1, 0xFF800000]
    else:
        patterns = np.arange(2**16, dtype=np.uint16)
    table = patterns.view(dtype).reshape(-1, 8)
    ids = np.random.default_rng(1).permutation(len(table))
    outcome = look_up(ids, table=table, ranks=ranks)
    programs.assert_same_bits(outcome.run.rows[0], table[ids])


def test_ids_may_have_any_shape():
    outcome = look_up([[[5, 1], [0, 0]], [[7, 5], [2, 3]]])
    assert np.array_equal(outcome.run.rows[0], table_of()[[5, 1, 0, 0, 7, 5, 2, 3]])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_batch_of_padding_alone_trains_nothing_and_the_next_is_normal(ranks):
    handle = programs.handle_on(programs.mesh_of(ranks), tokens=4, width=WIDTH, padding_id=3, name="empty batches")
    batches = [
        Batch(np.array(ids, np.int32), np.ones((4, WIDTH), np.float32))
        for ids in ([3, 3, 3, 3], [5, 3, 3, 3], [3, 3, 3, 3], [1, 5, 0, 1])
    ]
    start = fresh(table_of())
    outcome = programs.observe(handle, start, batches, Rule(eps=0.0))
    assert np.array_equal(outcome.run.rows[0], np.zeros((4, WIDTH)))
    assert outcome.run.norms[:3].tolist() == [0.0, np.sqrt(np.float32(WIDTH)), 0.0]
    assert outcome.run.valids.tolist() == [1, 1, 1, 1]
    programs.assert_same_run(outcome.run, programs.expected(start, batches, Rule(eps=0.0), padding_id=3))


@pytest.mark.parametrize("busy_rank", [0, 2, 3])
def test_one_rank_may_have_all_the_ids(busy_rank):
    handle = programs.handle_on(programs.mesh_of(4), tokens=16, width=WIDTH, padding_id=0, name="one busy rank")
    lonely = np.zeros(16, np.int32)
    lonely[4 * busy_rank : 4 * busy_rank + 4] = [1, 5, 1, 7]
    rng = np.random.default_rng(0)
    batches = [
        Batch(ids, rng.normal(size=(16, WIDTH)).astype(np.float32))
        for ids in (lonely, lonely, rng.integers(0, ROWS, 16).astype(np.int32))
    ]
    start = fresh(table_of())
    for staleness in (0, 1):
        outcome = programs.observe(handle, start, batches, Rule(), staleness=staleness)
        expected = programs.expected(start, batches, Rule(), staleness=staleness, padding_id=0)
        programs.assert_same_run(outcome.run, expected)


def run_in_process(code: str, **environment: str) -> list[str]:
    """The lines that a program prints in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


TINY = """
import numpy as np
from tests.jax_bridge import _programs as programs
from tests.jax_bridge._programs import Batch, Rule, fresh

for ranks in (1, 2, 4):
    for width in (4, 8):
        handle = programs.handle_on(programs.mesh_of(ranks), tokens=4, width=width, name="tiny")
        batch = Batch(np.array([0, 1, 1, 2], np.int32), np.ones((4, width), np.float32))
        start = fresh(np.ones((8, width), np.float32))
        for staleness in (0, 1):
            outcome = programs.observe(handle, start, [batch, batch], Rule(), staleness=staleness)
            programs.assert_same_run(outcome.run, programs.expected(start, [batch, batch], Rule(), staleness=staleness))
            print(ranks, width, staleness)
"""


def test_a_program_of_small_buffers_alone_does_not_wait_for_itself():
    """XLA:CPU runs such a program one call after the other, in an order that the data allow: a done may come before its
    lease."""
    assert len(run_in_process(TINY, ASYNC_EMB_TIMEOUT_SECONDS="10")) == 12


WIDE_IDS = """
import numpy as np
from tests.jax_bridge import _programs as programs
from tests.jax_bridge._programs import Batch, Rule, fresh

wide = [2**32, 2**32 + 5, -(2**32), 2**63 - 1, -(2**63), 5, 2**31, 3]
start = fresh(np.arange(1, 33, dtype=np.float32).reshape(8, 4))
grads = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
for policy in ("error", "drop", "clamp"):
    handle = programs.handle_on(programs.mesh_of(2), tokens=8, width=4, id_policy=policy, name=policy)
    batch = Batch(np.array(wide, np.int64), grads)
    outcome = programs.observe(handle, start, [batch], Rule())
    programs.assert_same_run(outcome.run, programs.expected(start, [batch], Rule(), id_policy=policy))
    assert outcome.stats["bad_ids"] == 6
    print(outcome.error)
"""


def test_int64_ids_are_not_narrowed():
    assert run_in_process(WIDE_IDS, JAX_ENABLE_X64="1") == [
        "async_emb 'error': token id 4294967296 at position 0 of lookup step 1 is outside of the table's rows [0, 8)",
        "None",
        "None",
    ]
