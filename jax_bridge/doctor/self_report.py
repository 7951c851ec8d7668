"""What JAX says of itself, and of its devices: as `torch_ext/self_report.py`, for JAX."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any


def of_jax() -> dict[str, Any]:
    import jax

    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    api = [int(re.search(rf"XLA_FFI_API_{part} (\d+)", header)[1]) for part in ("MAJOR", "MINOR")]  # type: ignore[index]
    installed = {(d.metadata["Name"] or "").replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {
        "version": jax.__version__,
        "jaxlib": installed.get("jaxlib", "none"),
        "ffi_api": api,
        "cuda_plugins": [f"{n} {v}" for n, v in installed.items() if re.fullmatch(r"jax-cuda\d+-plugin", n)],
        "nccl": next((v for n, v in installed.items() if n.startswith("nvidia-nccl-cu")), "none"),
    }


def of_devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "count": len(devices), "kind": devices[0].device_kind}


def main(mark: str, *names: str) -> None:
    reports = {"jax": of_jax, "devices": of_devices}
    for name in names:
        try:
            found = reports[name]()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(f"\n{mark}{name} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
