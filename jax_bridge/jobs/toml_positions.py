"""Where in a TOML file each key and value stands, which `tomllib` does not tell.

The text must be valid: `tomllib` has read it before.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib

Path = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{0,2}(?!"))?', re.DOTALL),
    re.compile(r"'''.*?'''(?:'{0,2}(?!'))?", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


@dataclasses.dataclass(frozen=True)
class Span:
    """Offsets into the text, the second one past the end."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key, or one element of an array.

    Attributes:
        key: the last part of the key as written; of an element, the element.
        value: what is after the equals sign; None for a table that a header or a dotted key opens.
        statement: where its first part begins, other than `key` only in a dotted key.
        inline: inside of braces or brackets.
        again: where the same key stands once more, in further headers and dotted keys.
    """

    key: Span
    value: Span | None
    statement: int
    inline: bool = False
    again: tuple[Span, ...] = ()


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Both count from 1; columns are characters."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def positions(text: str) -> dict[Path, Entry]:
    """Every key and every element of the file, by its path; what is opened twice stands where it was opened first."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._found: dict[Path, Entry] = {}
        self._elements: dict[Path, int] = {}  # of arrays of tables

    def scan(self) -> dict[Path, Entry]:
        table: Path = ()
        while self._blank() < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._statement(table, inline=False)
        return self._found

    def _blank(self) -> int:
        self._at = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing as well
        return self._at

    def _header(self) -> Path:
        start = self._at
        array = self._text.startswith("[[", start)
        self._at += 2 if array else 1
        parts = self._key()
        self._blank()
        self._at += 2 if array else 1
        path = self._open((), parts, start)
        if array:
            self._elements[path] = self._elements.get(path, -1) + 1
            path = (*path, self._elements[path])
            self._found[path] = Entry(Span(start, self._at), None, start)
        return path

    def _statement(self, table: Path, *, inline: bool) -> None:
        start = self._at
        path = self._open(table, self._key(), start, inline=inline)
        key = self._found[path].key
        self._blank()
        self._at += 1  # the equals sign
        self._blank()
        self._found[path] = Entry(key, self._value(path), start, inline)

    def _open(self, path: Path, parts: list[tuple[str, Span]], statement: int, *, inline: bool = False) -> Path:
        """Notes each part of a key. Inside of an array of tables it belongs to the last one of them."""
        for name, span in parts:
            if path in self._elements:
                path = (*path, self._elements[path])
            path = (*path, name)
            if (known := self._found.get(path)) is None:
                self._found[path] = Entry(span, None, statement, inline)
            else:
                self._found[path] = dataclasses.replace(known, again=(*known.again, span))
        return path

    def _key(self) -> list[tuple[str, Span]]:
        """The parts of a dotted key, and where each stands."""
        parts: list[tuple[str, Span]] = []
        while True:
            self._blank()
            start = self._at
            if self._text[start] in "\"'":
                self._string()
                name = tomllib.loads(f"key = {self._text[start : self._at]}")["key"]
            else:
                self._at = _BARE_KEY.match(self._text, start).end()  # type: ignore[union-attr]  # the text is valid
                name = self._text[start : self._at]
            parts.append((name, Span(start, self._at)))
            end = self._at
            if self._text[self._blank()] != ".":
                self._at = end
                return parts
            self._at += 1

    def _value(self, path: Path) -> Span:
        start = self._at
        first = self._text[start]
        if first in "\"'":
            self._string()
        elif first == "[":
            self._sequence(path, "]")
        elif first == "{":
            self._sequence(path, "}")
        else:
            scalar = _SCALAR.match(self._text, start).group()  # type: ignore[union-attr]  # it matches nothing as well
            self._at = start + len(scalar.rstrip())
        return Span(start, self._at)

    def _sequence(self, path: Path, end: str) -> None:
        """The elements of an array, or the keys of an inline table."""
        self._at += 1
        count = 0
        while self._text[self._blank()] != end:
            if self._text[self._at] == ",":
                self._at += 1
            elif end == "}":
                self._statement(path, inline=True)
            else:
                start = self._at
                element = (*path, count)
                span = self._value(element)
                self._found[element] = Entry(span, span, start, inline=True)
                count += 1
        self._at += 1

    def _string(self) -> None:
        for string in _STRINGS:
            if match := string.match(self._text, self._at):
                self._at = match.end()
                return
