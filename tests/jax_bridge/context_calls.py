"""A valid call of `make_context_handle` to vary, and what every refusal of one must keep."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_bridge.context import AsyncEmbContextHandle, make_context_handle
from jax_bridge.errors import ContextError

BOTH = ("data", "table")
VALID: dict[str, Any] = {
    "table_axis": BOTH,
    "data_axis": BOTH,
    "tokens_per_batch": 32,
    "emb_width": 64,
    "num_unique": 8,
    "num_devices_per_node": 8,
}


def make_mesh(*sizes: int, names: tuple[Any, ...] = BOTH, axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices("cpu")[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, axis_types=(axis_type,) * len(sizes))


def make(mesh: Any = None, **changes: Any) -> AsyncEmbContextHandle:
    return make_context_handle(make_mesh(4, 2) if mesh is None else mesh, **{**VALID, **changes})


def refusal(mesh: Any = None, **changes: Any) -> ContextError:
    """The error of a call that must be refused. Every correction that it offers is tried, too."""
    mesh = make_mesh(4, 2) if mesh is None else mesh
    with pytest.raises(ContextError) as caught:
        make_context_handle(mesh, **{**VALID, **changes})
    error = caught.value
    assert error.problems[0] == str(error)
    assert printed_corrections(error) == list(error.corrections)
    for correction in error.corrections:
        make_context_handle(mesh, **{**VALID, **changes, **correction})
    return error


def notes(error: ContextError) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def printed_corrections(error: ContextError) -> list[dict[str, Any]]:
    """The corrections as a reader would copy them from the notes."""
    calls = re.findall(r"^(?:Checked to pass|Or): make_context_handle\(\.\.\., (.*)\)$", notes(error), re.MULTILINE)
    parsed = [ast.parse(f"call({arguments})", mode="eval").body for arguments in calls]
    return [{k.arg: ast.literal_eval(k.value) for k in call.keywords} for call in parsed]  # type: ignore[attr-defined]
