"""What stands at a reported place is the value of that key: tomllib reads the piece and the whole alike."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest

from jax_bridge.jobs.toml_positions import line_and_column, positions

from .test_check import BROKEN, GOOD

TRICKY = {
    "basic strings": 'a = "x # [y] = \\" {"\n',
    "strings": "b = 'c:\\'\nc = \"\"\"\none \"quoted\" \\\n  # no comment\"\"\"\nd = '''it''s'''\n",
    "quotes at the end": 'a = """x""""\nb = """y"""""\nc = \'\'\'z\'\'\'\'\nd = 1\n',
    "empty strings": "a = \"\"\nb = ''\nc = \"\"\"\"\"\"\nd = ''''''\n",
    "arrays": "a = [\n  1, # one\n  [2, 3,],\n  {x = 4, y = [5]},\n]\nb = []\nc = {}\n",
    "arrays of tables": "[[a]]\nx = 1\n[[a.b]]\ny = 2\n[[a.b]]\ny = 3\n[[a]]\nx = 4\n[a.c]\nz = 5\n",
    "keys": '"a b" = 1\n\'c.d\'.e . "f" = 2\n[ g . "h i" ]\nj.k = 3\n"\\u00e9" = 4\n1234 = 5\n',
    "dates": "a = 1979-05-27 07:32:00 # then\nb = 07:32:00\nc = 1979-05-27T00:32:00.5-07:00\n",
    "numbers": "a = 0xff\nb = +1_000\nc = -inf\nd = 1e-3\ne = true\nf = {a = 1 , b = 2 }\n",
    "line ends": "a = 1\r\n[b]\r\nc = 'd'\r\n",
    "no last line end": "a = [1]\n[b] # c",
}


def value_at(data: Any, path: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def paths_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [p for key, value in inside for p in [(*path, key), *paths_of(value, (*path, key))]]


def readable(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


CORPUS = {path.stem: path.read_text() for path in [*BROKEN, *GOOD] if readable(path.read_text())}


@pytest.mark.parametrize("text", (TRICKY | CORPUS).values(), ids=(TRICKY | CORPUS).keys())
def test_every_value_is_found_where_it_stands(text):
    data = tomllib.loads(text)
    found = positions(text)
    of_array_of_tables = {path for path in paths_of(data) if isinstance(value_at(data, path), list)}
    assert set(found) - of_array_of_tables == set(paths_of(data)) - of_array_of_tables
    for path, entry in found.items():
        if entry.value is not None:
            piece = text[entry.value.start : entry.value.end]
            assert same(tomllib.loads(f"x = {piece}")["x"], value_at(data, path)), path


def test_lines_and_columns_count_from_one():
    text = "a = 1\n  b = 2\n"
    assert line_and_column(text, 0) == (1, 1)
    assert line_and_column(text, text.index("b")) == (2, 3)
