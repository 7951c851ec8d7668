"""What the text of an exported program says: its native calls, and which of them comes from which.

Regions of ``sdy.manual_computation`` (``shard_map``) and calls of functions are followed through: an argument inside is
the operand outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.interpreters import mlir

CUSTOM_CALL = "stablehlo.custom_call"
# What hands values on, and makes none.
_HANDING_ON = {"sdy.manual_computation", "sdy.return", "func.call", "func.func", "func.return", "stablehlo.return"}
_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


class Call(NamedTuple):
    """A native call.

    Attributes:
        target: its name.
        side_effect: whether it runs though nobody reads its results, and is merged with no other.
        aliases: (operand, result) pairs that share a buffer.
        attrs: names of its attributes.
        results: its values in the graph.
    """

    target: str
    side_effect: bool
    aliases: tuple[tuple[int, int], ...]
    attrs: tuple[str, ...]
    results: tuple[int, ...]


class Program:
    """A module as a graph: values are numbers, and every value knows the values that it comes from."""

    def __init__(self, text: str) -> None:
        with mlir.make_ir_context() as context:
            self._module = mlir.ir.Module.parse(text, context)
            self._functions = {
                op.attributes["sym_name"].value: op for op in _operations(self._module.body) if op.name == "func.func"
            }
            self._sources: list[tuple[int, ...]] = []
            self.calls: list[Call] = []
            self.made: list[tuple[str, str]] = []  # (operation, type of a result), of what makes values
            main = self._functions["main"].regions[0].blocks[0]
            self.results = self._walk(main, [self._value(()) for _ in main.arguments])

    def of(self, target: str) -> list[Call]:
        return [call for call in self.calls if call.target == f"async_emb_{target}"]

    def waits_for(self, later: Call, earlier: Call) -> bool:
        """Whether an operand of ``later`` comes from a result of ``earlier``."""
        wanted = set(earlier.results)
        seen: set[int] = set()
        left = [source for result in later.results for source in self._sources[result]]
        while left:
            value = left.pop()
            if value in wanted:
                return True
            if value not in seen:
                seen.add(value)
                left.extend(self._sources[value])
        return False

    def comes_from(self, result: int, call: Call) -> bool:
        """Whether the program's result number ``result`` is one of the call's, or computed from one."""
        as_call = Call("", False, (), (), (self.results[result],))
        return self.results[result] in call.results or self.waits_for(as_call, call)

    def _value(self, sources: tuple[int, ...]) -> int:
        self._sources.append(sources)
        return len(self._sources) - 1

    def _walk(self, block: Any, arguments: list[int]) -> list[int]:
        """The values that the block returns."""
        values: dict[Any, int] = dict(zip(block.arguments, arguments, strict=True))
        for op in _operations(block):
            operands = [values[operand] for operand in op.operands]
            if op.name in ("func.return", "sdy.return", "stablehlo.return"):
                return operands
            for result, value in zip(op.results, self._results(op, operands, values), strict=True):
                values[result] = value
        return []

    def _results(self, op: Any, operands: list[int], values: dict[Any, int]) -> list[int]:
        if op.name == "sdy.manual_computation":
            return self._walk(op.regions[0].blocks[0], operands)
        if op.name == "func.call":
            return self._walk(self._functions[op.attributes["callee"].value].regions[0].blocks[0], operands)
        sources = (*operands, *_captured(op, values))
        results = [self._value(sources) for _ in op.results]
        self.made += [(_name(op), str(result.type)) for result in op.results if op.name not in _HANDING_ON]
        if op.name == CUSTOM_CALL:
            self.calls.append(_call_of(op, tuple(results)))
        return results


def _operations(block: Any) -> Iterator[Any]:
    return (op.operation for op in block.operations)


def _captured(op: Any, values: dict[Any, int]) -> Iterator[int]:
    """Values from outside that a region of ``op`` uses (of a while loop, say)."""
    for region in op.regions:
        for block in region.blocks:
            for inner in _operations(block):
                yield from (values[operand] for operand in inner.operands if operand in values)
                yield from _captured(inner, values)


def _name(op: Any) -> str:
    return op.attributes["call_target_name"].value if op.name == CUSTOM_CALL else op.name


def _call_of(op: Any, results: tuple[int, ...]) -> Call:
    def text(name: str) -> str:
        return str(op.attributes[name]) if name in op.attributes else ""

    aliases = [(int(operand), int(result or 0)) for result, operand in _ALIAS.findall(text("output_operand_aliases"))]
    names = re.findall(r"(\w+) = ", text("mhlo.backend_config"))
    return Call(_name(op), text("has_side_effect") == "true", tuple(sorted(aliases)), tuple(sorted(names)), results)
