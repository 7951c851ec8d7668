"""A native module that cannot be used says precisely why."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ext
from torch_ext import NativeModuleError, build_info, require_ffi_api
from torch_ext._load import load, read_stamp

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def stamp(torch_version: str) -> bytes:
    return b"\x7fELF..." + f"async_emb built with torch={torch_version} jaxlib=0.10.2".encode() + b"\0..."


def refusal(directory: Path) -> NativeModuleError:
    with pytest.raises(NativeModuleError) as caught:
        load(directory, package="a_package_that_is_not_loaded")
    return caught.value


def test_the_stamp_says_what_the_loaded_module_says():
    info = build_info()
    assert read_stamp(Path(torch_ext.native().__file__)) == (info["torch"], info["jaxlib"])
    assert info["torch"] == torch.__version__


def test_a_module_that_was_not_built_is_an_import_error_with_the_command(tmp_path):
    error = refusal(tmp_path)
    assert isinstance(error, ImportError)
    assert str(error) == f"the native module has not been built: there is no _C{SUFFIX} in {tmp_path}"
    assert any("python -m pip install --no-build-isolation -e ." in note for note in error.__notes__)


def test_a_module_for_another_python_is_named(tmp_path):
    (tmp_path / "_C.cpython-307-somewhere.so").touch()
    assert f"for another Python: _C.cpython-307-somewhere.so, not _C{SUFFIX}" in str(refusal(tmp_path))


def test_a_module_for_another_torch_is_not_even_opened(tmp_path):
    (tmp_path / f"_C{SUFFIX}").write_bytes(stamp("1.2.3"))
    assert f"built for torch 1.2.3, but torch {torch.__version__} is installed" in str(refusal(tmp_path))


def test_a_file_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / f"_C{SUFFIX}").write_bytes(b"something else")
    assert "does not say what it was built with" in str(refusal(tmp_path))


def test_a_truncated_file_is_refused_with_the_reason_of_the_system(tmp_path):
    (tmp_path / f"_C{SUFFIX}").write_bytes(b"")
    assert "does not say what it was built with" in str(refusal(tmp_path))
    package = tmp_path / "broken"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / f"_C{SUFFIX}").write_bytes(stamp(torch.__version__))
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(NativeModuleError, match=r"cannot be loaded: .*(ELF|file)"):
            load(package, package="broken")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("broken", None)


@pytest.mark.parametrize("runtime", [(0, 3), (0, 4), (0, 12)])
def test_handlers_run_on_the_same_or_a_later_ffi_api(runtime):
    require_ffi_api("0.3", runtime)


@pytest.mark.parametrize("runtime", [(0, 2), (1, 3), (1, 0)])
def test_handlers_refuse_an_older_or_another_major_ffi_api(runtime):
    with pytest.raises(NativeModuleError, match=rf"API 0\.3, but jaxlib .* has {runtime[0]}\.{runtime[1]}"):
        require_ffi_api("0.3", runtime)


def test_importing_the_package_imports_no_jax():
    code = "import sys, torch_ext; sys.exit(any(name.split('.')[0] in ('jax', 'jaxlib') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
