"""Loads the native module, and says why when it cannot.

A module built for another torch may crash the process instead of failing to load, so what it was built with is read
from the file before it is opened.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import mmap
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from torch_ext.build import CUDA_INSTALL_COMMAND, INSTALL_COMMAND, REQUIREMENTS_COMMAND, installed_version

# csrc/faces/torch_ops.cpp puts this text into the binary.
_STAMP = re.compile(rb"async_emb built with torch=([^ \0]+) jaxlib=([^ \0]+)\0")


class NativeModuleError(ImportError):
    """The native module cannot be used. The message says why, the notes say which command to run."""


def load(directory: Path | None = None, package: str = "torch_ext") -> ModuleType:
    """Imports ``torch_ext._C``, and with it registers ``torch.ops.async_emb``.

    ``directory`` and ``package`` say where to look; only tests give them.

    Raises NativeModuleError if torch or the module is missing, if the module belongs to another torch or another
    Python, or if the system refuses to load it.
    """
    name = f"{package}._C"
    if name in sys.modules:
        return sys.modules[name]
    directory = Path(__file__).resolve().parent if directory is None else directory

    try:
        import torch  # Before the module: it brings the libraries that the module is linked to.
    except ImportError as error:
        raise _failure(f"torch_ext needs torch, which cannot be imported: {error}", requirements=True) from error

    path = _find(directory)
    built_torch, _ = read_stamp(path)
    if built_torch != torch.__version__:
        raise _failure(f"{path} was built for torch {built_torch}, but torch {torch.__version__} is installed")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise _failure(f"{path}, built for this torch {built_torch}, cannot be loaded: {error}") from error
    importlib.import_module("torch_ext.ops").register_rules()
    return module


def read_stamp(path: Path) -> tuple[str, str]:
    """The versions of torch and of jaxlib that the module at ``path`` was built with, without loading it."""
    if path.stat().st_size > 0:  # an empty file cannot be mapped
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if match := _STAMP.search(content):
                return match[1].decode(), match[2].decode()
    raise _failure(f"{path} does not say what it was built with: it is incomplete, or not ours")


def require_ffi_api(built: str, runtime: tuple[int, int]) -> None:
    """Refuses handlers that the running jaxlib is too old for.

    Args:
      built: ``build_info()["ffi_api"]``, "major.minor" of XLA's FFI that the handlers were compiled against.
      runtime: (major, minor) of the jaxlib that would call them.

    Raises NativeModuleError if the major versions differ, or if the handlers are newer: registering such a handler ends
    the process when the backend starts. An older minor version is fine.
    """
    major, minor = (int(part) for part in built.split("."))
    if major != runtime[0] or minor > runtime[1]:
        raise _failure(
            f"the FFI handlers were built against XLA FFI API {built}, but jaxlib {installed_version('jaxlib')} has "
            f"{runtime[0]}.{runtime[1]}: it must be the same major version, and at least the minor version"
        )


def require_cuda(info: Mapping[str, str]) -> None:
    """Refuses to go on with a module that has no CUDA kernels, and says why it has none.

    Args:
      info: ``build_info()``. ``cuda`` is the version of the toolkit, empty or missing in a build without CUDA;
        ``cuda_reason`` says why, where torch's own version does not.
    """
    if info.get("cuda"):
        return
    reason = info.get("cuda_reason") or f"torch {info['torch']}, which it was built for, is a build without CUDA"
    error = NativeModuleError(f"torch_ext was not built with CUDA, because {reason}", name="torch_ext._C")
    error.add_note(f"This builds it with CUDA, or ends with what stands in the way: {CUDA_INSTALL_COMMAND}")
    raise error


def _find(directory: Path) -> Path:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = directory / f"_C{suffix}"
        if path.is_file():
            return path
    others = sorted(path.name for path in directory.glob("_C.*") if path.suffix in (".so", ".pyd"))
    wanted = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if others:
        raise _failure(f"the native module in {directory} is for another Python: {', '.join(others)}, not {wanted}")
    raise _failure(f"the native module has not been built: there is no {wanted} in {directory}")


def _failure(message: str, *, requirements: bool = False) -> NativeModuleError:
    error = NativeModuleError(message, name="torch_ext._C")
    if requirements:
        error.add_note(f"Install what it is built against: {REQUIREMENTS_COMMAND}")
    error.add_note(f"Build it, in a checkout of the sources: {INSTALL_COMMAND}")
    return error
