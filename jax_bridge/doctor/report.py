"""One line for each thing that must fit: ok, warning or problem, and what to do about it."""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .children import Answer, answers_of, start_reports

Status = Literal["ok", "warning", "problem"]

REPORT_SECONDS, TOOL_SECONDS = 90.0, 30.0
# By the file that is asked; what may end its process, or hang, comes last. All of them run at once.
_REPORTS = {
    "torch_ext/build_report.py": ("ninja", "jobs", "cache", "compiler"),
    "torch_ext/self_report.py": ("torch", "toolkit", "native"),
    "jax_bridge/doctor/self_report.py": ("jax", "devices"),
}
# The supported range of pyproject.toml: at least the first, below the second.
TORCH, JAX = ((2, 11), (2, 15)), ((0, 10), (0, 13))
BUILD = "python -m pip install --no-build-isolation -e ."

# Of the environment, what changes how things are built and run; others are left out.
_RELEVANT = re.compile(
    r"ASYNC_EMB_|CUDA_|CXX$|CC$|GLOO_|JAX_|LD_LIBRARY_PATH$|LD_PRELOAD$|MASTER_|MAX_JOBS$|NCCL_|OMP_NUM_THREADS$|RANK$"
    r"|TF_GPU_|TORCH_|WORLD_SIZE$|XLA_"
)


class Line(NamedTuple):
    """What was looked at, how it is, and what to do (nothing, if it is ok)."""

    name: str
    status: Status
    text: str
    advice: str = ""


def examine(environ: Mapping[str, str] | None = None, seconds: float = REPORT_SECONDS) -> Iterator[Line]:
    """All lines, in their order. Takes as long as importing torch and JAX does, and ends in any case."""
    environ = os.environ if environ is None else environ
    root = Path(__file__).resolve().parents[2]
    children = {file: start_reports(root / file, names, environ) for file, names in _REPORTS.items()}
    yield _python()
    answers: dict[str, Answer] = {}
    for file, child in children.items():
        limit = min(seconds, TOOL_SECONDS) if file == "torch_ext/build_report.py" else seconds
        answers |= answers_of(child, _REPORTS[file], limit)
    torch, jax = answers["torch"], answers["jax"]
    yield _framework("torch", torch, TORCH, 'python -m pip install "torch>=2.11,<2.15"')
    yield _framework("jax", jax, JAX, 'python -m pip install "jax>=0.10,<0.13"')
    yield from _native(answers["native"], torch, jax)
    # Without what a build needs, a module that is there works.
    missing: Status = "warning" if "info" in (_found(answers["native"]) or {}) else "problem"
    yield _cache(answers["cache"], missing)
    yield _compiler(answers["compiler"], missing)
    yield _ninja(answers["ninja"], missing)
    yield _jobs(answers["jobs"], missing)
    yield _toolkit(answers["toolkit"])
    yield _cuda_of_both(torch, jax)
    yield _devices(answers["devices"], torch)
    yield _preallocation(answers["devices"], environ)
    yield from _environment(environ)


def _found(answer: Answer) -> dict[str, Any] | None:
    return None if answer.found is None or "error" in answer.found else answer.found


def _failure(answer: Answer) -> str:
    """Why there is no answer, in one line."""
    if answer.found is not None:
        return str(answer.found["error"]).splitlines()[0]
    last = answer.output.splitlines()[-1:]
    return f"its process {answer.failure}" + (f": {last[0]}" if last else "")


# ---- packages


def _python() -> Line:
    text = f"{platform.python_version()}, {sys.executable}"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        where = f"{platform.system()} {platform.machine()}"
        return Line("python", "warning", f"{text}, {where}", "Only Linux on x86-64 is tested.")
    return Line("python", "ok", text)


def _framework(name: str, answer: Answer, supported: Any, install: str) -> Line:
    found = _found(answer)
    if found is None:
        return Line(name, "problem", f"cannot be imported: {_failure(answer)}", install)
    text = found["version"]
    if name == "jax" and found["jaxlib"] != found["version"]:
        text += f", jaxlib {found['jaxlib']}"
    version = tuple(map(int, re.findall(r"\d+", found["version"])[:2]))
    if not supported[0] <= version < supported[1]:
        low, high = (".".join(map(str, bound)) for bound in supported)
        return Line(name, "warning", f"{text} is outside of the supported range [{low}, {high})", install)
    return Line(name, "ok", text)


