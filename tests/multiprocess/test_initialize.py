"""Starting a job: from arguments, from torchrun's and SLURM's variables, and what is refused before it hangs."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = "tests.multiprocess._starts"


def torchrun(port: int):
    # MASTER_PORT is torch's, the coordinator takes the next one.
    return lambda number: {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def slurm(port: int):
    # JAX works the port out of the number of the job.
    return lambda number: {
        "SLURM_JOB_ID": str(4096 * 25 + port - (65535 - 4096 + 1)),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "SLURM_STEP_NUM_NODES": "1",
    }


@pytest.mark.parametrize("variables", [torchrun, slurm])
def test_a_job_starts_from_the_variables_of_its_launcher(start, variables):
    # From a range that the system gives nobody, so that the port is as free as any.
    port = 61440 + os.getpid() % 4000
    results = start(f"{PROGRAM}:from_environment", processes=2, devices=2, environment=variables(port)).wait()
    for number, (process_id, size, same_again, index, devices, other) in enumerate(results):
        assert (process_id, size, index, devices, same_again) == (number, 2, number, 4, True)
        assert other["type"] == "ContextError"
        assert "this process has joined a job already: coordinator_address is" in other["text"]
        assert f"process_id is {number}, now 3" in other["text"]


def test_what_cannot_work_is_refused_by_name(start):
    job = start(f"{PROGRAM}:refused_starts", processes=1)
    (results,) = job.wait()
    expected = {
        "nothing": "does not know num_processes and process_id and coordinator_address of this job",
        "rank": "process_id=2 and num_processes=2 (from torchrun) contradict each other",
        "half": "of torchrun's variables WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set",
        "contradiction": "num_processes=4 contradicts torchrun's WORLD_SIZE=2",
        "alone": "cannot join its job: of 2 processes 1 did not come within 1 s; 0 did",
        "unreachable": "could not be reached within 1 s",
        "taken": f"no store can be served at 127.0.0.1:{job.port}",
        "late": "came too late to make this process 1 of 2: JAX has its devices already",
    }
    for name, text in expected.items():
        assert results[name]["type"] == "ContextError", results[name]
        assert text in results[name]["text"]
        assert "\n" not in results[name]["text"]


def test_processes_that_were_told_different_sizes_say_so(start):
    for result in start(f"{PROGRAM}:different_sizes", processes=2).wait():
        assert result["type"] == "ContextError"
        assert "process 1 was told of 3 processes, process 0 of 2" in result["text"]
