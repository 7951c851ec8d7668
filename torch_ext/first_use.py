"""The build at first use: gives the module of a recipe, built by whoever comes first, taken from the cache by others.

Every process that comes while one builds waits for it. If that one is killed, the next in line builds; if its compiler
found an error, all who waited report that error.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch_ext import build_cache, build_lock, ninja_build
from torch_ext.build_errors import BuildError
from torch_ext.recipe import Recipe


def say(line: str) -> None:
    """Tells whoever waits at the terminal what is going on."""
    print(f"async-emb: {line}", file=sys.stderr, flush=True)


def module_of(
    recipe: Recipe,
    *,
    environ: Mapping[str, str] | None = None,
    report: Callable[[str], None] = say,
    interval: float = ninja_build.REPORT_SECONDS,
) -> Path:
    """The path of the module that a recipe makes, built if the cache does not have it.

    Args:
      environ: where ``ASYNC_EMB_CACHE``, ``XDG_CACHE_HOME`` and ``HOME`` are looked up; that of the process if None.
      report: is given lines on what is going on.
      interval: seconds between two lines on what is being built.

    Raises BuildError if it cannot be built, or kept anywhere.
    """
    key = recipe.digest()
    problems: list[str] = []
    for cache in build_cache.folders(environ):
        try:
            if found := _finished(cache, key, recipe.module):
                return found
            build_cache.prepare(cache)
            if problems:
                report(f"using the cache {cache}, because {problems[-1]}")
            return _build(recipe, cache, key, report, interval)
        except build_cache.UnusableCacheError as error:
            problems.append(str(error))
    raise _nowhere_to_keep(recipe, problems)


def require_possible(recipe: Recipe, environ: Mapping[str, str] | None = None) -> None:
    """Asks everything that ``module_of`` asks before it compiles; leaves nothing behind.

    Raises the BuildError that a build would end with.
    """
    problems: list[str] = []
    for cache in build_cache.folders(environ):
        if problem := build_cache.refusal(cache):
            problems.append(problem)
            continue
        ninja_build.require_tools(recipe)
        return
    raise _nowhere_to_keep(recipe, problems)


def _nowhere_to_keep(recipe: Recipe, problems: list[str]) -> BuildError:
    return BuildError(
        "\n".join([f"there is no folder to keep {recipe.module} in:", *problems])
        + "\nSet ASYNC_EMB_CACHE to a folder of your own that can be written"
    )


def cached(recipe: Recipe, environ: Mapping[str, str] | None = None) -> Path | None:
    """The module of a recipe if a cache has it and it may be used; builds nothing."""
    key = recipe.digest()
    for cache in build_cache.folders(environ):
        try:
            if found := _finished(cache, key, recipe.module):
                return found
        except build_cache.UnusableCacheError:
            continue  # said by whoever wants to build
    return None


def _finished(cache: Path, key: str, module: str) -> Path | None:
    try:
        return build_cache.find(cache, key, module)
    except build_cache.DamagedBuildError:
        return None  # looked at again, and said, by whoever holds the lock


def _build(recipe: Recipe, cache: Path, key: str, report: Callable[[str], None], interval: float) -> Path:
    ninja_build.require_tools(recipe)  # before anything is said, made or waited for
    came = time.time()
    log = build_cache.failure_log(cache, key)
    with _ending_in_order(), build_lock.locked(build_cache.lock_path(cache, key), report) as waited:
        try:
            if found := build_cache.find(cache, key, recipe.module):
                return found
        except build_cache.DamagedBuildError as error:
            report(f"{error}. Building it again")
        if waited and log.is_file() and log.stat().st_mtime >= came:
            raise ninja_build.failure(recipe, log.read_text(encoding="utf-8", errors="replace"), log)
        build_cache.remove_left_behind(cache, key)
        for notice in recipe.notices:
            report(notice)
        versions = ", ".join(f"{name} {value}" for name, value in recipe.identity.items())
        report(
            f"building {recipe.module} from {len(recipe.sources)} files, once for {versions}; it goes to {cache / key}"
        )
        try:
            return _build_here(recipe, cache, key, report, interval, log)
        except OSError as error:
            raise BuildError(
                f"{recipe.module} cannot be built in {cache}: {error}.\n"
                "Make room there, or set ASYNC_EMB_CACHE to another folder"
            ) from error


def _build_here(
    recipe: Recipe, cache: Path, key: str, report: Callable[[str], None], interval: float, log: Path
) -> Path:
    started = time.monotonic()
    partial = build_cache.partial_folder(cache, key)
    try:
        module = ninja_build.build(recipe, partial, report, keep_objects=False, log=log, interval=interval)
        found = build_cache.publish(partial, module, cache, key, recipe.contents())
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.unlink(missing_ok=True)
    report(f"built {recipe.module} in {time.monotonic() - started:.0f} s")
    return found


class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Lets SIGTERM pass through the block's ``finally`` clauses before it ends the process, as Ctrl-C does.

    Only where the process has no handler of its own. Where this is not the main thread the signal ends the process at
    once; then the system releases the lock and ends ninja, and the next build removes what is left.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
