"""The build at first use: many processes, killed ones, and signals. Each builds a module of one small source."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torch_ext import build_cache, build_lock, first_use
from torch_ext.build_errors import BuildError

from . import tiny_build

PATIENCE = 60.0  # seconds after which a test says what it waits for


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    return Place(tmp_path, monkeypatch)


class Place:
    """Sources, a compiler that can be stopped, a cache, and processes that use them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.root = tiny_build.write_sources(folder / "src")
        self.cache = folder / "cache"
        monkeypatch.setenv("ASYNC_EMB_CACHE", str(self.cache))
        monkeypatch.setenv("CXX", str(tiny_build.write_compiler(folder)))

    @property
    def key(self) -> str:
        return tiny_build.tiny_recipe(self.root).digest()

    @property
    def lock(self) -> Path:
        return build_lock_of(self.cache, self.key)

    def compilations(self) -> list[int]:
        """The process of each compiler that was started."""
        notes = self.folder / "compilations"
        return [int(line) for line in notes.read_text().split()] if notes.exists() else []

    @contextmanager
    def stopped_compilers(self) -> Iterator[None]:
        closed = self.folder / "closed"
        closed.touch()
        yield
        closed.unlink()

    def start(self, root: Path | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, tiny_build.__file__, str(root or self.root)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def start_and_wait_for_its_compiler(self) -> subprocess.Popen[str]:
        before = len(self.compilations())
        process = self.start()
        until(lambda: len(self.compilations()) > before)
        return process

    def left_over(self) -> list[str]:
        """What is in the cache beside finished builds."""
        return sorted(path.name for path in self.cache.iterdir() if not (path / build_cache.MANIFEST).exists())


def build_lock_of(cache: Path, key: str) -> Path:
    return build_cache.lock_path(cache, key)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def result(process: subprocess.Popen[str]) -> dict:
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return json.loads(output)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# ---- one build for many (case B8)


def test_eight_processes_at_once_build_once_and_load_the_same_bytes(place):
    with place.stopped_compilers():
        processes = [place.start() for _ in range(8)]
        until(place.compilations)
    results = [result(process) for process in processes]
    assert len(place.compilations()) == 1
    assert [found["number"] for found in results] == [1] * 8
    assert len({(found["path"], found["sha256"]) for found in results}) == 1
    assert place.left_over() == []


def test_two_versions_of_the_sources_share_a_cache_without_mixing(place):
    other = tiny_build.write_sources(place.folder / "other", number=2)
    processes = [place.start(root) for root in (place.root, other, place.root, other)]
    results = [result(process) for process in processes]
    assert [found["number"] for found in results] == [1, 2, 1, 2]
    assert len(place.compilations()) == 2
    assert len({Path(found["path"]).parent for found in results}) == 2


def test_a_living_builder_is_waited_for_and_named(place):
    with place.stopped_compilers():
        builder = place.start_and_wait_for_its_compiler()
        second = place.start()
        line = second.stderr.readline()
    assert line.startswith(f"async-emb: waiting for process {builder.pid} on ")
    assert f"(lock: {place.lock})" in line
    assert result(builder)["path"] == result(second)["path"]
    assert len(place.compilations()) == 1


def test_those_who_waited_report_the_builders_error_and_do_not_compile_again(place):
    (place.root / "tiny.cpp").write_text("int number = one;\n")
    with place.stopped_compilers():
        builder = place.start_and_wait_for_its_compiler()
        second = place.start()
        second.stderr.readline()
    for process in (builder, second):
        errors = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 1
        assert "failed: " + str(place.root / "tiny.cpp") + ":1:14: error: " in errors
    assert len(place.compilations()) == 1
    # A later one tries again.
    tiny_build.write_sources(place.root)
    assert result(place.start())["number"] == 1


# ---- builders that die (cases B1 and R7 b)


def test_after_a_killed_build_the_next_process_builds(place):
    with place.stopped_compilers():
        builder = place.start_and_wait_for_its_compiler()
        builder.kill()
        builder.wait()
        assert place.left_over() != []
    assert result(place.start())["number"] == 1
    assert len(place.compilations()) == 2
    assert place.left_over() == []


def test_when_the_builder_is_killed_who_waits_for_it_builds(place):
    with place.stopped_compilers():
        builder = place.start_and_wait_for_its_compiler()
        second = place.start()
        assert f"waiting for process {builder.pid}" in second.stderr.readline()
        builder.kill()
        builder.wait()
    assert result(second)["number"] == 1
    assert len(place.compilations()) == 2
    assert place.left_over() == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end the children of a killed process")
def test_no_compiler_goes_on_for_a_killed_builder(place):
    with place.stopped_compilers():
        builder = place.start_and_wait_for_its_compiler()
        builder.kill()
        builder.wait()
        until(lambda: not any(is_running(pid) for pid in place.compilations()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_build_and_leaves_nothing(place, number):
    with place.stopped_compilers():
        builder = place.start_and_wait_for_its_compiler()
        builder.send_signal(number)
        builder.communicate(timeout=PATIENCE)
        assert builder.returncode == -number
        assert list(place.cache.iterdir()) == []
        assert not any(is_running(pid) for pid in place.compilations())
    assert result(place.start())["number"] == 1


def test_a_lock_file_beside_a_finished_build_locks_nothing(place):
    first = result(place.start())
    place.lock.touch()
    assert result(place.start()) == first
    assert len(place.compilations()) == 1


def test_a_lock_file_without_a_holder_locks_nothing(place):
    place.cache.mkdir(mode=0o700)
    place.lock.write_text("process 1 on another machine\n")
    assert result(place.start())["number"] == 1
    assert place.left_over() == []


def test_who_waits_for_too_long_names_the_lock_its_holder_and_its_age(tmp_path):
    path = tmp_path / "key.lock"
    holder = build_lock.try_lock(path)
    try:
        with (
            pytest.raises(BuildError) as caught,
            build_lock.locked(path, lambda line: None, limit=0.2),
        ):
            pass
    finally:
        os.close(holder)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"waited 0 s for process {os.getpid()} on ")
    assert first.endswith(f"which has been building for 0 s (lock: {path}).")


# ---- never old code


@pytest.mark.parametrize(
    "change",
    [
        lambda root: {"identity": {"torch": "2.13.0+other"}},
        lambda root: {"identity": {"FFI API": "0.4"}},
        lambda root: {"identity": {"CPU": "another"}},
        lambda root: {"compile_flags": ("-O1",)},
        lambda root: {"link_flags": ("-s",)},
        lambda root: {"compiler": ("another",)},
        lambda root: (root / "tiny.cpp").write_text("// changed\n") and {},
        lambda root: (root / "folder" / "number.h").write_text("// changed\n") and {},
    ],
    ids=["torch", "ffi-api", "cpu", "flags", "link", "compiler", "source", "header"],
)
def test_whatever_changes_makes_another_build(place, change):
    import dataclasses

    recipe = tiny_build.tiny_recipe(place.root)
    before = recipe.digest()
    assert tiny_build.tiny_recipe(place.root).digest() == before
    assert dataclasses.replace(recipe, **change(place.root)).digest() != before


def test_another_version_of_torch_is_another_build_beside_the_first(place):
    lines: list[str] = []
    paths = {
        first_use.module_of(tiny_build.tiny_recipe(place.root, identity={"torch": version}), report=lines.append)
        for version in ("2.13.0+cpu", "2.13.1+cpu", "2.13.0+cpu")
    }
    assert len(paths) == 2
    assert len(place.compilations()) == 2
    assert [line.split(";")[0] for line in lines if "building" in line] == [
        "building tiny.so from 1 files, once for torch 2.13.0+cpu",
        "building tiny.so from 1 files, once for torch 2.13.1+cpu",
    ]


def test_equal_sources_in_another_place_share_the_build(place):
    other = tiny_build.write_sources(place.folder / "other")
    assert result(place.start(other))["path"] == result(place.start())["path"]
    assert len(place.compilations()) == 1


# ---- what is said meanwhile


def test_a_line_every_while_says_what_is_being_compiled(place):
    with place.stopped_compilers():
        builder = place.start()
        lines = [builder.stderr.readline() for _ in range(3)]
    assert lines[0].startswith("async-emb: building tiny.so from 1 files, once for compiler ")
    assert str(place.cache) in lines[0]
    assert [line.split(" s: ")[1] for line in lines[1:]] == ["0 steps done, now tiny.cpp\n"] * 2
    assert "built tiny.so in " in builder.communicate(timeout=PATIENCE)[1].splitlines()[-1]
