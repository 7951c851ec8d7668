"""async-emb for PyTorch: sharded embedding tables as a module, and their kernels as torch operators.

Most programs need ``AsyncEmbedding`` and ``RowwiseAdagrad``. ``Table`` has the start and done calls beneath the module,
and the operators are building blocks for one device.

Where torch has been imported, importing this package loads the installed native module and registers
``torch.ops.async_emb``; else the first name that needs torch does so, because ``torch_ext.common`` does not. Where none
is installed that fits this torch, the first use of an operator builds it, not the import. Nothing here ever imports
jax.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_ext import _load
from torch_ext._load import NativeModuleError, require_ffi_api

if TYPE_CHECKING:
    from torch_ext.common.batches import pad_width, with_next
    from torch_ext.common.errors import (
        AsyncEmbError,
        ContextError,
        ContextTypeError,
        ContextWarning,
        FailedContextError,
        IdError,
        PipelineError,
    )
    from torch_ext.common.row_optimizers import RowwiseAdagrad
    from torch_ext.embedding import AsyncEmbedding
    from torch_ext.ops import (
        gather_rows,
        gradient_norm,
        rowwise_adagrad_,
        rowwise_adagrad_lazy_,
        segment_sum,
        unique_ids,
    )
    from torch_ext.ranks import ProcessRanks, Ranks, ThreadRanks
    from torch_ext.table import Table, UpdateReport

__all__ = [
    "AsyncEmbError",
    "AsyncEmbedding",
    "ContextError",
    "ContextTypeError",
    "ContextWarning",
    "FailedContextError",
    "IdError",
    "NativeModuleError",
    "PipelineError",
    "ProcessRanks",
    "Ranks",
    "RowwiseAdagrad",
    "Table",
    "ThreadRanks",
    "UpdateReport",
    "build_info",
    "gather_rows",
    "gradient_norm",
    "native",
    "pad_width",
    "require_cuda",
    "require_ffi_api",
    "rowwise_adagrad_",
    "rowwise_adagrad_lazy_",
    "segment_sum",
    "unique_ids",
    "with_next",
]

_NEEDS_NOTHING = {
    "common.batches": ("pad_width", "with_next"),
    "common.errors": (
        "AsyncEmbError",
        "ContextError",
        "ContextTypeError",
        "ContextWarning",
        "FailedContextError",
        "IdError",
        "PipelineError",
    ),
    "common.row_optimizers": ("RowwiseAdagrad",),
}
_NEEDS_THE_NATIVE_MODULE = {
    "embedding": ("AsyncEmbedding",),
    "ops": (
        "gather_rows",
        "gradient_norm",
        "rowwise_adagrad_",
        "rowwise_adagrad_lazy_",
        "segment_sum",
        "unique_ids",
    ),
    "ranks": ("ProcessRanks", "Ranks", "ThreadRanks"),
    "table": ("Table", "UpdateReport"),
}
_MODULE_OF = {name: module for module, names in (_NEEDS_NOTHING | _NEEDS_THE_NATIVE_MODULE).items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module in _NEEDS_THE_NATIVE_MODULE:
        _load_once()
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value  # the next time it is found at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def _load_once() -> None:
    _load.load_if_installed()


def native() -> ModuleType:
    """The native module, ``torch_ext._C``, built now if none is installed. Its contents are private to this project."""
    return _load.load()


def build_info() -> dict[str, str]:
    """What the native module was built with: ``torch``, ``jaxlib``, ``ffi_api`` ("major.minor") and ``compiler``.

    ``cuda`` is the version of the CUDA toolkit, missing or empty in a build without CUDA, and ``cuda_reason`` then says
    why, if it is not torch that has no CUDA.
    """
    return dict(native().build_info())


def require_cuda() -> None:
    """Raises NativeModuleError, "not built with CUDA, because ...", unless the native module has CUDA kernels.

    Whether there is a GPU is another question.
    """
    _load.require_cuda(build_info())


if "torch" in sys.modules:
    _load_once()
