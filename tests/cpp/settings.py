"""Prints what the C++ tests share with the build of the native module; for the Makefile.

python tests/cpp/settings.py {jobs | flags | dlpack INCLUDE_DIR}
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The package without its __init__, which would import torch.
package = sys.modules["torch_ext"] = types.ModuleType("torch_ext")
package.__path__ = [str(ROOT / "torch_ext")]

from torch_ext import build, build_jobs, ninja_build  # noqa: E402


def main(arguments: list[str]) -> int:
    match arguments:
        case ["jobs"]:
            print(build_jobs.parallel_jobs())
        case ["flags"]:
            print(" ".join(build.CXX_FLAGS))
        case ["dlpack", folder]:
            header = build.dlpack_header(build.toolchain())
            ninja_build.copy_if_different(header, Path(folder) / "dlpack" / "dlpack.h")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
