"""The search for arguments that would pass, so that an error can say what to write instead."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from torch_ext.common.table_rules import DTYPES, ID_POLICIES, MAX_TOKENS, MAX_WIDTH, as_number, is_integer, read_dtype

from .axes import axis_choices, mesh_problems
from .checks import Arguments, Checked, check, nearest_multiples, nearest_of
from .nodes import node_sizes

# What people write beside the names themselves. Of the wider ones the widest that there is comes nearest.
_OTHER_NAMES = {
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("float", "single", "fp32", "f32", "double", "float64", "fp64", "f64"), "float32"),
}


def find_corrections(arguments: Arguments, checked: Checked) -> list[dict[str, Any]]:
    """Keyword arguments to change so that the call passes; each entry is complete and has been checked.

    Where a number lies between two valid ones, an entry with the lower comes before one with the upper.
    """
    if mesh_problems(arguments.mesh) or checked.table is None or checked.data is None:
        return []
    shape = arguments.mesh.shape
    found: list[dict[str, Any]] = []
    for table, data in axis_choices(shape, checked.table.guess, checked.data.guess):
        axes: dict[str, Any] = {}
        if not checked.table.usable or table != checked.table.names:
            axes["table_axis"] = table
        if not checked.data.usable or data != checked.data.names:
            axes["data_axis"] = data
        group_size = math.prod(shape[name] for name in table)
        for upper in (False, True):
            changes = axes | _better_values(arguments, group_size, upper)
            if changes not in found and not check(dataclasses.replace(arguments, **changes)).problems:
                found.append(changes)
    return found


def _better_values(arguments: Arguments, group_size: int, upper: bool) -> dict[str, Any]:
    """What to change besides the axes, for a communicator of `group_size` ranks."""
    changes: dict[str, Any] = {}
    tokens = as_number(arguments.tokens_per_batch)
    width = as_number(arguments.emb_width)
    num_unique = as_number(arguments.num_unique)
    per_node = as_number(arguments.num_devices_per_node)
    logical_width = as_number(arguments.logical_width)

    if tokens is not None:
        changes["tokens_per_batch"] = tokens = nearest_multiples(tokens, group_size, MAX_TOKENS)[upper]
    if num_unique is not None:
        # Near zero or the limit lies nothing useful; room for every token to have an id of its own always is enough.
        wanted = tokens if tokens is not None and not 1 <= num_unique <= MAX_TOKENS else num_unique
        changes["num_unique"] = nearest_multiples(wanted, 1, MAX_TOKENS)[upper]
    if per_node is not None:
        changes["num_devices_per_node"] = nearest_of(per_node, node_sizes(arguments.mesh))[upper]
    if width is not None:
        padded = nearest_multiples(max(width, logical_width or 1), group_size, MAX_WIDTH)[True]
        changes["emb_width"] = padded
        if logical_width is None or not 1 <= logical_width <= padded or logical_width != int(logical_width):
            logical_width = width if 1 <= width <= padded and width == int(width) else None
        changes["logical_width"] = None if logical_width in (None, padded) else int(logical_width)
    if read_dtype(arguments.dtype) is None:
        changes["dtype"] = _nearest_dtype(arguments.dtype)
    policy = arguments.id_policy if isinstance(arguments.id_policy, str) else ""
    if policy not in ID_POLICIES:
        text = policy.casefold()
        changes["id_policy"] = (difflib.get_close_matches(text, ID_POLICIES, n=1) or ID_POLICIES)[0]
    padding_id = arguments.padding_id
    if padding_id is not None and not (is_integer(padding_id) and -(2**63) <= padding_id < 2**63):
        number = as_number(padding_id)
        in_range = number is not None and number == int(number) and -(2**63) <= number < 2**63
        changes["padding_id"] = int(number) if number is not None and in_range else None
    for argument, default in (("name", "table"), ("purpose", "train")):
        text = getattr(arguments, argument)
        if not isinstance(text, str) or not text or not text.isprintable():
            changes[argument] = default
    return {argument: value for argument, value in changes.items() if not _same(getattr(arguments, argument), value)}


def _nearest_dtype(given: Any) -> str:
    text = given.casefold() if isinstance(given, str) else ""
    return _OTHER_NAMES.get(text) or (difflib.get_close_matches(text, DTYPES, n=1) or list(DTYPES))[0]


def _same(given: object, better: object) -> bool:
    if is_integer(given) or given is None:
        return bool(given == better)
    return False
