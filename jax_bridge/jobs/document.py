"""A job file as text: its data, and where each key and value stands."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

from .toml_positions import Entry, Path, line_and_column, positions

if TYPE_CHECKING:
    from .job_file import Finding

# tomllib ends its messages with the position, which it gives in no other way before Python 3.14.
_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class NotTomlError(ValueError):
    """The file cannot be read as TOML.

    Attributes:
        name: of the file.
        line, column: where it stops being TOML, both from 1.
        there: that line, as written.
        message: why it is none.
    """

    def __init__(self, name: str, text: str, line: int, column: int, message: str) -> None:
        super().__init__(f"{name}:{line}:{column}: {message}")
        self.name, self.line, self.column, self.message = name, line, column, message
        self.there = text.split("\n")[line - 1].strip()


class Document:
    """A job file: its text, its data, and where everything stands.

    Raises:
        NotTomlError: the text is not TOML.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # the former also of a number with thousands of digits
            raise _not_toml(text, name, str(error)) from error
        self.entries: dict[Path, Entry] = positions(text)

    @staticmethod
    def of_bytes(content: bytes, name: str) -> Document:
        """Reads the content of a file.

        Raises:
            NotTomlError: it is not UTF-8, or not TOML.
        """
        try:
            return Document(content.decode("utf-8-sig"), name)
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode()
            line, column = line_and_column(before, len(before))
            byte = error.object[error.start]
            message = f"this is not UTF-8, as TOML must be: the byte 0x{byte:02x} cannot stand here"
            raise NotTomlError(name, before, line, column, message) from error

    def has(self, path: Path) -> bool:
        return path in self.entries

    def place(self, finding: Finding) -> tuple[int, int]:
        """Line and column of what the finding is about, or of the nearest table around it; (1, 1) for the file."""
        path = finding.path
        while path and path not in self.entries:
            path = path[:-1]
        if not path:
            return 1, 1
        entry = self.entries[path]
        at_value = entry.value is not None and not (finding.of_key and path == finding.path)
        return line_and_column(self.text, entry.value.start if at_value and entry.value else entry.key.start)

    def line_of(self, finding: Finding) -> str:
        """The line of `place`, as written; nothing where the key is missing."""
        if finding.path not in self.entries:
            return ""
        return self.text.split("\n")[self.place(finding)[0] - 1].strip()


def _not_toml(text: str, name: str, message: str) -> NotTomlError:
    match = _POSITION.search(message)
    what = _POSITION.sub("", message)
    if match and match[1]:
        line, column = int(match[1]), int(match[2])
    else:
        line, column = line_and_column(text, len(text))
    return NotTomlError(name, text, line, column, f"this is not TOML: {what}")
