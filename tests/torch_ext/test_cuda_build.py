"""Whether CUDA is in a build, with which toolkit and flags, and what the errors say.

Nothing here needs a GPU, an nvcc or a torch with CUDA: a toolkit is a folder whose nvcc is a script that tells a
version. `make cuda-check` compiles.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import torch_ext
from torch_ext import NativeModuleError, _load, build, cuda_toolkit

from .fake_toolkit import CPU_TORCH, CUDA_TORCH, make_toolkit


@pytest.fixture
def toolkit(tmp_path) -> Path:
    return make_toolkit(tmp_path / "cuda-13.0", "13.0")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No toolkit but those of the test."""
    monkeypatch.setattr(cuda_toolkit, "SYSTEM_HOMES", ())
    monkeypatch.setattr(cuda_toolkit, "nvidia_packages", lambda torch_cuda: ())
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)


def refusal(environ: dict[str, str], torch: str = CUDA_TORCH, torch_cuda: str | None = "13.0") -> str:
    with pytest.raises(cuda_toolkit.CudaError) as caught:
        cuda_toolkit.decide(torch, torch_cuda, {"ASYNC_EMB_CUDA": "1"} | environ)
    return str(caught.value)


def found(environ: dict[str, str]) -> Path:
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", environ)
    assert decision.toolkit is not None, decision.reason
    return decision.toolkit.home


# ---- architectures (cases B3 a, b, c)


def test_without_a_list_the_documented_default_is_built(toolkit):
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit)})
    assert cuda_toolkit.DEFAULT_ARCHITECTURES == "8.0;9.0;10.0+PTX"
    assert cuda_toolkit.gencode_flags(decision.toolkit) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


@pytest.mark.parametrize(
    ("wish", "flags"),
    [
        ("9.0", ["arch=compute_90,code=sm_90"]),
        ("9.0a", ["arch=compute_90a,code=sm_90a"]),
        (
            "8.0 9.0+PTX",
            ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"],
        ),
        ("Hopper;9.0", ["arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]),
    ],
)
def test_the_list_of_the_user_is_built(toolkit, monkeypatch, wish, flags):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit)})
    assert cuda_toolkit.gencode_flags(decision.toolkit) == [f"-gencode={flag}" for flag in flags]


@pytest.mark.parametrize("nonsense", ["banana", "9", "90", "sm_90", "7.0", "9.0+PTX+PTX", "native"])
def test_what_is_no_architecture_is_named(toolkit, nonsense):
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit)})
    with pytest.raises(cuda_toolkit.CudaError) as caught:
        cuda_toolkit.gencode_flags(decision.toolkit, f"8.0;{nonsense}")
    assert f"{nonsense!r} is no architecture that nvcc 13.0 knows. It knows 7.5, 8.0, 9.0, 10.0" in str(caught.value)


# ---- versions (cases B3 d, e, f)


def test_a_toolkit_of_another_major_version_is_refused_with_both_versions(tmp_path):
    home = make_toolkit(tmp_path / "cuda-12.4", "12.4")
    message = refusal({"CUDA_HOME": str(home)})
    assert f"nvcc is of CUDA 12.4, torch {CUDA_TORCH} of CUDA 13.0: the major versions must be equal" in message
    assert str(home / "bin" / "nvcc") in message
    assert "Set CUDA_HOME to a toolkit of CUDA 13.0, or install a torch for CUDA 12" in message


def test_a_toolkit_of_another_minor_version_is_taken_with_a_notice(tmp_path):
    home = make_toolkit(tmp_path / "cuda-13.2", "13.2")
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(home), "ASYNC_EMB_CUDA": "1"})
    assert decision.toolkit.version == "13.2"
    assert decision.notice.startswith(f"nvcc is of CUDA 13.2 ({home}), torch {CUDA_TORCH} of CUDA 13.0")


def test_a_toolkit_of_the_same_version_is_taken_without_a_word(toolkit):
    assert cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit)}).notice == ""


