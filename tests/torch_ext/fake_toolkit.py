"""A folder that looks like a CUDA toolkit, for tests of what a build decides before it compiles."""

from __future__ import annotations

from pathlib import Path

CUDA_TORCH = "2.14.1+cu130"
CPU_TORCH = "2.14.1+cpu"

NVCC = """\
#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
  *--list-gpu-arch*) printf 'compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\n' ;;
  *--dryrun*) echo "#\\$ _HERE_=$(dirname "$0")" >&2 ;;
  *) echo "the compiler was started: $*" >&2; exit 1 ;;
esac
"""


def make_toolkit(home: Path, version: str) -> Path:
    """A folder that looks like a toolkit, to whoever does not compile with it."""
    for folder in ("bin", "include/cccl", "lib64"):
        (home / folder).mkdir(parents=True)
    (home / "bin" / "nvcc").write_text(NVCC.format(version=version))
    (home / "bin" / "nvcc").chmod(0o755)
    (home / "include" / "cuda_runtime.h").touch()
    (home / "lib64" / f"libcudart.so.{version.split('.')[0]}").touch()
    return home
