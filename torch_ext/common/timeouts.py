"""How long anything waits for another rank."""

from __future__ import annotations

import math
import os

from .errors import ContextError

DEFAULT_TIMEOUT_SECONDS = 1800.0


def timeout_seconds() -> float:
    """How long one wait may last: ``ASYNC_EMB_TIMEOUT_SECONDS``, 1800 where it is not set. Read when a context
    opens."""
    text = os.environ.get("ASYNC_EMB_TIMEOUT_SECONDS")
    if text is None:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ContextError(f"ASYNC_EMB_TIMEOUT_SECONDS={text!r} is not a positive number of seconds")
    return value