def test_torch_without_cuda_is_the_reason_even_where_a_toolkit_is(toolkit):
    message = refusal({"CUDA_HOME": str(toolkit)}, CPU_TORCH, None)
    assert message.startswith(f"ASYNC_EMB_CUDA=1 asks for CUDA, but torch {CPU_TORCH} is a build without CUDA")
    assert "unset ASYNC_EMB_CUDA to build for CPUs alone" in message
    decision = cuda_toolkit.decide(CPU_TORCH, None, {"CUDA_HOME": str(toolkit)})
    assert (decision.toolkit, decision.notice) == (None, "")


def test_what_is_missing_is_an_error_only_if_cuda_is_asked_for():
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"PATH": "/nowhere/bin"})
    assert (decision.toolkit, decision.reason) == (None, "no nvcc was found")
    assert decision.notice.startswith("building without CUDA, because no nvcc was found on PATH (/nowhere/bin)")
    message = refusal({"PATH": "/nowhere/bin"})
    assert "no nvcc was found on PATH (/nowhere/bin)" in message
    assert 'python -m pip install "nvidia-cuda-nvcc==13.0.*"' in message


def test_cuda_can_be_left_out(toolkit):
    decision = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit), "ASYNC_EMB_CUDA": "0"})
    assert (decision.toolkit, decision.notice) == (None, "")
    assert decision.reason == "ASYNC_EMB_CUDA=0 asked for a build without it"


def test_another_value_is_refused():
    assert "ASYNC_EMB_CUDA='yes' is neither 0 nor 1" in refusal({"ASYNC_EMB_CUDA": "yes"})


# ---- where the toolkit is


def test_the_toolkit_behind_a_link_is_found(toolkit, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    assert found({"PATH": str(tmp_path / "links")}) == toolkit


def test_the_toolkit_behind_a_script_is_found(toolkit, tmp_path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    script.chmod(0o755)
    assert found({"PATH": str(tmp_path / "scripts")}) == toolkit


def test_the_toolkit_behind_a_script_that_calls_a_link_is_found(toolkit, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {tmp_path}/links/nvcc "$@"\n')
    script.chmod(0o755)
    assert found({"PATH": str(tmp_path / "scripts")}) == toolkit


def test_an_nvcc_without_headers_is_refused(toolkit):
    (toolkit / "include" / "cuda_runtime.h").unlink()
    message = refusal({"PATH": str(toolkit / "bin")})
    assert f"nvcc is outside of its toolkit: {toolkit}/bin/nvcc has no include/cuda_runtime.h" in message


def test_an_nvcc_without_the_runtime_library_is_refused(toolkit):
    (toolkit / "lib64" / "libcudart.so.13").unlink()
    assert f"there is no libcudart.so.13 in {toolkit}/lib64" in refusal({"PATH": str(toolkit / "bin")})


def test_an_nvcc_that_does_not_run_is_refused(toolkit):
    (toolkit / "bin" / "nvcc").write_text("#!/nowhere/sh\n")
    assert f"nvcc cannot be run: {toolkit}/bin/nvcc" in refusal({"PATH": str(toolkit / "bin")})


def test_a_folder_that_does_not_fit_is_passed_over(toolkit, tmp_path):
    older = make_toolkit(tmp_path / "cuda-12.4", "12.4")
    assert found({"PATH": f"{older}/bin{os.pathsep}{toolkit}/bin"}) == toolkit


def test_cuda_home_decides_alone(toolkit, tmp_path):
    older = make_toolkit(tmp_path / "cuda-12.4", "12.4")
    assert "nvcc is of CUDA 12.4" in refusal({"CUDA_HOME": str(older), "PATH": f"{toolkit}/bin"})
    (tmp_path / "empty").mkdir()
    message = refusal({"CUDA_HOME": str(tmp_path / "empty"), "PATH": f"{toolkit}/bin"})
    assert f"CUDA_HOME has no bin/nvcc: it is {tmp_path}/empty" in message


def test_a_toolkit_in_a_usual_folder_is_found(toolkit, monkeypatch):
    monkeypatch.setattr(cuda_toolkit, "SYSTEM_HOMES", (str(toolkit).replace("13.0", "{version}"),))
    assert found({"PATH": "/nowhere/bin"}) == toolkit


def test_headers_and_runtime_come_from_the_packages_that_torch_brings(toolkit, tmp_path, monkeypatch):
    packages = [tmp_path / "nvidia" / name for name in ("cu13", "nccl")]
    for package in packages:
        (package / "include").mkdir(parents=True)
    (packages[0] / "lib").mkdir()
    (packages[0] / "lib" / "libcudart.so.13").touch()
    monkeypatch.setattr(cuda_toolkit, "nvidia_packages", lambda torch_cuda: tuple(packages))
    chosen = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit)}).toolkit
    assert [os.path.relpath(folder, tmp_path) for folder in chosen.include_dirs] == [
        "cuda-13.0/include",
        "cuda-13.0/include/cccl",
        "nvidia/cu13/include",
        "nvidia/nccl/include",
    ]
    assert chosen.library_dirs[0] == str(packages[0] / "lib")
    assert "-l:libcudart.so.13" in build.link_flags(build.toolchain(), chosen)


