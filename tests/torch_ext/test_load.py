"""Which native module is used; one that does not fit is not used in silence; importing builds nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torch_ext
from torch_ext import NativeModuleError, _load, build, build_cache, build_info, first_use, require_ffi_api
from torch_ext._load import find_installed, open_module, read_stamp
from torch_ext.build_errors import BuildError

from .fake_toolkit import CPU_TORCH, CUDA_TORCH, make_toolkit

PACKAGE = Path(torch_ext.__file__).parent


def stamp(torch_version: str, ffi_api: str = "0.3", sources: str = "digest") -> bytes:
    said = f"async_emb built with torch={torch_version} jaxlib=0.10.2 ffi_api={ffi_api} sources={sources}"
    return b"\x7fELF..." + said.encode() + b"\0..."


def put(directory: Path, content: bytes) -> Path:
    path = directory / build.module_file_name()
    path.write_bytes(content)
    return path


def problem(directory: Path) -> str:
    """Why what is in a folder is not used."""
    found = find_installed(directory)
    assert found.path is None
    return found.problem


# ---- an installed module that fits, and those that do not


def test_the_stamp_says_what_the_loaded_module_says():
    info = build_info()
    found = read_stamp(Path(torch_ext.native().__file__))
    assert (found.torch, found.jaxlib, found.ffi_api) == (info["torch"], info["jaxlib"], info["ffi_api"])
    assert found.torch == torch.__version__


def test_a_module_that_fits_is_used(tmp_path):
    path = put(tmp_path, stamp(torch.__version__))
    assert find_installed(tmp_path) == (path, "")


def test_a_module_that_was_not_built_is_missed_by_name(tmp_path):
    name = build.module_file_name()
    assert problem(tmp_path) == f"the native module is not installed: there is no {name} in {tmp_path}"


def test_a_module_for_another_python_is_named(tmp_path):
    (tmp_path / "_C.cpython-307-somewhere.so").touch()
    assert f"for another Python: _C.cpython-307-somewhere.so, not {build.module_file_name()}" in problem(tmp_path)


def test_a_module_for_another_torch_is_not_used(tmp_path):
    put(tmp_path, stamp("1.2.3"))
    assert f"built for torch 1.2.3, but torch {torch.__version__} is installed" in problem(tmp_path)


@pytest.mark.parametrize("ffi_api", ["0.999", "1.0"])
def test_a_module_for_a_later_or_another_major_ffi_is_not_used(tmp_path, ffi_api):
    put(tmp_path, stamp(torch.__version__, ffi_api))
    running = build_info()["ffi_api"]
    assert f"built against XLA FFI API {ffi_api}, but jaxlib " in problem(tmp_path)
    assert problem(tmp_path).endswith(f" has {running}")


def test_a_module_for_an_earlier_ffi_is_used(tmp_path):
    path = put(tmp_path, stamp(torch.__version__, "0.0"))
    assert find_installed(tmp_path).path == path


@pytest.mark.parametrize("content", [b"", b"something else", stamp("1")[:-5]])
def test_a_file_that_is_not_ours_or_cut_short_is_not_used(tmp_path, content):
    put(tmp_path, content)
    assert "does not say what it was built with" in problem(tmp_path)


def test_a_file_that_the_system_refuses_is_refused_with_its_reason(tmp_path):
    path = put(tmp_path, stamp(torch.__version__))
    with pytest.raises(NativeModuleError, match=r"cannot be loaded: .*(ELF|file)"):
        open_module(path, "broken._C")
    assert "broken._C" not in sys.modules


def test_a_module_of_other_sources_is_loaded_with_a_warning(tmp_path):
    path = put(tmp_path, stamp(torch.__version__, sources="of_last_week"))
    with pytest.warns(RuntimeWarning, match=r"was built from other sources than .*csrc has now.*pip install"):
        _load._warn_of_other_sources(path)
    put(tmp_path, stamp(torch.__version__, sources=build.sources_digest()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _load._warn_of_other_sources(path)


# ---- the build at first use


@pytest.fixture
def unbuilt(tmp_path) -> Path:
    """A copy of the package, with its sources and without a native module."""
    shutil.copytree(PACKAGE, tmp_path / "torch_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(build.csrc_root(), tmp_path / "csrc")
    return tmp_path


def run(unbuilt: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(unbuilt), "PYTHONSAFEPATH": "1", "ASYNC_EMB_CACHE": str(unbuilt / "cache")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | own | environ, capture_output=True, text=True, check=False)


def fill_the_cache(unbuilt: Path) -> Path:
    """Puts the module that is loaded here where a build at first use would put it."""
    recipe = build.recipe(for_this_machine=True)
    cache = unbuilt / "cache"
    build_cache.prepare(cache)
    partial = build_cache.partial_folder(cache, recipe.digest())
    shutil.copy(torch_ext.native().__file__, partial / recipe.module)
    return build_cache.publish(partial, partial / recipe.module, cache, recipe.digest(), recipe.contents())


def test_importing_builds_nothing_and_a_missing_compiler_is_named_at_first_use(unbuilt):
    code = """
import torch, torch_ext
print("imported")
try:
    torch_ext.gather_rows(torch.zeros(4, 2), torch.tensor([1]))
except torch_ext.NativeModuleError as error:
    print(str(error).splitlines()[0])
    print(*error.__notes__, sep="\\n")
try:
    torch.ops.async_emb.gather_rows
except torch_ext.NativeModuleError as error:
    print(str(error).splitlines()[0])
