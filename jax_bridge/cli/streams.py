"""The standard streams of a command: what happens where nobody reads, the disk is full, or there is no stream."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn, cast

USAGE = 2


class OutputError(Exception):
    """The standard output cannot be written."""


class _Output(io.TextIOWrapper):
    """The standard output, whose errors are told apart from those of files."""

    def write(self, text: str) -> int:
        with _as_output_error():
            return super().write(text)

    def flush(self) -> None:
        with _as_output_error():
            super().flush()


@contextlib.contextmanager
def writing_to_the_end() -> Iterator[None]:
    """Runs a command, which ends with SystemExit, and sees to it that all of its output has arrived."""
    if sys.stderr is None:  # 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    # Python ignores it, and has an error in its place that interrupts a line of output somewhere.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.stdout is None:  # >&-
        _end("it is closed")
    plain = cast(io.TextIOWrapper, sys.stdout)
    encoding, as_lines = plain.encoding, plain.line_buffering
    # What the terminal has no sign for, and bytes of the environment that are no text, are escaped.
    sys.stdout = _Output(plain.detach(), encoding, "backslashreplace", line_buffering=as_lines)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _end(str(error))
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # nobody can be told, but the status stays: Python replaces it where its own flush fails
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def write_bytes(content: bytes) -> None:
    """Writes to the standard output as it is, without another word before or behind."""
    sys.stdout.flush()
    with _as_output_error():
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def read_bytes() -> bytes:
    """The whole standard input. Raises OSError if it is closed."""
    if sys.stdin is None:  # <&-
        raise OSError(0, "it is closed")
    return sys.stdin.buffer.read()


@contextlib.contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error.strerror) from error


def _end(why: str) -> NoReturn:
    with contextlib.suppress(OSError):
        print(f"async-emb: error: the standard output cannot be written: {why}", file=sys.stderr, flush=True)
    sys.exit(USAGE)
