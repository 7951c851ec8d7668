"""The logical form of a table in a safetensors file (``handover`` says what is in it).

Any reader of safetensors reads such a file: ``weight`` is the parameter of an ordinary ``torch.nn.Embedding``, and the
whole is the ``state_dict`` of ``torch_ext.AsyncEmbedding``. And a file that one of those has written is read here.

A file is complete or absent. For whole runs, staged gradients and several processes there is ``Checkpoints``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .embedding import AsyncEmbedding, TableState
from .errors import CheckpointError
from .handover import Logical, require_fit, table_state

FORMAT = "async_emb table"
VERSION = 1
# The names that safetensors has for dtypes of a logical table.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64"}
_NAMES |= {"BOOL": "bool", "U8": "uint8", "U32": "uint32"}


def safetensors() -> Any:
    """The module ``safetensors``; imported late, because not everybody has it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f"async_emb: safetensors cannot be imported ({error}): pip install safetensors, or pip install "
            "'async-emb[export]'"
        ) from error
    return safetensors


def save_table(path: str | os.PathLike[str], arrays: Logical) -> None:
    """Writes the logical form of a table (``handover.logical_table``, ``handover.from_snapshot``).

    Raises:
        CheckpointError: the file cannot be written; one that was there before is as it was.
    """
    package, path = safetensors(), Path(path)
    contiguous = {key: np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x) for key, x in arrays.items()}
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        package.numpy.save_file(contiguous, beside, metadata={"format": FORMAT, "version": str(VERSION)})
        os.replace(beside, path)
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(f"async_emb save_table: {path} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Reads the logical form of a table, staged gradients included.

    Raises:
        CheckpointError: the file is not there, truncated, no safetensors file, or of a later version.
    """
    with _opened(Path(path)) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)


def load_table(path: str | os.PathLike[str], table: AsyncEmbedding) -> TableState:
    """A table's state from a file, on any mesh: in the place of ``AsyncEmbedding.init``. Its step, if it was kept, is
    ``int(load_arrays(path)["step"])``.

    Raises:
        CheckpointError: as ``load_arrays``.
        ContextError: what the file holds is not this table; nothing of it has been read.
    """
    with _opened(Path(path)) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
        found = {key: (tuple(x.get_shape()), _NAMES.get(x.get_dtype(), x.get_dtype())) for key, x in slices.items()}
        require_fit(table, found, f"the file {path}")
        return table_state(table, {key: file.get_tensor(key) for key in found})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    package = safetensors()
    try:
        with package.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") == FORMAT and int(metadata.get("version", 0)) > VERSION:
                raise CheckpointError(
                    f"async_emb load_table: {path} is of version {metadata['version']} of this format, and this "
                    f"package reads up to {VERSION}: use the package that has written it, or a later one"
                )
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"async_emb load_table: there is no file {path}") from error
    except (OSError, package.SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"async_emb load_table: {path} is truncated, or no safetensors file: {error}") from error
