"""What torch, the CUDA toolkit and the native module say of themselves, for `async-emb doctor`.

Run by path, in a process of its own that may end in any way: `python -P self_report.py MARK torch native`
prints a line for each: MARK, name and JSON. As a module of the package it would load what it is to report on.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def of_torch() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    if torch.version.cuda:
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def of_toolkit() -> dict[str, Any]:
    """Whether CUDA would be built in, or why not. Runs nvcc."""
    import torch

    toolkit = _beside("cuda_toolkit")
    try:
        decision = toolkit.decide(torch.__version__, torch.version.cuda)
    except toolkit.CudaError as error:
        return {"refused": str(error)}
    found: dict[str, Any] = {"reason": decision.reason, "notice": decision.notice, "torch_cuda": torch.version.cuda}
    if decision.toolkit is not None:
        found |= {"version": decision.toolkit.version, "home": str(decision.toolkit.home)}
    return found


def of_native() -> dict[str, Any]:
    """Which module the first use takes, and whether it works; builds none."""
    import torch

    import torch_ext

    state = torch_ext._load.state()
    found = {"origin": state.origin, "path": str(state.path), "reason": state.reason}
    if state.path is None:
        return found
    rows = torch_ext.gather_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0], dtype=torch.int32))
    return {**found, "info": torch_ext.build_info(), "works": rows.tolist() == [[2.0], [1.0]]}


def _beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"async_emb_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def main(mark: str, *names: str) -> None:
    reports = {"torch": of_torch, "toolkit": of_toolkit, "native": of_native}
    for name in names:
        try:
            found = reports[name]()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(f"\n{mark}{name} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
