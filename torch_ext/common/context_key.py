"""What names a context: everything that its ranks must agree about, as text, and the number made from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import Problem, show


def key_of(agreed: Mapping[str, Any]) -> str:
    """Canonical JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(agreed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def id_of(key: str) -> int:
    """A 63-bit hash, the same in every process and run. One bit is dropped: the id travels as a signed 64-bit
    integer."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def differences(
    name: str, configurations: Mapping[int, Mapping[str, Any]], describe: Callable[[Sequence[int]], str], *, whose: str
) -> list[Problem]:
    """One problem for each field in which configurations of the context ``name`` differ.

    Args:
        name: the table's.
        configurations: by process or rank.
        describe: names some of those.
        whose: what they are, "processes" or "ranks".
    """
    problems = []
    for field in dict.fromkeys(field for configuration in configurations.values() for field in configuration):
        by_value: dict[str, list[int]] = {}
        for number, values in sorted(configurations.items()):
            by_value.setdefault(show(values.get(field)), []).append(number)
        if len(by_value) > 1:
            shown = ", ".join(f"{value} in {describe(who)}" for value, who in by_value.items())
            problems.append(
                Problem(
                    f"async_emb context {name!r}: {field} differs between {whose}: {shown}",
                    ("Start every process with the same arguments, environment and versions",),
                )
            )
    return problems
