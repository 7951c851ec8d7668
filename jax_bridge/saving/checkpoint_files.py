"""The files of one checkpoint: a manifest, and arrays that every process reads and writes in blocks.

    DIRECTORY/STEP/manifest.json     what it is, and the tree of arrays: shapes, dtypes, folders; with a checksum
    DIRECTORY/STEP/arrays/NUMBER/    an array: Zarr, version 3, each chunk with its CRC-32C, none left out

Orbax makes a checkpoint appear at once or not at all: it writes into a folder of another name and renames that. Arrays
are written by tensorstore, as Orbax's own are, but with what a table needs: its logical columns, from shards that are
padded, and an error for every chunk that is missing or altered.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import CheckpointError
from ..processes.agreement import Agreement

FORMAT = "async_emb checkpoint"
VERSION = 1

_MANIFEST = "manifest.json"
_CHUNK_BYTES = 64 << 20
_WRITES_AT_ONCE = 8
_LEFT_OVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The first ``width`` columns of an array whose others are padding."""

    array: Any
    width: int


def orbax() -> Any:
    """The module ``orbax.checkpoint``; imported late, because it takes seconds and not everybody has it."""
    try:
        import orbax.checkpoint as ocp
        import tensorstore  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"async_emb: checkpoints need Orbax, which cannot be imported ({error}): pip install orbax-checkpoint, or "
            "pip install 'async-emb[checkpoint]'"
        ) from error
    return ocp


def name_of(parent: str, key: str) -> str:
    """What messages call an entry of a tree: tables['users'].weights, params['shift']."""
    if key.startswith(("[", ".")) or not key or not parent:
        return parent + key
    return f"{parent}[{key!r}]"


# ---- folders