def test_packages_of_another_cuda_are_left_out(tmp_path, monkeypatch):
    monkeypatch.undo()
    for name in ("cu12", "cu13", "nccl"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    own = [path.name for path in cuda_toolkit.nvidia_packages("13.0") if path.is_relative_to(tmp_path)]
    assert own == ["cu13", "nccl"]


# ---- sources and flags


def test_device_code_keeps_the_promise_of_equal_bits():
    flags = build.NVCC_FLAGS
    assert {"-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"} <= set(flags)
    assert not any("fast" in flag for flag in flags)
    assert any("-ffp-contract=off" in flag for flag in flags if flag.startswith("-Xcompiler="))


def test_warnings_are_errors_only_on_request(toolkit, monkeypatch):
    chosen = cuda_toolkit.decide(CUDA_TORCH, "13.0", {"CUDA_HOME": str(toolkit)}).toolkit
    monkeypatch.delenv("ASYNC_EMB_WERROR", raising=False)
    assert not any("Werror" in flag for flag in build.nvcc_flags(chosen, []))
    monkeypatch.setenv("ASYNC_EMB_WERROR", "1")
    assert {"-Werror=all-warnings", "-Xcompiler=-Werror"} <= set(build.nvcc_flags(chosen, []))
    assert "-Werror" in build.compile_flags(build.toolchain(), chosen)


def test_sources_with_cuda_are_those_without_and_more():
    without, everything = build.sources(), build.sources(with_cuda=True)
    more = [path.relative_to(build.csrc_root()) for path in everything if path not in without]
    assert [path for path in everything if path in without] == without
    assert all(path.parts[0] == "cuda" or path.match("cuda_*.cpp") for path in more)
    assert not any(path.suffix == ".cu" for path in without)


def test_no_two_sources_share_an_object_file():
    objects = [path.with_suffix(".o") for path in build.sources(with_cuda=True)]
    assert len(objects) == len(set(objects))


# ---- asking for CUDA where it is not


def test_a_module_without_cuda_says_why():
    with pytest.raises(NativeModuleError) as caught:
        _load.require_cuda({"torch": CUDA_TORCH, "cuda": "", "cuda_reason": "no nvcc was found"})
    assert str(caught.value) == "torch_ext was not built with CUDA, because no nvcc was found"
    assert any(
        "ASYNC_EMB_CUDA=1 python -m pip install --no-build-isolation -e ." in note for note in caught.value.__notes__
    )


def test_a_module_for_a_torch_without_cuda_says_why():
    with pytest.raises(
        NativeModuleError, match=r"not built with CUDA, because torch 2\.14\.1\+cpu, which it was built for"
    ):
        _load.require_cuda({"torch": CPU_TORCH})


def test_a_module_with_cuda_is_fine():
    _load.require_cuda({"torch": CUDA_TORCH, "cuda": "13.0"})


def test_the_installed_module_has_cuda_or_says_why():
    if torch_ext.build_info().get("cuda"):
        torch_ext.require_cuda()
    else:
        with pytest.raises(NativeModuleError, match="not built with CUDA, because"):
            torch_ext.require_cuda()
