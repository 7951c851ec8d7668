"""The kernels of async-emb for PyTorch: building blocks of sharded embedding tables as torch operators.

Importing this package loads the installed native module and registers ``torch.ops.async_emb``. Where none is installed
that fits this torch, the first use of an operator builds it, not the import. It never imports jax.
"""

from __future__ import annotations

from types import ModuleType

from torch_ext import _load
from torch_ext._load import NativeModuleError, require_ffi_api

_load.load_if_installed()

from torch_ext.ops import (  # noqa: E402  (what stands for the operators exists only now)
    gather_rows,
    gradient_norm,
    rowwise_adagrad_,
    rowwise_adagrad_lazy_,
    segment_sum,
    unique_ids,
)

__all__ = [
    "NativeModuleError",
    "build_info",
    "gather_rows",
    "gradient_norm",
    "native",
    "require_cuda",
    "require_ffi_api",
    "rowwise_adagrad_",
    "rowwise_adagrad_lazy_",
    "segment_sum",
    "unique_ids",
]


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
