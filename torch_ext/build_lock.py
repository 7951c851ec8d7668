"""A lock between processes that dies with its holder: ``flock`` on a file, which the system releases for the dead.

A file that is left behind locks nothing. The holder removes it before it lets go, so that none is left normally.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_ext.build_errors import BuildError

POLL_SECONDS = 0.1
REPORT_SECONDS = 10.0
LIMIT_SECONDS = 1800.0


@contextmanager
def locked(
    path: Path,
    report: Callable[[str], None],
    *,
    interval: float = REPORT_SECONDS,
    limit: float = LIMIT_SECONDS,
) -> Iterator[bool]:
    """Holds the lock of ``path`` for the block; waits for a living holder, and says so every ``interval`` seconds.

    Gives whether it had to wait. Raises BuildError after ``limit`` seconds, or if the file system has no locks.
    """
    started = time.monotonic()
    next_report = started
    while (descriptor := try_lock(path)) is None:
        now = time.monotonic()
        if now - started > limit:
            raise BuildError(
                f"waited {limit:.0f} s for {_holder(path)}.\n"
                "End that process if it hangs: its lock goes with it. Then run this again"
            )
        if now >= next_report:
            report(f"waiting for {_holder(path)}")
            next_report = now + interval
        time.sleep(POLL_SECONDS)
    try:
        yield next_report > started
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Takes the lock if nobody has it: an open file, or None. The lock lasts until that file is closed."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise BuildError(f"the lock {path} cannot be opened: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before may have removed the file since it was opened: that one locks nobody else out.
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise BuildError(
                f"{path} cannot be locked: {error}.\n"
                "Set ASYNC_EMB_CACHE to a folder of a file system that has locks, on a local disk for example"
            ) from error
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a living process has the lock. Leaves no file behind that was not there."""
    if not path.exists():
        return False
    descriptor = try_lock(path)
    if descriptor is None:
        return True
    path.unlink(missing_ok=True)
    os.close(descriptor)
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        who = path.read_text().strip() or "a process"
        age = f"{max(0.0, time.time() - path.stat().st_mtime):.0f} s"
    except OSError:  # let go of in this moment
        who, age = "a process", "some time"
    return f"{who}, which has been building for {age} (lock: {path})"
