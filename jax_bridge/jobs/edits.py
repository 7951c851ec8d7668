"""Changes to a job file that leave everything else in it as it was: comments, order, spelling."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from .document import Document
from .toml_positions import Entry, Path, Span


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of a key.

    Attributes:
        path: the key.
        value: what it shall be; None takes the key out.
        rename: the name it shall have instead; then `value` does not matter.
        after: where the key is missing, the one (in the same table) that it follows; None for the start of the file.
    """

    path: Path
    value: Any = None
    rename: str | None = None
    after: str | None = None


def apply(document: Document, edits: Sequence[Edit]) -> str:
    """The text with all edits made; no two may be about the same key."""
    text = document.text
    for start, end, replacement in sorted((r for edit in edits for r in _replacements(document, edit)), reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def as_toml(value: Any) -> str:
    """A string, number, truth value, or a sequence of them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(as_toml, value))}]" if len(value) != 1 else as_toml(value[0])
    return repr(value)


def _replacements(document: Document, edit: Edit) -> list[tuple[int, int, str]]:
    """(start, end, what shall stand there)."""
    entry = document.entries.get(edit.path)
    if edit.rename is not None:
        assert entry is not None
        return [(key.start, key.end, edit.rename) for key in (entry.key, *entry.again)]
    if entry is None:
        return [_insertion(document, edit)]
    assert entry.value is not None
    if edit.value is not None:
        return [(entry.value.start, entry.value.end, as_toml(edit.value))]
    return [_removal(document, entry, entry.value)]


def _removal(document: Document, entry: Entry, value: Span) -> tuple[int, int, str]:
    text = document.text
    if entry.inline:  # with one of the commas around it
        if comma := re.match(r"\s*,\s*", text[value.end :]):
            return entry.statement, value.end + comma.end(), ""
        before = re.search(r"\s*,?\s*$", text[: entry.statement])
        assert before is not None
        return before.start(), value.end, ""
    start = text.rfind("\n", 0, entry.statement) + 1
    end = text.find("\n", value.end)
    return start, len(text) if end < 0 else end + 1, ""


def _insertion(document: Document, edit: Edit) -> tuple[int, int, str]:
    text = document.text
    newline = "\r\n" if "\r\n" in text else "\n"
    assignment = f"{edit.path[-1]} = {as_toml(edit.value)}"
    if edit.after is None:
        first = min((entry.statement for entry in document.entries.values()), default=0)
        start = text.rfind("\n", 0, first) + 1
        return start, start, f"{assignment}{newline}"
    neighbour = document.entries[(*edit.path[:-1], edit.after)]
    assert neighbour.value is not None
    if neighbour.inline:
        return neighbour.value.end, neighbour.value.end, f", {assignment}"
    line = text.rfind("\n", 0, neighbour.statement) + 1
    prefix = text[line : neighbour.key.start]  # the indentation, and what stands before the last part of a dotted key
    end = text.find(newline, neighbour.value.end)
    end = len(text) if end < 0 else end
    return end, end, f"{newline}{prefix}{assignment}"
