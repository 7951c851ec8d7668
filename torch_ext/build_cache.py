"""The per-user cache of finished builds.

    CACHE/KEY/                  a finished build: the module, and build.json, which says what it was made from
    CACHE/.building-KEY-XXXX/   a build under way; renamed to CACHE/KEY when it is complete
    CACHE/KEY.lock              held by the process that builds
    CACHE/KEY.failed.log        the output of a build that failed

A module is code that this process is about to run, so nothing is taken from a folder that somebody else could write to.
Everything in the cache may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ext.build_errors import BuildError
from torch_ext.build_lock import is_held

MANIFEST = "build.json"
_PARTIAL = ".building-"
_LOCK = ".lock"
# The names that are ours; whatever else lies in the folder is somebody else's, and is neither counted nor removed.
_FINISHED_NAME = re.compile(r"[0-9a-f]{32}")
_PARTIAL_NAME = re.compile(re.escape(_PARTIAL) + r"[0-9a-f]{32}-.+")


class UnusableCacheError(BuildError):
    """A folder that cannot hold builds for this user: read-only, or somebody else could write to it."""


class DamagedBuildError(BuildError):
    """A build that is this user's own, but not what was put there."""


@dataclass(frozen=True)
class CachedBuild:
    """What is known of one build in a cache."""

    path: Path  # its folder
    state: str  # "finished", "damaged", "under way", "left behind"
    problem: str  # why it is damaged
    size: int  # bytes
    contents: Mapping[str, Any]  # what it was made from (Recipe.contents), empty unless finished


def folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where builds are looked for, and kept: the first that can be written.

    ``ASYNC_EMB_CACHE`` alone if it is set. Otherwise ``async-emb`` in the user's cache folder (``XDG_CACHE_HOME``, or
    ``~/.cache``), and where that cannot be used, ``async-emb-UID`` in the folder for temporary files.
    """
    environ = os.environ if environ is None else environ
    if wish := environ.get("ASYNC_EMB_CACHE", "").strip():
        return [Path(wish).expanduser().absolute()]
    usual = Path(environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")) / "async-emb"
    temporary = Path(tempfile.gettempdir()) / f"async-emb-{os.getuid()}"
    # Without a home "~" stays as it is; a relative folder would be another one in every working directory.
    return [usual, temporary] if usual.is_absolute() else [temporary]


def find(cache: Path, key: str, module: str) -> Path | None:
    """The module of a finished build, checked byte for byte; None if there is none.

    Raises UnusableCacheError if the build is not this user's own or can be written by others, and DamagedBuildError if
    it is not what was put there.
    """
    folder = cache / key
    if not os.path.lexists(folder):
        return None
    require_own(cache)
    for path in (folder, folder / MANIFEST, folder / module):
        if os.path.lexists(path):
            require_own(path)
    if problem := damage(folder, module):
        raise DamagedBuildError(f"the build in {folder} is damaged: {problem}")
    return folder / module


def damage(folder: Path, module: str) -> str:
    """What is wrong with a build, or nothing."""
    path = folder / module
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = str(manifest["sha256"])
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == expected else f"{module} has the SHA-256 {found[:16]}..., not {expected[:16]}..."


def prepare(cache: Path) -> None:
    """Makes a cache folder ready to be built in. Raises UnusableCacheError, saying why it is not."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(cache)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise UnusableCacheError(f"{cache} cannot be written: {error}") from error


def refusal(cache: Path) -> str:
    """Why a folder cannot be built in, or nothing: what ``prepare`` says of it, which leaves no new folder behind."""
    new = [path for path in (cache, *cache.parents) if not os.path.lexists(path)]
    try:
        prepare(cache)
    except UnusableCacheError as error:
        return str(error)
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # not there, or somebody has begun to use it
                path.rmdir()
    return ""


def require_own(path: Path) -> None:
    """Raises UnusableCacheError unless only this user, or the superuser, can have put ``path`` there."""
    advice = "Remove it, or set ASYNC_EMB_CACHE to a folder of your own"
    status = path.stat()
    for owner in (path.lstat().st_uid, status.st_uid):  # of a link, and of what it leads to
        if owner not in _trusted_users():
            raise UnusableCacheError(
                f"{path} belongs to user {owner}, and this process to user {os.getuid()}: it is not used, because "
                f"whoever can write to it decides what runs here.\n{advice}"
            )
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # In a folder like the one for temporary files, others cannot touch what is ours.
    if writable and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        raise UnusableCacheError(
            f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): it is not used, because they "
            f"would decide what runs here.\nIf its content is yours: chmod go-w {shlex.quote(str(path))}. {advice}"
        )


def partial_folder(cache: Path, key: str) -> Path:
    """A new folder to build in."""
    return Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{key}-", dir=cache))


def publish(partial: Path, module: Path, cache: Path, key: str, contents: Mapping[str, Any]) -> Path:
    """Turns a build into a finished one, at once: nobody ever sees a part of it. Returns the path of the module."""
    complete = partial / "complete"
    complete.mkdir(mode=0o700)
    target = complete / module.name
    module.rename(target)
    target.chmod(0o755)
    manifest = {"sha256": hashlib.sha256(target.read_bytes()).hexdigest(), **contents}
    (complete / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (target, complete / MANIFEST, complete):
        _flush_to_disk(path)
    final = cache / key
    if os.path.lexists(final):  # damaged: whoever has the lock has looked
        final.rename(partial / "damaged")
    complete.rename(final)
    _flush_to_disk(cache)
    return final / module.name


def remove_left_behind(cache: Path, key: str) -> None:
    """Removes builds that nobody works on any more: their processes were killed. For the holder of the lock of ``key``,
    before it builds."""
    own = lock_path(cache, key)
    for partial in cache.glob(f"{_PARTIAL}*"):
        if not _PARTIAL_NAME.fullmatch(partial.name):
            continue
        lock = _lock_of_partial(partial)
        if lock == own or not is_held(lock):
            shutil.rmtree(partial, ignore_errors=True)


def lock_path(cache: Path, key: str) -> Path:
    """The lock of whoever builds this key."""
    return cache / f"{key}{_LOCK}"


def failure_log(cache: Path, key: str) -> Path:
    """The output of the last build of this key, if it failed."""
    return cache / f"{key}.failed.log"


def builds(cache: Path) -> list[CachedBuild]:
    """All builds in a cache folder, the newest first; other files that lie there are none. Changes nothing.

    Raises OSError if the folder cannot be read.
    """
    if not cache.is_dir():
        return []
    found = [path for path in cache.iterdir() if _is_of_a_build(path)]
    return [_describe(path) for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def _describe(path: Path) -> CachedBuild:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if path.name.startswith(_PARTIAL):
        held = is_held(_lock_of_partial(path))
        return CachedBuild(path, "under way" if held else "left behind", "", size, {})
    try:
        contents = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        problem = damage(path, contents["module"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return CachedBuild(path, "damaged", f"{MANIFEST}: {error}", size, {})
    return CachedBuild(path, "damaged" if problem else "finished", problem, size, contents)


def _is_of_a_build(path: Path) -> bool:
    named = _FINISHED_NAME.fullmatch(path.name) or _PARTIAL_NAME.fullmatch(path.name)
    return bool(named) and path.is_dir() and not path.is_symlink()


def _lock_of_partial(partial: Path) -> Path:
    key = partial.name.removeprefix(_PARTIAL).rsplit("-", 1)[0]
    return lock_path(partial.parent, key)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _trusted_users() -> set[int]:
    return {os.getuid(), 0}