def _native(answer: Answer, torch: Answer, jax: Answer) -> Iterator[Line]:
    found = _found(answer)
    if found is None:
        missing = [name for name, other in (("torch", torch), ("jax", jax)) if _found(other) is None]
        first = f"First mend {' and '.join(missing)}; then" if missing else "In a checkout of the sources:"
        yield Line("native module", "problem", _failure(answer), f"{first} {BUILD}")
        return
    if "info" not in found:
        if found["origin"] == "to be built":
            text = f"{found['reason']}. The first use builds one, which takes minutes"
            advice = "Build it now: python -c 'import torch_ext; torch_ext.native()'"
            yield Line("native module", "warning", text, advice)
        else:
            first, _, rest = found["reason"].partition("\n")
            yield Line("native module", "problem", f"cannot be built: {first}", " ".join(rest.split()) or BUILD)
        return
    info = found["info"]
    text = (
        f"{found['origin']}, built for torch {info['torch']} and jaxlib {info['jaxlib']} (compiler {info['compiler']})"
    )
    if not found["works"]:
        yield Line("native module", "problem", f"{text}, and looks wrong rows up", f"Build it anew: {BUILD}")
    elif info.get("cuda"):
        yield Line("native module", "ok", f"{text} and CUDA {info['cuda']}")
    else:
        yield Line("native module", "ok", f"{text}, for CPU")
    running = _found(jax)
    if running is None:
        return
    (major, minor), (built_major, built_minor) = running["ffi_api"], map(int, info["ffi_api"].split("."))
    text = f"XLA FFI API {info['ffi_api']} built, {major}.{minor} running"
    if major != built_major or minor < built_minor:
        advice = f"Build against this jaxlib: {BUILD}. Or install jaxlib {info['jaxlib']} or later."
        yield Line("FFI API", "problem", text, advice)
    else:
        yield Line("FFI API", "ok", text)


# ---- tools


def _cache(answer: Answer, missing: Status) -> Line:
    found = _found(answer)
    if found is None:
        return _refused("cache", answer, missing)
    texts, removable, refusals = [], [], []
    for folder in found["folders"]:
        counts = ", ".join(f"{count} {state}" for state, count in folder["states"].items()) or "no builds"
        texts.append(f"{folder['path']}: {counts}, {folder['bytes'] / 1e6:.0f} MB")
        removable += folder["removable"]
        refusals += [folder["refusal"]] if folder["refusal"] else []
    usable = [folder["path"] for folder in found["folders"] if not folder["refusal"]]
    said = [line for refusal in refusals for line in refusal.splitlines()]
    if not usable:
        advice = " ".join(said[1:]) or "Set ASYNC_EMB_CACHE to a folder of your own that can be written."
        return Line("cache", missing, f"nothing can be built: {said[0]}", advice)
    if found["folders"][0]["refusal"]:
        return Line("cache", "warning", f"builds go to {usable[0]}, because {said[0]}", " ".join(said[1:]))
    if removable:
        advice = f"What is damaged or left behind is built anew when it is needed. It may go: {', '.join(removable)}"
        return Line("cache", "warning", "; ".join(texts), advice)
    return Line("cache", "ok", "; ".join(texts))


def _compiler(answer: Answer, missing: Status) -> Line:
    found = _found(answer)
    if found is None:
        return _refused("compiler", answer, missing)
    return Line("compiler", "ok", f"{shlex.join(found['command'])}: {found['version']}")


def _ninja(answer: Answer, missing: Status) -> Line:
    found = _found(answer)
    if found is None:
        return _refused("ninja", answer, missing)
    return Line("ninja", "ok", f"{found['path']}: {found['version']}")


def _jobs(answer: Answer, missing: Status) -> Line:
    found = _found(answer)
    if found is None:
        return _refused("jobs", answer, missing)
    return Line("jobs", "ok", f"{found['jobs']} compilers at once, on {found['cores']} cores")


def _refused(name: str, answer: Answer, missing: Status) -> Line:
    """What the build says of something that it would refuse; or that nothing came back."""
    _, _, advice = str((answer.found or {}).get("error", "")).partition("\n")
    default = "See what it is that hangs or ends: the build asks it, too."
    return Line(name, missing, _failure(answer), " ".join(advice.split()) or default)


def _toolkit(answer: Answer) -> Line:
    found = answer.found
    if found is None:
        return Line("nvcc", "warning", f"could not be looked for: {_failure(answer)}")
    if "error" in found:
        return Line("nvcc", "warning", f"could not be looked for: {_failure(answer)}")
    if "refused" in found:
        first, _, rest = found["refused"].partition("\n")
        return Line("nvcc", "problem", first, " ".join(rest.split()) or "Correct or unset ASYNC_EMB_CUDA.")
    if "version" in found:
        text = f"CUDA {found['version']} in {found['home']}"
        return Line("nvcc", "warning" if found["notice"] else "ok", text, found["notice"])
    if found["torch_cuda"] is None:
        return Line("nvcc", "ok", f"not needed: {found['reason']}")
    return Line("nvcc", "warning", found["reason"], " ".join(found["notice"].split()))


