"""Installs the wheel and the source distribution in fresh environments, as users do, and uses them.

``python tests/packaging/check.py dist`` with both in ``dist``; ``make package-test`` makes them. torch, jax and others
come from the environment of the interpreter that runs this, through a .pth file. Objects that are compiled already are
used again, so that a build from the source distribution links only; that all of it compiles is another test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SMOKE = Path(__file__).resolve().parent / "smoke.py"


def main(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="async-emb packages ") as folder:
        place = Path(folder)
        say(f"{wheel.name} in an environment without a compiler")
        check_wheel(wheel, place / "wheel")
        say(f"{sdist.name} with --no-build-isolation, with the objects of this checkout")
        check_sdist(sdist, place / "sdist")
        say(f"{sdist.name} without torch: the commands to use")
        check_refusal(sdist, place / "bare")
        say(f"{sdist.name} with the build left to the first use")
        check_first_use(sdist, place / "first use")
    say("passed")


def check_wheel(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sum(name.startswith("torch_ext/_C.") for name in names) == 1, names
    for name in ("torch_ext/csrc/core/exp.h", "torch_ext/csrc/faces/torch_ops.cpp", "torch_ext/py.typed"):
        assert name in names, name
    python = environment(folder)
    install(python, str(wheel))
    use(python, "installed")


def check_sdist(sdist: Path, folder: Path) -> None:
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **safely)
    (source,) = folder.iterdir()
    for objects in (ROOT / "build").glob("native-cpython-*"):
        shutil.copytree(objects, source / "build" / objects.name)  # with the times of writing, which ninja compares
    python = environment(folder / "environment")
    install(python, "--no-build-isolation", str(source))
    use(python, "installed")


def check_refusal(sdist: Path, folder: Path) -> None:
    python = environment(folder, packages=("setuptools", "_distutils_hack", "ninja"))
    # Without isolation there is nothing to download; this environment is as empty as an isolated one.
    result = pip(python, "install", "--no-build-isolation", "--no-deps", "--no-index", str(sdist))
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert f"{python} has no torch" in text, text
    assert "python -m pip install --no-build-isolation async_emb-*.tar.gz" in text, text
    assert "ASYNC_EMB_BUILD=first-use python -m pip install async_emb-*.tar.gz" in text, text
    install(python, "--no-build-isolation", str(sdist), ASYNC_EMB_BUILD="first-use")
    code = "import torch_ext; torch_ext.gather_rows"  # torch is imported when a name first needs it
    result = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert "NativeModuleError: torch_ext needs torch, which cannot be imported" in result.stderr, result.stderr


def check_first_use(sdist: Path, folder: Path) -> None:
    python = environment(folder)
    install(python, "--no-build-isolation", str(sdist), ASYNC_EMB_BUILD="first-use")
    use(python, "to be built", ASYNC_EMB_CACHE=str(folder / "cache"), PATH=os.environ["PATH"])
    assert not (folder / "cache").exists()


def environment(folder: Path, packages: Sequence[str] = ()) -> Path:
    """A new environment that sees the packages of this one, or only those named. Returns its interpreter."""
    venv.create(folder, with_pip=False)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shared = Path(sysconfig.get_path("purelib"))
    if packages:
        for name in packages:
            for path in (shared / name, *shared.glob(f"{name}-*.dist-info")):
                (own / path.name).symlink_to(path)
    else:
        (own / "shared.pth").write_text(f"{shared}\n")
    return folder / "bin" / "python"


def install(python: Path, *arguments: str, **environ: str) -> None:
    result = pip(python, "install", "--no-deps", "--no-index", "--ignore-installed", *arguments, **environ)
    assert result.returncode == 0, result.stdout + result.stderr


def pip(python: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)


def use(python: Path, origin: str, **environ: str) -> None:
    """Runs the smoke test, without a compiler and without a cache, unless ``environ`` says something else."""
    nothing = {"PATH": str(python.parent / "nothing"), "ASYNC_EMB_CACHE": str(python.parent / "nothing"), "CXX": ""}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ASYNC_EMB"))}
    subprocess.run([python, "-I", SMOKE, origin], env=inherited | nothing | environ, check=True)


def say(line: str) -> None:
    print(f"packages [{time.monotonic() - STARTED:3.0f} s]: {line}", flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    main(Path(sys.argv[1]))
