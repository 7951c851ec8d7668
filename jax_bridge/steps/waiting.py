"""Waiting for arrays in a way that lets signals through."""

from __future__ import annotations

import threading
from typing import Any

import jax


def wait_until_ready(tree: Any) -> None:
    """As ``jax.block_until_ready``, which holds Ctrl-C up until it returns; with another process missing that would be
    until the timeout. Raises KeyboardInterrupt, or what a handler of the program's raises, at once."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            jax.block_until_ready(tree)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join()
    if errors:
        raise errors[0]