"""
    result = run(unbuilt, code, CXX="/missing/c++")
    assert result.returncode == 0, result.stderr
    imported, first, because, command, again = result.stdout.splitlines()
    assert imported == "imported"
    assert first.startswith("the C++ compiler of CXX='/missing/c++' was not found")
    assert because.startswith("The native module is built at its first use, because the native module is not installed")
    assert command == f"This builds it and installs it: {build.INSTALL_COMMAND}"
    assert again == first
    assert not (unbuilt / "cache").exists()


def test_what_is_in_the_cache_serves_every_operator(unbuilt):
    path = fill_the_cache(unbuilt)
    code = """
import json, sys, torch, torch_ext
state = torch_ext._load.state()
before = "torch_ext._C" in sys.modules
compiled = torch.compile(torch_ext.gather_rows, backend="eager", fullgraph=True)
table = torch.arange(8.0).reshape(4, 2).requires_grad_()
rows = compiled(table, torch.tensor([1, 3]))
rows.sum().backward()
file = torch_ext.native().__file__
json.dump([state.origin, str(state.path), before, rows.tolist(), table.grad.to_dense().tolist(), file], sys.stdout)
"""
    result = run(unbuilt, code)
    assert result.returncode == 0, result.stderr
    origin, found, before, rows, gradient, file = json.loads(result.stdout)
    assert (origin, found, before, file) == ("cached", str(path), False, str(path))
    assert rows == [[2.0, 3.0], [6.0, 7.0]]
    assert gradient == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert "building" not in result.stderr.lower()


def test_an_installed_module_that_fits_wins_over_the_cache(unbuilt):
    fill_the_cache(unbuilt)
    shutil.copy(torch_ext.native().__file__, unbuilt / "torch_ext")
    code = "import torch_ext; print(torch_ext.native().__file__, torch_ext._load.state().origin)"
    assert run(unbuilt, code).stdout.split() == [str(unbuilt / "torch_ext" / build.module_file_name()), "installed"]


def test_an_installed_module_for_another_torch_is_passed_over_and_named(unbuilt):
    installed = put(unbuilt / "torch_ext", stamp("1.2.3"))
    result = run(unbuilt, "import torch_ext; torch_ext.native()", CXX="/missing/c++")
    assert "NativeModuleError: the C++ compiler of CXX='/missing/c++' was not found" in result.stderr
    reason = f"because {installed} was built for torch 1.2.3, but torch {torch.__version__} is installed"
    assert f"The native module is built at its first use, {reason}" in result.stderr


def test_a_build_is_announced_with_its_reason(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(first_use, "say", lines.append)
    monkeypatch.setattr(first_use, "cached", lambda recipe: None)

    def fail(recipe) -> Path:
        raise BuildError("no")

    monkeypatch.setattr(first_use, "module_of", fail)
    with pytest.raises(NativeModuleError, match=r"^no\n"):
        _load._built("x.so was built for torch 1.2.3")
    assert lines == ["x.so was built for torch 1.2.3. Building one"]


def test_forcing_cuda_fails_at_first_use_as_it_does_in_an_installation(monkeypatch):
    monkeypatch.setenv("ASYNC_EMB_CUDA", "1")
    tools = dataclasses.replace(build.toolchain(), torch_version=CPU_TORCH, torch_cuda=None)
    monkeypatch.setattr(build, "toolchain", lambda: tools)
    with pytest.raises(NativeModuleError) as caught:
        _load._built("missing")
    first = f"ASYNC_EMB_CUDA=1 asks for CUDA, but torch {CPU_TORCH} is a build without CUDA"
    assert str(caught.value).startswith(first)


def test_a_nonsense_architecture_is_named_at_first_use(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda-13.0", "13.0")))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;banana")
    tools = dataclasses.replace(build.toolchain(), torch_version=CUDA_TORCH, torch_cuda="13.0")
    monkeypatch.setattr(build, "toolchain", lambda: tools)
    with pytest.raises(NativeModuleError, match=r"^TORCH_CUDA_ARCH_LIST='9.0;banana': 'banana' is no architecture"):
        _load._built("missing")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    recipe = build.recipe(for_this_machine=True)
    assert recipe.identity["CUDA"].startswith("13.0 (")
    assert any(path.suffix == ".cu" for path in recipe.sources)


def test_a_torch_that_was_replaced_under_a_running_process_is_told_from_it(monkeypatch, tmp_path):
    path = put(tmp_path, stamp("9.9.9"))
    monkeypatch.setattr(first_use, "cached", lambda recipe: path)
    with pytest.raises(NativeModuleError, match=r"built for torch 9\.9\.9, whose files are installed, but this"):
        _load._built("missing")


def test_without_sources_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "csrc_root", lambda: tmp_path / "csrc")
    with pytest.raises(NativeModuleError, match=r"^missing\n") as caught:
        _load._built("missing")
    assert any(build.INSTALL_COMMAND in note for note in caught.value.__notes__)


def test_what_keeps_a_build_from_starting_is_known_without_starting_it(monkeypatch, tmp_path):
    monkeypatch.setattr(_load, "find_installed", lambda: _load.Installed(None, "not installed"))
    monkeypatch.setenv("ASYNC_EMB_CACHE", str(tmp_path))
    assert _load.state() == ("to be built", None, "not installed")
    monkeypatch.setenv("CXX", "/missing/c++")
    assert _load.state().origin == "impossible"
    assert _load.state().reason.startswith("not installed; the C++ compiler of CXX='/missing/c++'")
    monkeypatch.setenv("CXX", "/bin/true")
    assert "the C++ compiler /bin/true says that all went well, but has made no file" in _load.state().reason
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("MAX_JOBS", "all")
    assert _load.state().reason.startswith("not installed; MAX_JOBS='all' is not a positive whole number")
    monkeypatch.delenv("MAX_JOBS")
    tmp_path.chmod(0o777)
    assert f"{tmp_path} can be written by others (mode 0777)" in _load.state().reason
    assert list(tmp_path.iterdir()) == []


# ---- XLA's FFI


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
