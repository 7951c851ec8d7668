"""What a compiled program's text says: which instruction waits for which, and what shapes each makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"(?P<shape>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<operands>[^()]*)\)")


class Instruction(NamedTuple):
    """One instruction: what it makes, of what, and its whole line."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    text: str

    def calls(self, target: str) -> bool:
        return f'custom_call_target="{target}"' in self.text


class Computation:
    """The instructions of one computation, by name. Only operands count as edges: order comes from data alone."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = {instruction.name: instruction for instruction in instructions}

    def find(self, wanted: Callable[[Instruction], bool]) -> list[str]:
        return [name for name, instruction in self.instructions.items() if wanted(instruction)]

    def waits_for(self, later: str, earlier: str) -> bool:
        """Whether `later` uses something that comes from `earlier`."""
        seen: set[str] = set()
        left = [later]
        while left:
            name = left.pop()
            if name == earlier:
                return True
            if name not in seen and name in self.instructions:
                seen.add(name)
                left.extend(self.instructions[name].operands)
        return False


def computations(text: str) -> list[Computation]:
    """The computations of a compiled program's text."""
    found: list[Computation] = []
    lines: list[Instruction] = []
    for line in text.splitlines():
        if line.startswith("}"):
            found.append(Computation(lines))
            lines = []
        elif (instruction := _parse(line)) is not None:
            lines.append(instruction)
    return found


def all_instructions(text: str) -> Iterator[Instruction]:
    for computation in computations(text):
        yield from computation.instructions.values()


def _parse(line: str) -> Instruction | None:
    if (match := _INSTRUCTION.match(line)) is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", match["rest"])
    if (parts := _OPCODE.match(rest)) is None:
        return None
    operands = tuple(re.findall(r"%([\w.-]+)", parts["operands"]))
    return Instruction(match["name"], parts["opcode"], parts["shape"], operands, rest)
