"""Tables in safetensors files: what was saved comes back bit for bit, and anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from jax_bridge import CheckpointError, ContextError, handover, table_files

from . import _training as training
from ._programs import assert_same_bits
from ._sharing import bytes_of
from .test_handover import DTYPES, MISFITS, made, make_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "words.safetensors"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "onto"), [(1, 4), (3, 1)])
def test_a_table_comes_back_bit_for_bit_on_any_mesh(path, ranks, onto, dtype):
    table, state = made(ranks, dtype=jnp.dtype(dtype))
    arrays = handover.logical_table(table, state, step=12)
    arrays["weight"].reshape(-1).view(np.uint8)[:32] = 255  # NaNs with payloads
    arrays["last_step"][:] = np.arange(19)
    table_files.save_table(path, arrays)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    read = table_files.load_arrays(path)
    assert read.keys() == arrays.keys()
    for key in arrays:
        assert_same_bits(read[key], arrays[key], key)
    assert int(read["step"]) == 12
    other = make_table(onto, dtype=jnp.dtype(dtype))
    weights, optimizer = other.to_arrays(table_files.load_table(path, other))
    assert_same_bits(weights, arrays["weight"], "weights")
    assert_same_bits(optimizer["last_step"], arrays["last_step"], "last_step")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_the_file_and_the_table_reads_torchs(path, dtype):
    table, state = made(2, dtype=jnp.dtype(dtype))
    arrays = handover.logical_table(table, state)
    table_files.save_table(path, arrays)
    tensors = load_file(path)
    embedding = torch.nn.Embedding(19, 6, dtype=getattr(torch, dtype))
    embedding.load_state_dict({"weight": tensors["weight"]})
    assert bytes_of(embedding.weight.detach()) == arrays["weight"].tobytes()
    save_torch_file(embedding.state_dict(), path)
    loaded = table_files.load_table(path, table)
    assert_same_bits(table.to_arrays(loaded)[0], arrays["weight"], "weights")


def test_gradients_that_are_staged_are_kept_too(path):
    batches = training.make_batches(4)
    with training.shared_step(2, 1) as step:
        state = training.start(step)
        rehearsal = training.Rehearsal(training.arrays_of(step, state), 1)
        state, _ = training.run(step, state, batches[:2])
        for batch in batches[:2]:
            rehearsal.step(batch)
        snapshot = step.snapshot(state)
        for name in training.NAMES:
            table_files.save_table(path.with_name(name), handover.from_snapshot(snapshot, name))
    with training.shared_step(2, 1) as step:
        logical = {name: table_files.load_arrays(path.with_name(name)) for name in training.NAMES}
        dense = {"params": snapshot["params"], "opt_state": snapshot["opt_state"]}
        state = step.restore(handover.to_snapshot(logical, **dense))
        with pytest.raises(ContextError, match="has gradients staged"):
            table_files.load_table(path.with_name("items"), step.tables["items"])
        training.assert_goes_on(step, state, rehearsal, batches[2:])


def test_a_truncated_file_is_refused_by_name(path):
    table, state = made()
    table_files.save_table(path, handover.logical_table(table, state))
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        for load in (table_files.load_arrays, lambda path: table_files.load_table(path, table)):
            with pytest.raises(CheckpointError, match=f"{path.name} is truncated, or no safetensors file"):
                load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match="truncated, or no safetensors file"):
        table_files.load_table(path, table)


def test_files_of_others_are_refused_by_name(path):
    table = make_table()
    for content in (b"PK\x03\x04 not ours", b"\x93NUMPY" * 100, (1 << 60).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{path.name} is truncated, or no safetensors file"):
            table_files.load_table(path, table)
    save_file({"model.layers.0.weight": np.zeros((3, 4), np.float32)}, path)
    with pytest.raises(ContextError, match=rf"the file .*{path.name} has \['model.layers.0.weight'\]"):
        table_files.load_table(path, table)
    with pytest.raises(CheckpointError, match="there is no file"):
        table_files.load_table(path.with_name("absent"), table)
    with pytest.raises(CheckpointError):
        table_files.load_table(path.parent, table)


@pytest.mark.parametrize("case", MISFITS)
def test_a_table_of_another_kind_is_refused_by_name(path, case):
    change, message = MISFITS[case]
    table, state = made()
    table_files.save_table(path, change(handover.logical_table(table, state)))
    with pytest.raises(ContextError, match=f"async_emb 'words': the file .*{path.name} {message}"):
        table_files.load_table(path, table)


def test_a_later_version_is_refused_by_name(path):
    table, state = made()
    save_file(handover.logical_table(table, state), path, metadata={"format": table_files.FORMAT, "version": "2"})
    with pytest.raises(CheckpointError, match="is of version 2 of this format, and this package reads up to 1"):
        table_files.load_table(path, table)


def test_a_file_that_cannot_be_written_leaves_the_one_that_was_there(path, monkeypatch):
    table, state = made()
    arrays = handover.logical_table(table, state)
    table_files.save_table(path, arrays)
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        save_file(*args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table_files.safetensors().numpy, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        table_files.save_table(path, arrays)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match="cannot be written"):
        table_files.save_table(path.parent / "absent" / "words", arrays)


def test_the_header_is_plain(path):
    table, state = made()
    table_files.save_table(path, handover.logical_table(table, jax.block_until_ready(state)))
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    assert header["__metadata__"] == {"format": "async_emb table", "version": "1"}
    assert header["weight"]["shape"] == [19, 6]
