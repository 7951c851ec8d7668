"""Finds the native module, builds it at first use where none is installed, loads it, and says why when it cannot.

A module built for another torch may crash the process instead of failing to load, so what it was built with is read
from the file before it is opened.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import mmap
import re
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch_ext import build, first_use
from torch_ext.build import CUDA_INSTALL_COMMAND, INSTALL_COMMAND, MODULE_NAME, REQUIREMENTS_COMMAND, installed_version
from torch_ext.build_errors import BuildError

# csrc/faces/build_stamp.cpp puts this text into the binary.
_STAMP = re.compile(
    rb"async_emb built with torch=([^ \0]+) jaxlib=([^ \0]+)(?: ffi_api=([^ \0]+) sources=([^ \0]+))?\0"
)
_loading = threading.RLock()


class NativeModuleError(ImportError):
    """The native module cannot be used. The message says why, the notes say which command to run."""


class Stamp(NamedTuple):
    """What a module says it was built with, without being loaded. Empty where it does not say."""

    torch: str
    jaxlib: str
    ffi_api: str
    sources: str


class Installed(NamedTuple):
    """The installed module, if it fits the running torch, jaxlib and Python; or else why there is none."""

    path: Path | None
    problem: str


class State(NamedTuple):
    """Which module the first use would take: ``origin`` is "installed", "cached", "to be built" or "impossible"."""

    origin: str
    path: Path | None
    reason: str  # why it is not the installed one, and why it cannot be built


def load() -> ModuleType:
    """The native module; registers ``torch.ops.async_emb`` with it.

    The installed one if it fits. Otherwise one that is built now, for this torch, jaxlib, Python and CPU, or taken from
    the cache of such builds. The first call may take minutes then, and says what it does.

    Raises NativeModuleError if torch is missing, or if the module cannot be built, or the system refuses to load it.
    """
    with _loading:
        if MODULE_NAME in sys.modules:
            return sys.modules[MODULE_NAME]
        installed = find_installed()
        if installed.path is not None:
            _warn_of_other_sources(installed.path)
        path = installed.path or _built(installed.problem)
        module = open_module(path, MODULE_NAME)
        importlib.import_module("torch_ext.ops").register_rules()
        return module


def load_if_installed() -> None:
    """Loads an installed module that fits. Without one, the first operator that anybody asks torch for loads it."""
    installed = find_installed()
    if installed.path is not None:
        load()
        return

    import torch

    operators: Any = torch.ops.async_emb
    plain = type(operators)

    class AtFirstUse(plain):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # what Python and its tools ask of anything
                return super().__getattr__(name)
            with _loading:
                operators.__class__ = plain
                try:
                    load()
                except BaseException:
                    operators.__class__ = AtFirstUse
                    raise
            return getattr(operators, name)

    operators.__class__ = AtFirstUse


def find_installed(directory: Path | None = None) -> Installed:
    """The module beside this file, or in ``directory``. Raises NativeModuleError if torch cannot be imported."""
    try:
        import torch  # Before the module: it brings the libraries that the module is linked to.
    except ImportError as error:
        raise _failure(f"torch_ext needs torch, which cannot be imported: {error}", requirements=True) from error

    directory = Path(__file__).resolve().parent if directory is None else directory
    path = directory / build.module_file_name()
    if not path.is_file():
        others = sorted(path.name for path in directory.glob("_C.*") if path.suffix in (".so", ".pyd"))
        if others:
            others_named = f"{', '.join(others)}, not {path.name}"
            return Installed(None, f"the native module in {directory} is for another Python: {others_named}")
        return Installed(None, f"the native module is not installed: there is no {path.name} in {directory}")
    stamp = read_stamp(path)
    if stamp is None:
        return Installed(None, f"{path} does not say what it was built with: it is incomplete, or not ours")
    if stamp.torch != torch.__version__:
        return Installed(None, f"{path} was built for torch {stamp.torch}, but torch {torch.__version__} is installed")
    running = _ffi_api_of_jaxlib()
    if stamp.ffi_api and running and not _ffi_api_fits(stamp.ffi_api, running):
        jaxlib = f"jaxlib {installed_version('jaxlib')} has {running}"
        return Installed(None, f"{path} was built against XLA FFI API {stamp.ffi_api}, but {jaxlib}")
    return Installed(path, "")


def state() -> State:
    """What ``load`` would do, without building or loading anything."""
    installed = find_installed()
    if installed.path is not None:
        return State("installed", installed.path, "")
    try:
        recipe = build.recipe(for_this_machine=True)
        if (cached := first_use.cached(recipe)) is None:
            first_use.require_possible(recipe)
    except BuildError as error:
        return State("impossible", None, f"{installed.problem}; {error}")
    return State("cached" if cached else "to be built", cached, installed.problem)


def open_module(path: Path, name: str) -> ModuleType:
    """Imports the file under this name. Raises NativeModuleError with the system's reason if that fails."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise _failure(f"{path} fits this torch and this Python, but cannot be loaded: {error}") from error
    sys.modules[name] = module
    return module


