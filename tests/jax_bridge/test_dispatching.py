"""``fast_dispatch``: the same program and the same bits, dispatched without the effects of the calls in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bridge import close_context, fast_dispatch, make_context_handle
from jax_bridge import global_ops as ops
from jax_bridge.errors import AsyncEmbError

from ._programs import mesh_of

DEVICES, ROWS, WIDTH, TOKENS = 4, 19, 8, 12


@pytest.fixture
def handle():
    mesh = mesh_of(DEVICES)
    handle = make_context_handle(
        mesh,
        mesh.axis_names,
        data_axis=mesh.axis_names,
        tokens_per_batch=TOKENS,
        emb_width=WIDTH,
        num_unique=TOKENS,
        num_devices_per_node=DEVICES,
        name="dispatched",
        dtype=jnp.float32,
    )
    yield handle
    close_context(handle)


def a_step(handle):
    """Looks up, trains every row on itself, and gives the table, the rows and the norm."""

    def step(table, state, ids):
        table, gate = ops.lookup_start(ids, table, jnp.zeros(DEVICES), handle)
        rows = ops.lookup_done(gate, handle, token_ids=ids)
        gate = ops.wait_for(gate, rows, ops.token_spec(handle), handle)
        gate = ops.stage_update(rows, True, gate, handle)
        table, state, gate = ops.rowwise_adagrad_update_start(
            table, state, gate, handle, learning_rate=0.1, eps=1e-8, decay_factor=1.0
        )
        norm, _, _, _ = ops.rowwise_adagrad_update_done(gate, handle)
        return table, state, (rows, norm)

    return step


def run(step, ids):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32))
    state = jnp.zeros(ROWS)
    results = []
    for _ in range(3):
        table, state, result = step(table, state, ids)
        results.append(result)
    return jax.tree.map(np.asarray, (table, state, results))


def test_every_call_of_the_program_runs_and_gives_the_same_bits(handle):
    ids = jnp.asarray(np.random.default_rng(1).integers(0, ROWS, TOKENS, np.int32))
    step = a_step(handle)
    with_effects = run(jax.jit(step, donate_argnums=(0, 1)), ids)
    without = run(jax.jit(fast_dispatch(step), donate_argnums=(0, 1)), ids)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32)), with_effects, without
    )


def test_the_compiled_text_is_the_same_but_for_the_effects(handle):
    arguments = (jnp.zeros((ROWS, WIDTH)), jnp.zeros(ROWS), jnp.zeros(TOKENS, np.int32))
    step = a_step(handle)
    plain, fast = (jax.jit(f).lower(*arguments) for f in (step, fast_dispatch(step)))
    calls = [text.compile().as_text().count("custom_call_target=") for text in (plain, fast)]
    assert calls[0] == calls[1] > 0
    assert jax.make_jaxpr(step)(*arguments).effects
    assert not jax.make_jaxpr(fast_dispatch(step))(*arguments).effects


@pytest.mark.parametrize(
    "use",
    [
        lambda f, x: f(x),
        lambda f, x: jax.jit(jax.grad(lambda x: f(x).sum()))(x),
        lambda f, x: jax.jit(jax.vmap(f))(x),
    ],
    ids=["run without jit", "differentiated", "mapped"],
)
def test_any_other_use_is_refused_with_the_route(use):
    with pytest.raises(AsyncEmbError, match=r"fast_dispatch.*jax\.jit\(fast_dispatch\(step\)\)"):
        use(fast_dispatch(lambda x: x * 2), jnp.ones(3))
