"""Who may know whom, checked on the text of every file: the layers of csrc, the two Python packages, and the oracle.

faces -> context -> comm, cpu, cuda -> core          only faces know torch, XLA and Python
comm/c10d, below faces alone                         knows torch's process groups and tensors
torch_ext never imports jax                          its build reads jaxlib's headers
torch_ext.common imports neither                     so that both packages can be built on it, and start quickly
jax_bridge reaches torch through torch_ext           and in dlpack.py
jax_bridge.reference knows NumPy alone               so that it can disagree with the kernels
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda"},
    "comm": {"core", "comm"},
    "context": {"core", "cpu", "cuda", "comm", "context"},
    "faces": {"core", "cpu", "cuda", "comm", "context", "faces"},
}
CPP_SUFFIXES = {".h", ".cpp", ".cc", ".cu", ".cuh"}
# Headers that only faces may include.
FACE_HEADERS = re.compile(r"(torch|ATen|c10|caffe2|pybind11|xla|jaxlib|nanobind)/|Python\.h$")
# The one folder below faces that knows torch, as far as its process groups go; others know it as comm/transport.h.
PROCESS_GROUPS = "comm/c10d/"
PROCESS_GROUP_HEADERS = re.compile(r"(torch/csrc/distributed|ATen|c10)/")
CUDA_HEADERS = re.compile(r"(cuda|cublas|cub/|thrust/|nccl|cooperative_groups)")
CUDA_LAYERS = {"cuda", "comm", "context", "faces"}
# The standalone C header of DLPack, under its own name and the one that torch ships it under.
DLPACK_HEADERS = {"dlpack/dlpack.h", "ATen/dlpack.h"}
STANDARD_HEADER = re.compile(r"[a-z0-9_]+$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)

JAX_PACKAGES = {"jax", "jaxlib", "jax_bridge", "flax", "optax"}
REFERENCE_PACKAGES = {"numpy", "ml_dtypes"}
PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt|Users)/\w+")


# ---- C++


def cpp_problems(path: PurePosixPath, text: str) -> list[str]:
    """Includes that the layer of ``path`` (relative to csrc) may not have."""
    layer = path.parts[0]
    if layer not in LAYERS:
        return [f"{path}: csrc/{layer} is not a layer; there are {', '.join(LAYERS)}"]
    found = ((quoted or angled, bool(quoted)) for quoted, angled in INCLUDE.findall(text))
    return [
        f"{path}: {layer} may not include {header}"
        for header, quoted in found
        if not may_include(layer, header, quoted)
        and not (str(path).startswith(PROCESS_GROUPS) and may_include_in_process_groups(header, quoted))
    ]


def may_include(layer: str, header: str, quoted: bool) -> bool:
    if layer == "faces":
        return True
    own = header.split("/")[0]
    if quoted and header.startswith(PROCESS_GROUPS):
        return False
    if quoted and own in LAYERS:
        return own in LAYERS[layer]
    if header in DLPACK_HEADERS:
        return layer == "context"
    if layer == "core":
        return not quoted and STANDARD_HEADER.match(header) is not None
    if CUDA_HEADERS.match(header):
        return layer in CUDA_LAYERS
    return not quoted and FACE_HEADERS.match(header) is None


def may_include_in_process_groups(header: str, quoted: bool) -> bool:
    own = quoted and header.startswith(PROCESS_GROUPS)
    return own or (not quoted and PROCESS_GROUP_HEADERS.match(header) is not None)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_csrc_include_only_what_is_below_them(layer):
    problems = []
    for path in repository_files("csrc"):
        if path.suffix in CPP_SUFFIXES and path.parts[1] == layer:
            problems += cpp_problems(path.relative_to("csrc"), (ROOT / path).read_text())
    assert problems == []


def test_every_folder_of_csrc_is_a_layer():
    assert {path.parts[1] for path in repository_files("csrc")} <= set(LAYERS)


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("core/exp.h", '"cpu/kernels.h"'),
        ("core/exp.h", "<cuda_runtime.h>"),
        ("core/exp.h", "<dlpack/dlpack.h>"),
        ("core/exp.h", "<immintrin.h>"),
        ("cpu/kernels.cpp", '"comm/communicator.h"'),
        ("cpu/kernels.cpp", '"context/spec.h"'),
        ("cpu/kernels.cpp", "<cuda_runtime.h>"),
        ("comm/arrivals.cpp", '"cpu/kernels.h"'),
        ("comm/arrivals.cpp", "<torch/library.h>"),
        ("comm/arrivals.cpp", "<torch/csrc/distributed/c10d/Backend.hpp>"),
        ("comm/arrivals.cpp", '"comm/c10d/process_group.h"'),
        ("comm/c10d/process_group.cpp", "<torch/library.h>"),
        ("comm/c10d/process_group.cpp", "<pybind11/pybind11.h>"),
        ("comm/c10d/process_group.cpp", '"torch/csrc/distributed/c10d/Backend.hpp"'),
        ("comm/c10d/process_group.cpp", '"context/spec.h"'),
        ("context/pipeline.cpp", "<torch/csrc/distributed/c10d/Backend.hpp>"),
        ("context/pipeline.cpp", '"comm/c10d/process_group.h"'),
        ("context/pipeline.cpp", '"faces/ffi_support.h"'),
        ("context/pipeline.cpp", '"xla/ffi/api/ffi.h"'),
        ("context/pipeline.cpp", "<xla/ffi/api/ffi.h>"),
        ("context/pipeline.cpp", "<ATen/ATen.h>"),
        ("context/pipeline.cpp", "<Python.h>"),
        ("context/pipeline.cpp", "<pybind11/pybind11.h>"),
        ("elsewhere/file.cpp", "<vector>"),
    ],
)
def test_a_planted_include_is_caught(path, include):
    assert cpp_problems(PurePosixPath(path), f"// text\n#  include {include}\n")


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("core/exp.h", "<cstdint>"),
        ("core/exp.h", '"core/dtype.h"'),
        ("cpu/float_mode.h", "<xmmintrin.h>"),
        ("cuda/launch.cu", "<cuda_runtime.h>"),
        ("context/tensor_view.h", "<dlpack/dlpack.h>"),
        ("context/pipeline.cpp", '"comm/communicator.h"'),
        ("comm/c10d/process_group.h", "<torch/csrc/distributed/c10d/Backend.hpp>"),
        ("comm/c10d/process_group.h", "<ATen/core/Tensor.h>"),
        ("comm/c10d/process_group.cpp", "<c10/util/intrusive_ptr.h>"),
        ("comm/c10d/process_group.cpp", '"comm/c10d/process_group.h"'),
        ("comm/c10d/process_group.cpp", '"comm/transport.h"'),
        ("context/pipeline.cpp", '"comm/transport.h"'),
        ("faces/transports.cpp", '"comm/c10d/process_group.h"'),
        ("faces/module.cpp", "<pybind11/pybind11.h>"),
        ("faces/torch_ops.cpp", '"cpu/kernels.h"'),
    ],
)
def test_an_include_that_the_layer_needs_is_allowed(path, include):
    assert cpp_problems(PurePosixPath(path), f"#include {include}\n") == []


# ---- Python


def imported_modules(text: str, path: PurePosixPath) -> Iterator[str]:
    """The absolute dotted name of everything that a file imports anywhere, by a statement or by a call."""
    package = path.parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from package import module` imports a module too.
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "(unknown)"


def python_problems(path: PurePosixPath, text: str) -> list[str]:
    """Imports that ``path`` (relative to the repository) may not have."""
    return [f"{path}: may not import {name}" for name in imported_modules(text, path) if not may_import(path, name)]


def may_import(path: PurePosixPath, name: str) -> bool:
    top = name.split(".")[0]
    if path.parts[:2] == ("torch_ext", "common"):
        own = name.startswith("torch_ext.common.")
        return own or top in REFERENCE_PACKAGES or top in sys.stdlib_module_names
    if path.parts[0] == "torch_ext":
        return top not in JAX_PACKAGES
    if path.parts[:2] == ("jax_bridge", "reference") or path.name == "reference.py":
        own = name.startswith("jax_bridge.reference.")
        return own or top in REFERENCE_PACKAGES or top in sys.stdlib_module_names
    if path.parts[0] == "jax_bridge":
        return top != "torch" or path == PurePosixPath("jax_bridge/dlpack.py")
    return True


@pytest.mark.parametrize("package", ["torch_ext", "jax_bridge"])
def test_packages_import_only_what_they_may(package):
    problems = []
    for path in repository_files(package):
        if path.suffix == ".py":
            problems += python_problems(path, (ROOT / path).read_text())
    assert problems == []


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("torch_ext/ops.py", "import jax"),
        ("torch_ext/ops.py", "import jax.numpy as jnp"),
        ("torch_ext/ops.py", "from jax import ffi"),
        ("torch_ext/ops.py", "def late():\n    from jax.ffi import include_dir"),
        ("torch_ext/ops.py", "import jax_bridge"),
        ("torch_ext/ops.py", "importlib.import_module('jax.ffi')"),
        ("torch_ext/build.py", "import jax.ffi"),
        ("torch_ext/common/errors.py", "import jax"),
        ("torch_ext/common/errors.py", "import torch"),
        ("torch_ext/common/errors.py", "def late():\n    from torch_ext import ranks"),
        ("torch_ext/build.py", "importlib.import_module('jax.ffi')"),
        ("jax_bridge/ops.py", "import torch"),
        ("jax_bridge/ops.py", "from torch.utils import dlpack"),
        ("jax_bridge/ops.py", "def late():\n    import torch.utils.dlpack"),
        ("jax_bridge/ops.py", "__import__('torch')"),
        ("jax_bridge/reference/sums.py", "import jax"),
        ("jax_bridge/reference/sums.py", "import torch_ext"),
        ("jax_bridge/reference/sums.py", "from ..errors import IdError"),
        ("jax_bridge/reference/sums.py", "from .. import errors"),
        ("jax_bridge/reference/sums.py", "from jax_bridge import ops"),
        ("jax_bridge/reference.py", "from .errors import IdError"),
    ],
)
def test_a_planted_import_is_caught(path, statement):
    assert python_problems(PurePosixPath(path), f"{statement}\n")


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("torch_ext/ops.py", "import torch"),
        ("torch_ext/common/table_rules.py", "import ml_dtypes"),
        ("torch_ext/common/table_rules.py", "from .errors import Problem"),
        ("jax_bridge/errors.py", "from torch_ext.common.errors import IdError"),
        ("jax_bridge/runtime.py", "import torch_ext"),
        ("jax_bridge/dlpack.py", "import torch"),
        ("jax_bridge/ops.py", "import jax"),
        ("jax_bridge/reference/sums.py", "import numpy as np"),
        ("jax_bridge/reference/sums.py", "from .formats import to_fp32"),
        ("jax_bridge/reference/sums.py", "from . import formats"),
    ],
)
def test_an_import_that_the_package_needs_is_allowed(path, statement):
    assert python_problems(PurePosixPath(path), f"{statement}\n") == []


# ---- Texts


def private_paths(text: str) -> list[str]:
    return [match[0] for match in PRIVATE_PATH.finditer(text)]


def test_no_file_names_a_path_of_somebodys_machine():
    found = {}
    for path in repository_files():
        content = (ROOT / path).read_bytes()
        if b"\0" not in content and (paths := private_paths(content.decode())):
            found[str(path)] = paths
    assert found == {}


@pytest.mark.parametrize("folder", ["work", "root", "home", "tmp", "opt", "Users"])
def test_a_planted_path_is_caught(folder):
    assert private_paths(f"see '/{folder}/somebody/notes.md'") == [f"/{folder}/somebody"]


def test_relative_paths_and_urls_are_no_private_paths():
    assert private_paths("./work/table ../tmp/x https://example.org/home/page examples/root/x") == []


def repository_files(folder: str = ".") -> list[PurePosixPath]:
    """Files that belong to the project, relative to its root: those that git does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("which files belong to the project is known to git only, and this is no checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", folder]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (PurePosixPath(name) for name in listing.split("\0") if name)
    return sorted(path for path in paths if (ROOT / path).is_file())