def _cuda_of_both(torch: Answer, jax: Answer) -> Line:
    of_torch, of_jax = _found(torch) or {}, _found(jax) or {}
    torch_cuda, plugins = of_torch.get("cuda"), of_jax.get("cuda_plugins") or []
    seen_by_torch = f"CUDA {torch_cuda}, NCCL {of_torch.get('nccl')}" if torch_cuda else "none"
    seen_by_jax = f"{', '.join(plugins)}, NCCL {of_jax.get('nccl')}" if plugins else "none"
    text = f"torch: {seen_by_torch}; jax: {seen_by_jax}"
    majors = {major for plugin in plugins for major in re.findall(r"cuda(\d+)", plugin)}
    if torch_cuda and plugins and majors != {torch_cuda.split(".")[0]}:
        advice = "Install both for one major version of CUDA: two runtimes in one process fail."
        return Line("CUDA", "problem", text, advice)
    if bool(torch_cuda) != bool(plugins):
        advice = "Only one of them has CUDA: tables on GPUs need both."
        return Line("CUDA", "warning", text, advice)
    return Line("CUDA", "ok", text)


# ---- devices


def _devices(answer: Answer, torch: Answer) -> Line:
    found = _found(answer)
    gpus = (_found(torch) or {}).get("gpus", [])
    if found is None:
        advice = "See JAX_PLATFORMS and XLA_FLAGS below; JAX_PLATFORMS=cpu works everywhere."
        return Line("devices", "problem", f"JAX has none: {_failure(answer)}", advice)
    text = f"JAX: {found['count']} {found['platform']} ({found['kind']}); torch: {len(gpus)} GPUs"
    if gpus and found["platform"] == "cpu":
        advice = "torch sees GPUs and JAX does not: install jax[cuda13] or jax[cuda12], or unset JAX_PLATFORMS."
        return Line("devices", "warning", text, advice)
    return Line("devices", "ok", text)


def _preallocation(answer: Answer, environ: Mapping[str, str]) -> Line:
    if (_found(answer) or {}).get("platform") != "gpu":
        return Line("memory", "ok", "no GPU, so nothing is allocated in advance")
    wish = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    fraction = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75")
    if wish in ("false", "0"):
        return Line("memory", "ok", "XLA_PYTHON_CLIENT_PREALLOCATE=false: JAX allocates as it goes")
    advice = (
        "The native module and torch allocate beside it: set XLA_PYTHON_CLIENT_PREALLOCATE=false, or a smaller "
        "XLA_PYTHON_CLIENT_MEM_FRACTION."
    )
    return Line("memory", "warning", f"JAX takes {fraction} of a GPU's memory at its start", advice)


# ---- environment


def _environment(environ: Mapping[str, str]) -> Iterator[Line]:
    wrong = dict(_wrong_variables(environ))
    relevant = {name: value for name, value in sorted(environ.items()) if _RELEVANT.match(name)}
    for name, value in relevant.items():
        status, advice = wrong.get(name, ("ok", ""))
        yield Line("environment", status, f"{name}={value}", advice)
    if not relevant:
        yield Line("environment", "ok", "nothing that changes a build or a run is set")


def _wrong_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[Status, str]]]:
    if (text := environ.get("ASYNC_EMB_TIMEOUT_SECONDS")) is not None and not _is_positive(text):
        yield "ASYNC_EMB_TIMEOUT_SECONDS", ("problem", "It must be a positive number of seconds.")
    if environ.get("ASYNC_EMB_CUDA", "").strip() not in ("", "0", "1"):
        yield "ASYNC_EMB_CUDA", ("problem", "It must be 0 or 1, or unset.")
    if environ.get("LD_PRELOAD"):
        yield "LD_PRELOAD", ("warning", "Libraries loaded before all others may replace those of torch and JAX.")
    for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        names = ("libc10.so", "libtorch*.so*", "libcudart.so*", "libnccl.so*", "libstdc++.so*")
        if folder and (foreign := sorted({path.name for name in names for path in _glob(folder, name)})):
            advice = f"{folder} has {', '.join(foreign)}, which may be loaded instead of those of torch and JAX."
            yield "LD_LIBRARY_PATH", ("warning", advice)
            break
    if (home := environ.get("CUDA_HOME")) and not (Path(home) / "bin" / "nvcc").exists():
        yield "CUDA_HOME", ("warning", "There is no bin/nvcc in it. Correct it, or unset it to look elsewhere too.")
    if "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", ""):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = int((re.search(r"device_count=(\d+)", environ["XLA_FLAGS"]) or [0, 0])[1])
        if count > 8 * cores:
            advice = f"{count} host devices on {cores} cores: steps will be slow."
            yield "XLA_FLAGS", ("warning", advice)


def _glob(folder: str, pattern: str) -> list[Path]:
    try:
        return list(Path(folder).glob(pattern))
    except OSError:
        return []


def _is_positive(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return value > 0 and math.isfinite(value)
