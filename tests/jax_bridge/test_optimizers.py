"""Row optimizers through the training step: each setting gives the bits of the oracle's rule."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jax_bridge import AsyncEmbedding, ContextError, RowwiseAdagrad, global_ops, train_step

from . import _training as training
from ._programs import assert_same_bits, mesh_of
from ._training import Rehearsal

F32 = np.float32


def rate_of(step: Any) -> Any:
    """A schedule: an array in, an array out."""
    return jnp.asarray([0.5, 0.25, 0.125, 0.0625], jnp.float32)[jnp.clip(step, 0, 3)]


# Settings, and the same for the oracle: a dictionary, or a function of (step of the gradients, step that applies them).
RULES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({"learning_rate": 0.1}, {"learning_rate": 0.1, "eps": 1e-8, "decay_factor": 1.0}),
    "eps": ({"learning_rate": 0.1, "eps": 0.5}, {"learning_rate": 0.1, "eps": 0.5, "decay_factor": 1.0}),
    "half life": (
        {"learning_rate": 0.1, "half_life": 7},
        {"learning_rate": 0.1, "eps": 1e-8, "decay_factor": 0.5 ** (1 / 7)},
    ),
    "weight decay": (
        {"learning_rate": 0.1, "weight_decay": 0.3},
        {
            "learning_rate": 0.1,
            "eps": 1e-8,
            "decay_factor": 1.0,
            "weight_decay_factor": F32(1) - F32(0.1) * F32(0.3),
        },
    ),
    "clipping": (
        {"learning_rate": 0.1, "max_grad_norm": 25.0},
        {"learning_rate": 0.1, "eps": 1e-8, "decay_factor": 1.0, "max_grad_norm": 25.0},
    ),
    "schedule": (
        {"learning_rate": rate_of},
        lambda staged, applied: {"learning_rate": float(rate_of(staged)), "eps": 1e-8, "decay_factor": 1.0},
    ),
    "lazy": (
        {"learning_rate": 0.1, "half_life": 7, "weight_decay": 0.3, "lazy": True},
        lambda staged, applied: {
            "learning_rate": 0.1,
            "eps": 1e-8,
            "accum_decay_rate": math.log(2) / 7,
            "weight_decay_rate": F32(0.1) * F32(0.3),
            "step": staged + 1,
        },
    ),
    "started": (
        {"learning_rate": 0.1, "initial_accumulator": 0.25},
        {"learning_rate": 0.1, "eps": 1e-8, "decay_factor": 1.0},
    ),
}


def assert_equals_the_oracle(settings: dict[str, Any], options: Any, **tables: Any) -> Any:
    """Trains with both schedules' worth of events: a flush in the middle, and a step that is skipped."""
    batches = training.make_batches(7)
    batches[3] = batches[3] | {"slope": F32(np.nan)}
    with training.make_step(2, 1, tables={"optimizer": RowwiseAdagrad(**settings)} | tables) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, options=options)
        for part in (batches[:2], batches[2:]):
            state = step.flush(training.run(step, state, part)[0])
            for batch in part:
                rehearsal.step(batch)
            rehearsal.flush()
        rehearsal.assert_state(step, state)
    return rehearsal


@pytest.mark.parametrize("name", RULES)
def test_every_setting_gives_the_bits_of_the_oracle(name):
    rehearsal = assert_equals_the_oracle(*RULES[name])
    simulation = rehearsal.simulations["users" if name == "lazy" else "items"]
    assert simulation.valids == [True, True, True, False, True, True, True]
    if name == "clipping":
        assert 0 < sum(norm > 25 for norm in simulation.norms) < 6, "some steps are clipped, and some are not"
    if name == "lazy":
        assert len(np.unique(simulation.last_step)) > 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding_gives_the_bits_of_the_oracle(dtype):
    settings = {"learning_rate": 0.1, "rounding": "stochastic", "seed": 2**32 - 5, "lazy": dtype == "float16"}
    options = {"learning_rate": 0.1, "eps": 1e-8, "rounding": "stochastic", "seed": 2**32 - 5}
    if settings["lazy"]:
        rates = {"accum_decay_rate": 0.0, "weight_decay_rate": 0.0}
        wanted = lambda staged, applied: options | rates | {"step": staged + 1}  # noqa: E731
    else:
        wanted = options | {"decay_factor": 1.0}
    assert_equals_the_oracle(settings, wanted, dtype=dtype)


def test_half_precision_without_stochastic_rounding_gives_the_bits_of_the_oracle():
    assert_equals_the_oracle(*RULES["half life"], dtype=ml_dtypes.bfloat16)


def one_row(optimizer: Any, weight: float, gradients: list[float], **options: Any) -> Any:
    """Weight and state of a row of width 2 after updates with these gradients."""
    table = AsyncEmbedding(
        mesh_of(1),
        table_axis="table",
        rows=2,
        width=2,
        name="row",
        optimizer=optimizer,
        init=lambda key, shape: np.full(shape, weight, np.float32),
    )

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        return (rows["row"] * batch["gradient"]).sum()

    step = train_step({"row": table}, loss_fn, optax.sgd(1.0), ids_of=lambda batch: {"row": batch["id"]}, **options)
    with step:
        state = step.init({}, jax.random.key(0))
        for gradient in gradients:
            state, _ = step(state, {"id": np.array([1], np.int32), "gradient": F32(gradient)})
        weights, arrays = table.to_arrays(step.flush(state).tables["row"])
    assert weights[0].tolist() == [weight, weight]
    return weights[1].tolist(), float(arrays["accumulator"][1])


