"""`async-emb doctor` where pieces are missing, broken, or hang: stand-ins of torch, JAX, compilers and libraries."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jax_bridge.doctor import report
from jax_bridge.doctor.children import Answer
from jax_bridge.doctor.report import examine
from torch_ext import build_jobs, build_tools
from torch_ext.build_errors import BuildError

TORCH = """
import types
__version__ = "2.13.0"
version = types.SimpleNamespace(cuda={cuda!r})
nccl = types.SimpleNamespace(version=lambda: (2, 27, 3))
cuda = types.SimpleNamespace(device_count=lambda: {gpus}, get_device_name=lambda number: "a GPU", nccl=nccl)
"""
JAX = """
import types
__version__ = "0.10.2"
ffi = types.SimpleNamespace(include_dir=lambda: {include!r})
def devices():
    return [types.SimpleNamespace(platform={platform!r}, device_kind="a kind")] * 2
"""


class Machine:
    """Packages and commands that stand in for the real ones; ``lines`` is what doctor says of them."""

    def __init__(self, folder: Path) -> None:
        self.packages, self.bin = folder / "packages", folder / "bin"
        for path in (self.packages / "torch_ext", self.bin):
            path.mkdir(parents=True)
        self.environ = {"PATH": str(self.bin), "PYTHONPATH": str(self.packages)}
        header = folder / "xla" / "ffi" / "api" / "c_api.h"
        header.parent.mkdir(parents=True)
        header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 3\n")
        self.include = str(folder)
        self.package("torch", TORCH.format(cuda=None, gpus=0))
        self.package("jax", JAX.format(include=self.include, platform="cpu"))
        self.command("g++", f'PATH={os.defpath} exec {build_tools.find_compiler().command[0]} "$@"')

    def package(self, name: str, text: str) -> None:
        (self.packages / f"{name}.py").write_text(text)

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def lines(self, seconds: float = 20.0) -> dict[str, report.Line]:
        return {line.name: line for line in examine(self.environ, seconds)}


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_all_is_well_on_this_machine(async_emb):
    status, out, err = async_emb("doctor", "--json")
    data = json.loads(out)
    problems = [line for line in data["lines"] if line["status"] == "problem"]
    assert (status, err, problems) == (0, "", [])
    assert data["ok"]
    lines = {line["name"]: line for line in data["lines"]}
    assert lines["native module"]["text"].startswith(("installed, built for torch 2.", "cached, built for torch 2."))
    assert {
        "python",
        "torch",
        "jax",
        "FFI API",
        "cache",
        "compiler",
        "ninja",
        "jobs",
        "nvcc",
        "CUDA",
        "devices",
        "memory",
    } <= set(lines)


@pytest.mark.parametrize("package", ["torch", "jax"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('libfoo.so.1: cannot open shared object file')", "ImportError: libfoo.so.1: cannot open"),
        ("import os; os.abort()", "its process was ended by SIGABRT"),
        ("import sys; print('a last word', flush=True); sys.exit(7)", "its process ended with status 7: a last word"),
        ("import time; time.sleep(60)", "its process did not answer within 5 s"),
    ],
    ids=["missing library", "abort", "exit", "hang"],
)
def test_a_framework_that_cannot_be_imported_is_a_problem_of_its_own(machine, package, text, said):
    machine.package(package, text)
    lines = machine.lines(seconds=5)
    assert lines[package].status == "problem"
    assert lines[package].text.startswith("cannot be imported: ")
    assert said in lines[package].text
    assert "python -m pip install" in lines[package].advice
    other = {"torch": "jax", "jax": "torch"}[package]
    assert lines[other].status == "ok", "the other one is not to blame"
    assert lines["compiler"].status == "ok"


def test_a_native_module_that_was_not_built_is_a_problem_with_the_command_that_builds_it(machine):
    line = machine.lines()["native module"]
    assert line.status == "problem"
    assert "pip install --no-build-isolation -e ." in line.advice


def test_a_version_outside_of_the_range_is_a_warning(machine):
    machine.package("torch", TORCH.format(cuda=None, gpus=0).replace("2.13.0", "2.15.1"))
    line = machine.lines()["torch"]
    assert (line.status, line.text) == ("warning", "2.15.1 is outside of the supported range [2.11, 2.15)")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exec /bin/sleep 60", "did not answer within 3 s"),
        ("exit 3", "ends with status 3"),
        ("kill -SEGV $$", "SIGSEGV"),
        ("echo 1.0", "says that all went well, but has made no file"),
    ],
    ids=["hang", "status", "crash", "nothing made"],
)
def test_a_compiler_that_does_not_work_is_named(machine, script, said, monkeypatch):
    monkeypatch.setattr(report, "TOOL_SECONDS", 3.0)
    machine.command("g++", script)
    line = machine.lines()["compiler"]
    assert line.status == "problem", "nothing is built, so it is needed"
    assert "hang" in line.advice or f"{machine.bin}/g++" in line.text
    assert said in line.text
    assert line.advice


def test_a_path_without_a_compiler_is_named(machine, tmp_path):
    machine.environ["PATH"] = str(tmp_path / "nothing")
    line = machine.lines()["compiler"]
    assert line.status == "problem"
    assert line.text.startswith("no C++ compiler was found: none of c++, g++, clang++. Searched: ")
    assert line.text.endswith(f"{tmp_path}/nothing")
    assert "apt-get install g++" in line.advice


@pytest.mark.parametrize("value", ["many", "0", "-1", "2.5", "\u0662"])
def test_what_the_build_refuses_as_a_number_of_jobs_is_a_problem(machine, value):
    machine.environ["MAX_JOBS"] = value
    line = machine.lines()["jobs"]
    with pytest.raises(BuildError) as of_build:
        build_jobs.parallel_jobs({"MAX_JOBS": value})
    assert line.status == "problem"
    assert f"{line.text}\n{line.advice}" == str(of_build.value)


def test_a_cache_that_the_build_refuses_is_a_problem(machine, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    machine.environ["ASYNC_EMB_CACHE"] = str(cache)
    line = machine.lines()["cache"]
    assert line.status == "problem"
    assert line.text.startswith(f"nothing can be built: {cache} can be written by others (mode 0777)")
    assert f"chmod go-w {cache}" in line.advice
    cache.chmod(0o755)
    assert machine.lines()["cache"] == report.Line("cache", "ok", f"{cache}: no builds, 0 MB")


def test_a_home_where_nothing_can_be_kept_is_a_warning_with_the_folder_that_stands_for_it(machine, tmp_path):
    machine.environ |= {"HOME": "/proc", "TMPDIR": str(tmp_path)}
    line = machine.lines()["cache"]
    assert line.status == "warning"
    assert line.text.startswith(
        f"builds go to {tmp_path}/async-emb-{os.getuid()}, because /proc/.cache/async-emb cannot be written: "
    )


def test_files_of_others_in_the_cache_are_no_damaged_builds(machine, tmp_path):
    (tmp_path / "home" / "photographs").mkdir(parents=True)
    (tmp_path / "home" / "photographs" / "one.png").touch()
    machine.environ["ASYNC_EMB_CACHE"] = str(tmp_path / "home")
    assert machine.lines()["cache"] == report.Line("cache", "ok", f"{tmp_path}/home: no builds, 0 MB")
    damaged = tmp_path / "home" / ("0" * 32)
    damaged.mkdir()
    line = machine.lines()["cache"]
    assert line.text == f"{tmp_path}/home: 1 damaged, 0 MB"
    assert line.advice.endswith(f"It may go: {damaged}"), "the build alone, not what lies beside it"


def answer(**found):
    return Answer(found, "", "")


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ({"origin": "to be built", "reason": "the native module is not installed"}, "warning", "first use builds one"),
        ({"origin": "impossible", "reason": "no compiler\nInstall one"}, "problem", "cannot be built: no compiler"),
        ({"error": "ImportError: torn"}, "problem", "ImportError: torn"),
    ],
)
def test_a_module_that_is_not_there_yet_is_told_apart_from_one_that_cannot_be(found, status, said):
    (line,) = report._native(answer(**found), answer(version="2.13.0"), answer(version="0.10.2"))
    assert line.status == status
    assert said in line.text
    assert line.advice


@pytest.mark.parametrize(
    ("running", "status"), [([0, 3], "ok"), ([0, 4], "ok"), ([0, 2], "problem"), ([1, 3], "problem")]
)
def test_handlers_newer_than_the_running_jaxlib_are_a_problem(running, status):
    info = {"torch": "2.13.0", "jaxlib": "0.10.2", "compiler": "12.2", "ffi_api": "0.3"}
    native = answer(origin="installed", info=info, works=True)
    _, line = report._native(native, answer(version="2.13.0"), answer(ffi_api=running))
    assert (line.name, line.status) == ("FFI API", status)


def test_what_is_not_there_is_no_problem_where_a_module_is(monkeypatch):
    refused = answer(error="no C++ compiler was found\nInstall one")
    assert report._compiler(refused, "warning") == ("compiler", "warning", "no C++ compiler was found", "Install one")


def test_a_compiler_that_cxx_names_and_is_not_there_is_named(machine):
    machine.environ["CXX"] = "no-such-compiler -O2"
    line = machine.lines()["compiler"]
    assert line.text.startswith("the C++ compiler of CXX='no-such-compiler -O2' was not found: ")


def test_a_broken_nvcc_is_named_where_torch_has_cuda(machine):
    machine.package("torch", TORCH.format(cuda="13.0", gpus=0))
    machine.environ["CUDA_HOME"] = str(machine.bin.parent)  # and no other toolkit that this machine may have
    machine.command("nvcc", "echo nonsense")
    line = machine.lines()["nvcc"]
    assert line.status == "warning"
    assert "nvcc does not tell its version" in line.text
    assert f"{machine.bin}/nvcc" in line.advice


def test_cuda_of_one_framework_alone_is_a_warning(machine):
    machine.package("torch", TORCH.format(cuda="13.0", gpus=2))
    lines = machine.lines()
    assert lines["CUDA"].status == "warning"
    assert lines["CUDA"].text == "torch: CUDA 13.0, NCCL 2.27.3; jax: none"
    assert lines["devices"].status == "warning"
    assert "torch sees GPUs and JAX does not" in lines["devices"].advice


def test_memory_that_jax_takes_in_advance_is_a_warning(machine):
    machine.package("jax", JAX.format(include=machine.include, platform="gpu"))
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in machine.lines()["memory"].advice
    machine.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    assert machine.lines()["memory"].status == "ok"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("ASYNC_EMB_TIMEOUT_SECONDS", "soon", "problem"),
        ("ASYNC_EMB_TIMEOUT_SECONDS", "60", "ok"),
        ("ASYNC_EMB_CUDA", "yes", "problem"),
        ("LD_PRELOAD", "", "ok"),
        ("CUDA_HOME", "nowhere", "warning"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=99999", "warning"),
    ],
)
def test_a_variable_that_cannot_work_is_named_with_its_value(name, value, status):
    lines = [line for line in report._environment({name: value, "HOME": "elsewhere"}) if line.text.startswith(name)]
    assert [(line.text, line.status) for line in lines] == [(f"{name}={value}", status)]


def test_foreign_libraries_on_the_search_path_are_named(tmp_path):
    (tmp_path / "libnccl.so.2").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere{os.pathsep}{tmp_path}"}
    (line,) = report._environment(environ)
    assert line.status == "warning"
    assert f"{tmp_path} has libnccl.so.2" in line.advice


def test_problems_give_status_1_and_say_what_to_do(async_emb, monkeypatch):
    lines = [report.Line("torch", "problem", "is not there", "Install it."), report.Line("jax", "ok", "0.10.2")]
    monkeypatch.setattr(report, "examine", lambda: iter(lines))
    status, out, _ = async_emb("doctor")
    assert status == 1
    assert out.splitlines() == [
        "problem torch         is not there",
        "                      → Install it.",
        "ok      jax           0.10.2",
        "1 ok, 0 warnings, 1 problems",
    ]
