"""Builds another copy of the native module, instrumented by a sanitizer, beside copies of the Python packages.

``python tests/sanitized_build.py build/asan address`` makes ``build/asan``, a folder to put first on the path of
modules. Only what has changed is compiled again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_ext", "jax_bridge")


def ninja_file(folder: Path, sanitizers: str) -> str:
    """The build, in ninja's language: one object for each source, then the module."""
    sys.path.insert(0, str(ROOT / "torch_ext"))  # not the package, which would load the module that is installed
    import build

    tools = build.toolchain()
    generated = folder / "include"
    build.write_dlpack_header(tools, generated)
    instrument = f"-fsanitize={sanitizers} -fno-omit-frame-pointer" if sanitizers else ""
    flags = [f"-I{build.csrc_root()}", *build.compile_flags(tools, generated)]
    flags += [f"-D{name}='{value}'" for name, value in build.version_macros(tools)]
    libraries = [f"-L{directory}" for directory in tools.torch_library_dirs]
    libraries += [f"-l{name}" for name in build.TORCH_LIBRARIES]
    module = folder / "torch_ext" / f"_C{_suffix()}"
    lines = [
        "rule compile",
        f"  command = g++ {' '.join(flags)} -O1 -fPIC {instrument} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        f"  command = g++ -shared {instrument} {' '.join(build.OPENMP_FLAGS)} $in {' '.join(libraries)} -o $out",
        "  description = link $out",
    ]
    objects = []
    for source in build.sources():
        objects.append(folder / "objects" / source.relative_to(build.csrc_root()).with_suffix(".o"))
        lines.append(f"build {objects[-1]}: compile {source}")
    lines.append(f"build {module}: link {' '.join(map(str, objects))}")
    return "\n".join(lines) + "\n"


def copy_packages(folder: Path) -> None:
    """Copies the packages' Python files. Not links: the loader looks for the module beside the file itself."""
    for package in PACKAGES:
        for old in (folder / package).rglob("*.py"):
            if not (ROOT / old.relative_to(folder)).exists():
                old.unlink()
        for source in (ROOT / package).rglob("*.py"):
            target = folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _suffix() -> str:
    import importlib.machinery

    return importlib.machinery.EXTENSION_SUFFIXES[0]


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: sanitized_build.py FOLDER [SANITIZERS]", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    copy_packages(folder)
    (folder / "build.ninja").write_text(ninja_file(folder, *arguments[1:] or [""]))
    import build

    environment = os.environ | build.build_environment()
    jobs = environment["MAX_JOBS"]
    return subprocess.run(["ninja", "-C", str(folder), "-j", jobs], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
