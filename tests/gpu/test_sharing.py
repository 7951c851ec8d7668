"""Memory that torch and JAX share on a GPU: one address, streams in order, and no read after a view has ended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_bridge import ContextError, dlpack, handover
from tests.jax_bridge.test_handover import made

from ._steps import busy


def on_gpu(host: np.ndarray) -> jax.Array:
    return jax.device_put(host, jax.devices("cuda")[0])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int32", "bool", "float8_e4m3fn"])
def test_both_ways_keep_the_address_and_the_bits(name):
    host = np.arange(64).astype(jnp.dtype(name))
    array = on_gpu(host)
    with dlpack.view(array) as tensor:
        assert tensor.is_cuda
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
        clone = tensor.clone()
    adopted = dlpack.adopt(clone)
    assert adopted.unsafe_buffer_pointer() == clone.data_ptr()
    assert dlpack.shares_memory(adopted, clone)
    assert np.asarray(adopted).tobytes() == host.tobytes()
    copied = dlpack.adopt(clone, copy=True)
    assert not dlpack.shares_memory(copied, clone)


def test_a_view_waits_for_jax_and_its_end_for_torch():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: y @ x, x))
    array = slow(on_gpu(np.eye(2048, dtype=np.float32)))
    with dlpack.view(array) as tensor:
        assert torch.equal(tensor, torch.eye(2048, device="cuda"))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            busy()
            tensor.fill_(3)  # on the GPU some time after the block was left by the host, if nothing waited
    assert float(jnp.min(array)) == 3


def test_an_adopted_tensor_is_read_after_what_torch_has_put_on_its_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1024, device="cuda")
        busy()
        tensor.fill_(5)
        array = dlpack.adopt(tensor)
    assert float(jnp.min(array)) == 5


def test_a_tensor_that_was_kept_says_that_its_view_has_ended():
    with dlpack.view(on_gpu(np.zeros(64, np.float32))) as tensor:
        kept = tensor[3:]
    for use in (torch.sum, torch.clone, torch.Tensor.cpu, torch.Tensor.data_ptr):
        with pytest.raises(RuntimeError, match="has ended"):
            use(kept)


def test_pinned_memory_is_refused_by_name():
    pinned = torch.zeros(64).pin_memory()
    with pytest.raises(ContextError, match="is in pinned memory"):
        dlpack.adopt(pinned)


def test_an_embedding_has_the_memory_of_the_table():
    table, state = made(1)
    address, before = state.weights.unsafe_buffer_pointer(), table.to_arrays(state)[0]
    embedding = handover.to_embedding(table, state, donate=True)
    assert embedding.weight.data_ptr() == address
    assert np.array_equal(embedding.weight.detach().cpu().numpy(), before)
    again = handover.from_embedding(table, embedding)
    assert np.array_equal(table.to_arrays(again)[0], before)