def steps_in(directory: Path) -> list[int]:
    """The numbers of the complete checkpoints, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def remove(directory: Path, step: int) -> None:
    """Removes a checkpoint: like its appearance, at once."""
    gone = directory / f"{step}.deleted"
    shutil.rmtree(gone, ignore_errors=True)
    (directory / str(step)).rename(gone)
    shutil.rmtree(gone)


def remove_left_overs(directory: Path) -> None:
    """Removes what saves and removals that were interrupted have left."""
    for path in directory.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# ---- writing


def write(path: Path, header: Mapping[str, Any], tree: Any, together: Agreement) -> None:
    """Writes a checkpoint; every process calls it alike. It is there when this returns, and not where it raises.

    Args:
        path: of the checkpoint.
        header: goes into the manifest.
        tree: dictionaries of arrays, of ``Columns`` and of None. Each device writes what it holds; what is not on
            devices, or whole in every process, the first process writes.
        together: the processes.
    """
    entries: list[tuple[dict[str, Any], Any]] = []
    tree = _described("", tree, entries)

    def write_arrays(folder: Path | None) -> None:
        heard = together.hear("make the folder of the checkpoint", None if folder is None else str(folder))
        shared = Path(heard[together.leader])
        if not shared.is_dir():
            raise CheckpointError(
                f"async_emb {together.call}: process {together.here} does not see {shared}, which process "
                f"{together.leader} has made: the directory must be on a file system that all processes share"
            )
        for entry, source in entries:
            with _named(entry, shared, "written"):
                _write_array(_open(shared, entry), source, entry, whole=together.leads)
        together.hear("finish writing")

    if not together.leads:
        write_arrays(None)
        return

    def write_all(folder: Path) -> None:
        for entry, _ in entries:
            with _named(entry, folder, "written"):
                _open(folder, entry, create=True)
        write_arrays(folder)
        body = {"format": FORMAT, "version": VERSION, **header, "tree": tree}
        (folder / _MANIFEST).write_text(json.dumps({**body, "crc32": _checksum(body)}, indent=1))

    _save_atomically(path, write_all, together.here)


def _save_atomically(path: Path, write_all: Callable[[Path], None], here: int) -> None:
    ocp = orbax()

    class Handler(ocp.CheckpointHandler):  # type: ignore[misc, name-defined]
        def save(self, directory: Any, args: Any = None) -> None:
            write_all(Path(directory))

        def restore(self, directory: Any, args: Any = None) -> Any:
            # Orbax asks for the method. Files are read without it, in parts, after they have been checked.
            raise NotImplementedError("use jax_bridge.Checkpoints")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    class Arguments(ocp.args.CheckpointArgs):  # type: ignore[misc, name-defined]
        pass

    # Orbax's own barriers are collectives of JAX: they have no timeout, and name nobody who is missing. So this process
    # alone uses Orbax, and the processes meet in `write_all`.
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    with ocp.Checkpointer(Handler(), multiprocessing_options=alone) as checkpointer:
        checkpointer.save(path, args=Arguments())


def _described(name: str, tree: Any, entries: list[tuple[dict[str, Any], Any]]) -> Any:
    """The tree with a description in the place of each array; these go to ``entries`` too, each with its array."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: _described(name_of(name, key), x, entries) for key, x in sorted(tree.items())}
    array, shape = (tree.array, (*tree.array.shape[:-1], tree.width)) if isinstance(tree, Columns) else (tree, None)
    shape = tuple(array.shape) if shape is None else shape
    block = array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else shape
    chunk = [max(1, min(b, n)) for b, n in zip(block, shape, strict=True)]
    if shape and block[0] == shape[0]:  # rows are whole, so they may be cut anywhere
        row_bytes = max(1, math.prod(chunk[1:]) * array.dtype.itemsize)
        chunk[0] = max(1, min(chunk[0], _CHUNK_BYTES // row_bytes))
    entry = {"array": len(entries), "name": name, "shape": list(shape), "dtype": array.dtype.name, "chunk": chunk}
    entries.append((entry, array))
    return entry


def _write_array(store: Any, source: Any, entry: Mapping[str, Any], *, whole: bool) -> None:
    writes: collections.deque[Any] = collections.deque()
    for index, block in _blocks(source, whole=whole):
        starts = [s.indices(n)[0] for s, n in zip(index, source.shape, strict=True)]
        ends = [min(a + n, m) for a, n, m in zip(starts, block.shape, entry["shape"], strict=True)]
        if any(a >= b for a, b in zip(starts, ends, strict=True)) and block.ndim:
            continue  # nothing but padding
        data = block[tuple(slice(0, b - a) for a, b in zip(starts, ends, strict=True))]
        step = entry["chunk"][0] if block.ndim else 1
        for first in range(0, len(data) if block.ndim else 1, step):
            if len(writes) == _WRITES_AT_ONCE:
                writes.popleft().result()
            if not block.ndim:
                writes.append(store.write(data))
                continue
            rows = slice(starts[0] + first, min(starts[0] + first + step, ends[0]))
            place = (rows, *(slice(a, b) for a, b in zip(starts[1:], ends[1:], strict=True)))
            writes.append(store[place].write(data[first : first + step]))
    for pending in writes:
        pending.result()


def _blocks(source: Any, *, whole: bool) -> Iterator[tuple[tuple[slice, ...], Any]]:
    """(where, what) of the parts that this process writes, one after the other."""
    if not isinstance(source, jax.Array) or source.is_fully_addressable:
        # Of a process's own array, every process has one.
        if not whole:
            return
        if not isinstance(source, jax.Array):
            yield tuple(slice(0, n) for n in source.shape), np.asarray(source)
            return
    for shard in source.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


# ---- reading


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: there is none, it is damaged, or of a newer version.
    """
    where = f"async_emb: the checkpoint {path}"
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        found = manifest.get("format")
        body = {key: x for key, x in manifest.items() if key != "crc32"}
    except FileNotFoundError:
        contents = sorted(x.name for x in path.iterdir())[:8] if path.is_dir() else []
        error = CheckpointError(f"{where} was not written by jax_bridge.Checkpoints: it has no {_MANIFEST}")
        error.add_note(f"It has {contents}. Another program's checkpoints are read by that program.")
        raise error from None
    except (ValueError, AttributeError) as problem:
        raise CheckpointError(f"{where} is damaged: {_MANIFEST} cannot be read: {problem}") from None
    if found != FORMAT:
        raise CheckpointError(
            f"{where} was not written by jax_bridge.Checkpoints: its format is {found!r}, not {FORMAT!r}"
        )
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{where} has version {version!r} of the format, but this async_emb reads up to {VERSION}: it was written "
            f"by async_emb {manifest.get('async_emb')}, install that or a newer one"
        )
    if manifest.get("crc32") != _checksum(body):
        raise CheckpointError(f"{where} is damaged: {_MANIFEST} has another checksum than it was written with")
    return body


def read(path: Path, entry: Mapping[str, Any], columns: tuple[int, int] | None = None) -> np.ndarray[Any, Any]:
    """An array, or some of its columns.

    Raises:
        CheckpointError: a file of it is missing or damaged.
    """
    with _named(entry, path, "read"):
        store = _open(path, entry)
        if columns is not None:
            store = store[:, slice(*columns)]
        return np.asarray(store.read().result())


def _open(path: Path, entry: Mapping[str, Any], *, create: bool = False) -> Any:
    import tensorstore

    specification = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path.absolute()}/arrays/{entry['array']:04}/"},
        "metadata": {
            "shape": entry["shape"],
            "data_type": entry["dtype"],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": entry["chunk"]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
        # Zeros are written too, so that a chunk that is not there is a chunk that was lost.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(specification, open=not create, create=create).result()


@contextlib.contextmanager
def _named(entry: Mapping[str, Any], path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # tensorstore raises ValueError for most
        text = str(error).split(" [")[0]
        message = f"async_emb: {entry['name']} of the checkpoint {path} cannot be {done}"
        raise CheckpointError(f"{message}: {text}") from None


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