def test_weight_decay_is_decoupled():
    """w = 2 * (1 - 1 * 0.5) - 1 / sqrt(4) * 2: the decay is no part of the gradient."""
    decayed = RowwiseAdagrad(learning_rate=1.0, eps=0.0, weight_decay=0.5)
    assert one_row(decayed, 2.0, [2.0], staleness=0) == ([0.0, 0.0], 4.0)


def test_eps_is_added_outside_of_the_root():
    weights, state = one_row(RowwiseAdagrad(learning_rate=1.0, eps=1.0), 0.0, [2.0], staleness=1)
    assert state == 4.0
    np.testing.assert_allclose(weights, -2 / 3, rtol=1e-6)


def test_half_life_halves_an_accumulator_after_so_many_steps():
    optimizer = RowwiseAdagrad(learning_rate=0.0, half_life=3, initial_accumulator=8.0)
    # Gradients so small that they add nothing to it, but the row counts as touched.
    _, state = one_row(optimizer, 1.0, [1e-9] * 3, staleness=0)
    assert state == pytest.approx(4.0, rel=1e-6)


# ---- optimizers of one's own ----


class WarmingUp:
    """Row-wise Adagrad with a rate that grows over a row's first updates, and a state of its own beside the rule's."""

    def init(self, rows: int) -> dict[str, Any]:
        return {"accumulator": np.zeros(rows, np.float32), "updates_seen": np.zeros(rows, np.int32)}

    def update_start(self, weights: Any, state: dict[str, Any], step: Any, gate: Any, handle: Any) -> Any:
        rate = jnp.minimum((step + 1) * 0.125, 0.5)
        weights, accumulator, pin = global_ops.rowwise_adagrad_update_start(
            weights, state["accumulator"], gate, handle, learning_rate=rate, eps=1e-8, decay_factor=1.0
        )
        return weights, {"accumulator": accumulator, "updates_seen": state["updates_seen"] + 1}, pin


def test_an_optimizer_of_ones_own_trains_and_is_in_the_snapshot():
    batches = training.make_batches(6)

    def options(staged: int, applied: int) -> dict[str, Any]:
        return {"learning_rate": min((staged + 1) * 0.125, 0.5), "eps": 1e-8, "decay_factor": 1.0}

    with training.make_step(2, 1, tables={"optimizer": WarmingUp()}) as step:
        state = training.start(step)
        rehearsal = Rehearsal(training.arrays_of(step, state), 1, options=options)
        state, _ = training.run(step, state, batches[:3])
        snapshot = step.snapshot(state)
        assert snapshot["tables"]["users"]["optimizer"]["updates_seen"].tolist() == [3] * 31
        state, _ = training.run(step, step.restore(snapshot), batches[3:])
        for batch in batches:
            rehearsal.step(batch)
        rehearsal.assert_state(step, state)


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.1), RowwiseAdagrad, None, "adagrad"], ids=["optax", "class", "none", "string"]
)
def test_what_is_no_row_optimizer_is_refused(optimizer):
    with pytest.raises(
        ContextError, match=r"'users': optimizer=.* must be an instance with init and update_start"
    ) as e:
        AsyncEmbedding(mesh_of(1), table_axis="table", rows=3, width=2, name="users", optimizer=optimizer)
    assert "RowwiseAdagrad(learning_rate=0.05)" in str(e.value)
    assert "An optax optimizer is for the dense parameters: give it to train_step" in str(e.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate=-0.1 must be a finite number at least 0"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1' must be a finite number"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be a finite number"),
        ({"eps": -1e-8}, "eps=-1e-08 must be a finite number at least 0"),
        ({"half_life": 0}, "half_life=0 must be a finite number above 0"),
        ({"half_life": math.inf}, "half_life=inf must be a finite number above 0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be a finite number above 0"),
        ({"initial_accumulator": -1}, "initial_accumulator=-1 must be"),
        ({"rounding": "up"}, "rounding='up' must be 'nearest' or 'stochastic'"),
        ({"seed": -1}, r"seed=-1 must be an integer in \[0, 2\^32\)"),
        ({"seed": 2**32}, r"seed=4294967296 must be an integer in"),
        ({"seed": 0.5}, r"seed=0.5 must be an integer in"),
        ({"lazy": 1}, "lazy=1 must be True or False"),
    ],
    ids=lambda x: "-".join(map(str, *x.items())) if isinstance(x, dict) else "",
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ContextError, match=message):
        RowwiseAdagrad(**({"learning_rate": 0.1} | settings))


def test_gradients_of_a_batch_sum_up_before_the_rule_sees_them():
    """Two occurrences of a row: w = -1, state 4, not two updates one after the other."""
    table = AsyncEmbedding(
        mesh_of(2),
        table_axis="table",
        rows=3,
        width=2,
        name="row",
        optimizer=RowwiseAdagrad(learning_rate=1.0, eps=0.0),
        init=lambda key, shape: np.zeros(shape, np.float32),
    )
    step = train_step(
        {"row": table},
        lambda params, rows, batch: rows["row"].sum(),
        optax.sgd(1.0),
        ids_of=lambda batch: {"row": batch},
        staleness=0,
    )
    with step:
        state, _ = step(step.init({}, jax.random.key(0)), np.array([1, 1], np.int32))
        weights, arrays = table.to_arrays(state.tables["row"])
    assert_same_bits(weights, np.array([[0, 0], [-1, -1], [0, 0]], np.float32))
    assert arrays["accumulator"].tolist() == [0, 4, 0]
