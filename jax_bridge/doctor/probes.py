"""What pieces say of themselves: `python -m jax_bridge.doctor.probes torch native` prints it as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .children import MARK


def probe_torch() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    if torch.version.cuda:
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def probe_jax() -> dict[str, Any]:
    import jax

    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    api = [int(re.search(rf"XLA_FFI_API_{part} (\d+)", header)[1]) for part in ("MAJOR", "MINOR")]  # type: ignore[index]
    plugins = [
        f"{distribution.metadata['Name']} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if re.fullmatch(r"jax[-_]cuda\d+[-_]plugin", distribution.metadata["Name"] or "")
    ]
    return {
        "version": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "ffi_api": api,
        "cuda_plugins": plugins,
        "nccl": _version("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    }


def probe_devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "count": len(devices), "kind": devices[0].device_kind}


def probe_native() -> dict[str, Any]:
    import torch

    import torch_ext

    rows = torch_ext.gather_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0], dtype=torch.int32))
    return {"info": torch_ext.build_info(), "works": rows.tolist() == [[2.0], [1.0]]}


def probe_toolkit() -> dict[str, Any]:
    """Whether CUDA would be built in; asks torch for its version, and runs nvcc."""
    import torch

    toolkit = _file_of_torch_ext("cuda_toolkit")
    try:
        decision = toolkit.decide(torch.__version__, torch.version.cuda)
    except toolkit.CudaError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"reason": decision.reason, "notice": decision.notice, "torch_cuda": torch.version.cuda}
    if decision.toolkit is not None:
        found |= {"version": decision.toolkit.version, "home": str(decision.toolkit.home)}
    return found


def _file_of_torch_ext(name: str) -> ModuleType:
    """Without the package, which would load the native module."""
    package = importlib.util.find_spec("torch_ext")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location(f"async_emb_{name}", Path(package.origin).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


PROBES = {
    "torch": probe_torch,
    "jax": probe_jax,
    "devices": probe_devices,
    "native": probe_native,
    "toolkit": probe_toolkit,
}


def main() -> None:
    for name in sys.argv[1:]:
        try:
            found = PROBES[name]()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(f"\n{MARK}{name} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
