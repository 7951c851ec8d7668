"""One build as data: what it reads, how it compiles and links that, and the digest of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a build makes.

    Attributes:
      module: the file name of what it makes.
      root: the folder that includes are relative to; sources and headers lie below it.
      sources: what is compiled, in the order of the link. Those that end in .cu are nvcc's.
      headers: what sources may include of our own.
      compiler: the program and its first arguments.
      compile_flags: for every C++ source. Paths may be relative to the folder of the build.
      link_flags: behind the objects.
      identity: what else a build depends on, by name: versions, the type of the CPU.
      source_flags: more flags, of single sources.
      generated: headers that the build copies to its own ``include``, by the name that they are included by.
      nvcc, nvcc_flags: the same for CUDA sources; empty in a build without.
      notices: what whoever builds should know.
    """

    module: str
    root: Path
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    compiler: tuple[str, ...]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    identity: Mapping[str, str]
    source_flags: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    generated: Mapping[str, Path] = field(default_factory=dict)
    nvcc: str = ""
    nvcc_flags: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def contents(self) -> dict[str, Any]:
        """Everything that the digest covers. Where the files lie is left out, so that equal checkouts share a build."""
        return {
            "module": self.module,
            "sources": digests(self.root, self.sources),
            "headers": digests(self.root, self.headers),
            "generated": {name: _file_digest(path) for name, path in sorted(self.generated.items())},
            "compiler": list(self.compiler),
            "compile_flags": list(self.compile_flags),
            "source_flags": {_name(self.root, path): list(flags) for path, flags in self.source_flags.items()},
            "link_flags": list(self.link_flags),
            "nvcc": [self.nvcc, *self.nvcc_flags],
            "identity": dict(self.identity),
        }

    def digest(self) -> str:
        """32 hexadecimal digits that change with anything in ``contents``."""
        return digest_of(self.contents())


def digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """The digest of each file, by its name below ``root``."""
    return {_name(root, path): _file_digest(path) for path in paths}


def digest_of(contents: object) -> str:
    """32 hexadecimal digits of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
