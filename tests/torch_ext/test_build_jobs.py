"""How many compilers run at once (case B8 c, d), on machines that are folders of what Linux says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_ext import build_jobs
from torch_ext.build_errors import BuildError

GIB = 1024**3


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """Eight cores, and memory that nobody knows."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    return tmp_path


def put(system: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return system


def jobs(system: Path, files: dict[str, object]) -> int:
    return build_jobs.parallel_jobs({}, put(system, files))


def meminfo(available: float) -> dict[str, object]:
    return {"proc/meminfo": f"MemTotal: 999999999 kB\nMemAvailable: {int(available * GIB / 1024)} kB"}


@pytest.mark.parametrize(("gib", "expected"), [(0.5, 1), (2, 1), (3.9, 1), (4, 2), (9, 4), (64, 8)])
def test_memory_that_is_free_bounds_the_jobs_and_so_do_cores(machine, gib, expected):
    assert jobs(machine, meminfo(gib)) == expected


@pytest.mark.parametrize("group", ["", "user.slice/job"])
def test_a_container_of_two_gibibytes_runs_one_compiler(machine, group):
    files = meminfo(64) | {
        "proc/self/cgroup": f"0::/{group}",
        f"sys/fs/cgroup/{group}/memory.max": 2 * GIB,
        f"sys/fs/cgroup/{group}/memory.current": GIB // 4,
    }
    assert jobs(machine, files) == 1


def test_the_limit_of_an_outer_group_counts(machine):
    files = meminfo(64) | {
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/memory.max": 6 * GIB,
        "sys/fs/cgroup/outer/memory.current": 0,
        "sys/fs/cgroup/outer/inner/memory.max": "max",
        "sys/fs/cgroup/outer/inner/memory.current": 0,
    }
    assert jobs(machine, files) == 3


def test_files_that_the_kernel_keeps_in_memory_do_not_count(machine):
    files = meminfo(64) | {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 9 * GIB,
        "sys/fs/cgroup/memory.current": 8 * GIB,
        "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {7 * GIB}",
    }
    assert jobs(machine, files) == 4


def test_limits_of_version_1_count_also_without_the_folder_of_the_group(machine):
    files = meminfo(64) | {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 5 * GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
    }
    assert jobs(machine, files) == 2


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 100000"},
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 300000,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
        },
    ],
)
def test_a_containers_share_of_the_cores_counts(machine, files):
    assert jobs(machine, files) == 3


@pytest.mark.parametrize("text", ["max 100000", "50000 100000"])
def test_no_share_is_no_bound_and_half_a_core_is_one(machine, text):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text}
    assert jobs(machine, files) == (8 if "max" in text else 1)


def test_a_system_that_says_nothing_is_bounded_by_cores(machine):
    assert jobs(machine, {}) == 8


def test_the_users_number_is_taken(machine):
    put(machine, meminfo(1))
    assert build_jobs.parallel_jobs({"MAX_JOBS": "7"}, machine) == 7
    assert build_jobs.parallel_jobs({"MAX_JOBS": "1"}, machine) == 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_what_is_no_number_of_jobs_is_refused(text):
    with pytest.raises(BuildError, match=f"MAX_JOBS='{text}' is not a positive whole number"):
        build_jobs.parallel_jobs({"MAX_JOBS": text})