def read_stamp(path: Path) -> Stamp | None:
    """What the module at ``path`` was built with, without loading it; None if it does not say."""
    if path.stat().st_size == 0:  # cannot be mapped
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        match = _STAMP.search(content)
        return Stamp(*(part.decode() if part else "" for part in match.groups())) if match else None


def require_ffi_api(built: str, runtime: tuple[int, int]) -> None:
    """Refuses handlers that the running jaxlib is too old for.

    Args:
      built: ``build_info()["ffi_api"]``, "major.minor" of XLA's FFI that the handlers were compiled against.
      runtime: (major, minor) of the jaxlib that would call them.

    Raises NativeModuleError if the major versions differ, or if the handlers are newer: registering such a handler ends
    the process when the backend starts. An older minor version is fine.
    """
    if not _ffi_api_fits(built, f"{runtime[0]}.{runtime[1]}"):
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
    error = NativeModuleError(f"torch_ext was not built with CUDA, because {reason}", name=MODULE_NAME)
    error.add_note(f"This builds it with CUDA, or ends with what stands in the way: {CUDA_INSTALL_COMMAND}")
    raise error


def _built(problem: str) -> Path:
    """The module of a build at first use, which ``problem`` makes necessary."""
    if not build.csrc_root().is_dir():
        raise _failure(problem)
    try:
        recipe = build.recipe(for_this_machine=True)
        if (cached := first_use.cached(recipe)) is None:
            first_use.say(f"{problem}. Building one")
        path = cached or first_use.module_of(recipe)
    except BuildError as error:
        failure = NativeModuleError(str(error), name=MODULE_NAME)
        failure.add_note(f"The native module is built at its first use, because {problem}")
        failure.add_note(f"This builds it and installs it: {INSTALL_COMMAND}")
        raise failure from None  # its first line is what counts

    import torch

    stamp = read_stamp(path)
    if stamp is None or stamp.torch != torch.__version__:
        said = stamp.torch if stamp else "something unknown"
        raise _failure(
            f"{path} was built for torch {said}, whose files are installed, but this process runs torch "
            f"{torch.__version__}. Start it again"
        )
    return path


def _warn_of_other_sources(path: Path) -> None:
    """An installed module of a checkout whose sources have changed since is loaded, but not in silence."""
    stamp = read_stamp(path)
    if stamp and stamp.sources and build.csrc_root().is_dir() and stamp.sources != build.sources_digest():
        warnings.warn(
            f"{path} was built from other sources than {build.csrc_root()} has now. Build it again: {INSTALL_COMMAND}",
            RuntimeWarning,
            stacklevel=2,
        )


def _ffi_api_of_jaxlib() -> str:
    """The FFI's version that the installed jaxlib has, which is not imported for it; empty if there is no jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        header = Path(folder) / build.FFI_HEADER
        if header.is_file():
            return build.ffi_api_of(header)
    return ""


def _ffi_api_fits(built: str, running: str) -> bool:
    built_major, built_minor = map(int, built.split("."))
    major, minor = map(int, running.split("."))
    return built_major == major and built_minor <= minor


def _failure(message: str, *, requirements: bool = False) -> NativeModuleError:
    error = NativeModuleError(message, name=MODULE_NAME)
    if requirements:
        error.add_note(f"Install what it is built against: {REQUIREMENTS_COMMAND}")
    error.add_note(f"Build it, in a checkout of the sources: {INSTALL_COMMAND}")
    return error
