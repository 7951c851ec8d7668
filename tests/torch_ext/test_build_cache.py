"""Whose builds are used, where they are kept, and what happens to damaged ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_ext import build_cache, build_lock, first_use
from torch_ext.build_errors import BuildError

from . import tiny_build

MODULE = "tiny.so"
KEY, ANOTHER, THIRD = "1" * 32, "2" * 32, "3" * 32


@pytest.fixture
def recipe(tmp_path):
    return tiny_build.tiny_recipe(tiny_build.write_sources(tmp_path / "src"))


@pytest.fixture
def cache(tmp_path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def keep(cache: Path, key: str, content: bytes = b"a module") -> Path:
    """Puts a finished build into a cache, whatever it is."""
    build_cache.prepare(cache)
    partial = build_cache.partial_folder(cache, key)
    (partial / MODULE).write_bytes(content)
    path = build_cache.publish(partial, partial / MODULE, cache, key, {"module": MODULE, "identity": {"torch": "1"}})
    partial.rmdir()
    return path


@pytest.fixture
def somebody_else(monkeypatch):
    """This process becomes one of another user, to whom what is in the cache is foreign."""
    monkeypatch.setattr(build_cache, "_trusted_users", lambda: {4321})


# ---- somebody else's


def test_what_was_kept_is_found(cache):
    path = keep(cache, KEY)
    assert build_cache.find(cache, KEY, MODULE) == path
    assert path.read_bytes() == b"a module"
    assert build_cache.find(cache, ANOTHER, MODULE) is None


def test_the_build_of_another_user_is_not_used(cache, somebody_else):
    (cache / KEY).mkdir()
    with pytest.raises(build_cache.UnusableCacheError, match=f"belongs to user {os.getuid()}, and this process"):
        build_cache.find(cache, KEY, MODULE)


@pytest.mark.parametrize("part", ["", KEY, f"{KEY}/{MODULE}", f"{KEY}/build.json"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_what_others_can_write_is_not_used(cache, part, mode):
    keep(cache, KEY)
    (cache / part).chmod(mode)
    with pytest.raises(build_cache.UnusableCacheError) as caught:
        build_cache.find(cache, KEY, MODULE)
    message = str(caught.value)
    assert message.startswith(f"{cache / part} can be written by others (mode {mode:04o})")
    assert f"chmod go-w {cache / part}" in message


def test_a_folder_like_the_one_for_temporary_files_will_do(cache):
    cache.chmod(0o1777)
    path = keep(cache, KEY)
    assert build_cache.find(cache, KEY, MODULE) == path


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can give files away")
@pytest.mark.parametrize("part", [KEY, f"{KEY}/{MODULE}"])
def test_a_file_given_to_another_user_is_foreign(cache, part, monkeypatch):
    keep(cache, KEY)
    os.chown(cache / part, 4321, -1)
    with pytest.raises(build_cache.UnusableCacheError, match="belongs to user 4321, and this process to user 0"):
        build_cache.find(cache, KEY, MODULE)


def test_a_link_into_a_foreign_folder_is_foreign(cache, tmp_path):
    keep(tmp_path / "elsewhere", KEY)
    (tmp_path / "elsewhere" / KEY).chmod(0o777)
    (cache / KEY).symlink_to(tmp_path / "elsewhere" / KEY)
    with pytest.raises(build_cache.UnusableCacheError, match="can be written by others"):
        build_cache.find(cache, KEY, MODULE)


def test_a_foreign_cache_that_the_user_named_is_an_error(recipe, cache):
    cache.chmod(0o777)
    with pytest.raises(BuildError) as caught:
        first_use.module_of(recipe, environ={"ASYNC_EMB_CACHE": str(cache)}, report=lambda line: None)
    assert f"{cache} can be written by others (mode 0777)" in str(caught.value)
    assert str(caught.value).endswith("Set ASYNC_EMB_CACHE to a folder of your own that can be written")


# ---- damaged


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda build: (build / MODULE).write_bytes(b"a modul"), f"{MODULE} has the SHA-256 "),
        (lambda build: (build / MODULE).unlink(), f"{MODULE} is missing"),
        (lambda build: (build / "build.json").unlink(), "build.json is missing"),
        (lambda build: (build / "build.json").write_text("{"), "JSONDecodeError"),
        (lambda build: (build / "build.json").write_text("[]"), "TypeError"),
    ],
)
def test_a_damaged_build_is_not_used(cache, harm, problem):
    keep(cache, KEY)
    harm(cache / KEY)
    with pytest.raises(build_cache.DamagedBuildError) as caught:
        build_cache.find(cache, KEY, MODULE)
    assert f"the build in {cache / KEY} is damaged: {problem}" in str(caught.value)


def test_a_damaged_build_is_built_again_and_that_is_said(recipe, cache):
    lines: list[str] = []
    environ = {"ASYNC_EMB_CACHE": str(cache)}
    path = first_use.module_of(recipe, environ=environ, report=lines.append)
    assert " is damaged: " not in " ".join(lines)
    path.write_bytes(path.read_bytes()[:1000])
    assert first_use.module_of(recipe, environ=environ, report=lines.append) == path
    assert any(f"the build in {path.parent} is damaged: tiny.so has the SHA-256" in line for line in lines)
    assert tiny_build.number_of(path) == 1
    assert [entry.name for entry in cache.iterdir()] == [path.parent.name]


def test_what_a_killed_build_left_is_removed_by_the_next_of_any_key(cache):
    partial = build_cache.partial_folder(cache, KEY)
    (partial / "object.o").write_bytes(b"half")
    build_cache.remove_left_behind(cache, ANOTHER)
    assert list(cache.iterdir()) == []


def test_a_build_under_way_is_left_alone(cache):
    partial = build_cache.partial_folder(cache, KEY)
    holder = build_lock.try_lock(build_cache.lock_path(cache, KEY))
    build_cache.remove_left_behind(cache, ANOTHER)
    os.close(holder)
    assert partial.is_dir()


def test_a_folder_of_somebody_else_in_the_cache_is_no_build(cache):
    keep(cache, KEY)
    for name in ("photographs", ".building-a-house", KEY[1:], "4" * 33):
        (cache / name).mkdir()
        (cache / name / "file").write_text("theirs")
    build_cache.remove_left_behind(cache, ANOTHER)
    assert [build.path.name for build in build_cache.builds(cache)] == [KEY]
    assert len(list(cache.glob("*/file"))) == 4


# ---- where


@pytest.mark.parametrize("kind", ["open", "file", "below a file", "foreign"])
def test_what_a_build_refuses_is_known_before_it_and_nothing_is_left(kind, recipe, tmp_path, monkeypatch):
    cache = tmp_path / "one" / "cache"
    if kind == "open":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    elif kind == "foreign":
        cache.mkdir(parents=True)
        monkeypatch.setattr(build_cache, "_trusted_users", lambda: {4321})
    else:
        (tmp_path / "one").mkdir()
        (cache if kind == "file" else cache.parent / "file").touch()
        cache = cache if kind == "file" else cache.parent / "file" / "cache"
    environ = {"ASYNC_EMB_CACHE": str(cache)}
    with pytest.raises(BuildError) as before:
        first_use.require_possible(recipe, environ)
    with pytest.raises(BuildError) as then:
        first_use.module_of(recipe, environ=environ, report=lambda line: None)
    assert str(before.value) == str(then.value)
    assert build_cache.refusal(cache) in str(then.value)


def test_a_folder_that_could_be_made_is_not_left_behind(recipe, tmp_path):
    first_use.require_possible(recipe, {"ASYNC_EMB_CACHE": str(tmp_path / "one" / "cache")})
    assert not (tmp_path / "one").exists()
    keep(tmp_path / "one" / "cache", KEY)
    assert build_cache.refusal(tmp_path / "one" / "cache") == ""
    assert (tmp_path / "one" / "cache" / KEY / MODULE).is_file()


def test_the_variable_names_the_only_folder(tmp_path):
    environ = {"ASYNC_EMB_CACHE": str(tmp_path), "HOME": "/home-of-nobody"}
    assert build_cache.folders(environ) == [tmp_path]


def test_without_it_the_users_cache_comes_before_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    temporary = build_cache.folders({})[1]
    assert temporary.name == f"async-emb-{os.getuid()}"
    assert build_cache.folders({}) == [tmp_path / ".cache" / "async-emb", temporary]
    assert build_cache.folders({"XDG_CACHE_HOME": "/caches"}) == [Path("/caches/async-emb"), temporary]


def test_a_home_that_cannot_be_written_is_passed_over_and_that_is_said(recipe, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("not a folder\n")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build_cache.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    lines: list[str] = []
    path = first_use.module_of(recipe, environ={}, report=lines.append)
    assert path.parent.parent == tmp_path / "temporary" / f"async-emb-{os.getuid()}"
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    usual = tmp_path / "home" / ".cache" / "async-emb"
    assert lines[0].startswith(f"using the cache {path.parent.parent}, because {usual} cannot be written: ")


def test_a_folder_of_the_user_that_cannot_be_written_is_an_error(recipe, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError) as caught:
        first_use.module_of(recipe, environ={"ASYNC_EMB_CACHE": str(tmp_path / "file" / "cache")})
    assert f"{tmp_path}/file/cache cannot be written: " in str(caught.value)


def test_a_finished_build_is_used_from_a_folder_that_cannot_be_written(recipe, cache, monkeypatch):
    environ = {"ASYNC_EMB_CACHE": str(cache)}
    path = first_use.module_of(recipe, environ=environ, report=lambda line: None)

    def refuse(cache: Path) -> None:
        raise build_cache.UnusableCacheError("read-only")

    monkeypatch.setattr(build_cache, "prepare", refuse)
    assert first_use.module_of(recipe, environ=environ) == path


# ---- what is in it


def test_the_builds_of_a_cache_are_listed_with_what_they_were_made_from(cache):
    assert build_cache.builds(cache / "missing") == []
    finished = keep(cache, KEY).parent
    damaged = keep(cache, ANOTHER).parent
    (damaged / MODULE).write_bytes(b"")
    left = build_cache.partial_folder(cache, KEY)
    under_way = build_cache.partial_folder(cache, THIRD)
    holder = build_lock.try_lock(build_cache.lock_path(cache, THIRD))
    listed = {build.path: build for build in build_cache.builds(cache)}
    os.close(holder)
    assert {path: build.state for path, build in listed.items()} == {
        finished: "finished",
        damaged: "damaged",
        left: "left behind",
        under_way: "under way",
    }
    assert listed[finished].contents["identity"] == {"torch": "1"}
    assert listed[finished].size > len(b"a module")
    assert listed[damaged].problem.startswith(f"{MODULE} has the SHA-256")
