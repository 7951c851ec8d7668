"""Two processes of torch.distributed over Gloo: the bits of threads of one, and DistributedDataParallel beside them."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch

from . import _processes, through_torch
from .cases import name_of

pytestmark = pytest.mark.multiprocess
_SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run(job)`` starts the processes, waits, and gives the folder that they have written to."""
    _SERVER.set_forkserver_preload(["tests.both_faces._processes"])

    def start(job):
        folder = tmp_path_factory.mktemp(job)
        processes = [
            _SERVER.Process(target=_processes.run, args=(rank, str(folder), job), daemon=True)
            for rank in range(_processes.PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * len(processes)
        return folder

    return start


def test_two_processes_make_the_same_bits_as_threads_of_one(run):
    folder = run("train_cases")
    for number, case in enumerate(_processes.cases()):
        wanted = through_torch.run(case, ranks=2)
        got = [np.load(folder / f"{number}-{rank}.npz") for rank in range(2)]
        for of_rank in got:
            for key in ("weight", "accumulator"):
                expected = getattr(wanted, {"weight": "weights"}.get(key, key)).view(np.uint8)
                np.testing.assert_array_equal(of_rank[key], expected, f"{name_of(case)}: {key}")
            if wanted.last_step is not None:
                np.testing.assert_array_equal(of_rank["last_step"].view(np.int32), wanted.last_step)
            np.testing.assert_array_equal(of_rank["reports"], np.array(wanted.reports, np.float32))
            assert of_rank["errors"].tolist() == [f"{step}: {text}" for step, text in wanted.errors]
        rows = np.concatenate([of_rank["rows"] for of_rank in got], axis=1)
        np.testing.assert_array_equal(rows, wanted.rows.view(np.uint8), name_of(case))


def test_the_dense_part_may_be_distributed_data_parallel(run):
    folder = run("train_beside_ddp")
    first, second = (torch.load(folder / f"ddp-{rank}.pt") for rank in range(2))
    alone = _processes.ddp_run(0, 1)
    assert first.keys() == second.keys() == alone.keys()
    for key in alone:
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], alone[key], rtol=1e-5, atol=1e-6)  # torch's own sums differ in order


def test_a_rank_that_is_gone_is_named_on_the_other_with_the_call_and_the_step(run):
    folder = run("lose_the_other")
    said = (folder / "said-0.txt").read_text()
    assert "'users' lost rank 1 (device 1, process 1) in lookup_start of step 2" in said


def test_a_field_that_differs_is_named_on_both(run):
    folder = run("mean_different_tables")
    for rank in range(2):
        said = (folder / f"different-{rank}.txt").read_text()
        assert said == "async_emb context 'users': padding_id differs between ranks: 0 in rank 0, 1 in rank 1"
