"""Where the dense compute lies among the calls: between the starts and the dones, on every device, under jit and scan.

The order of recorded events is compared, never their times. A second test looks at the compiled program, where a run
that came out right by luck would show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jax_bridge import order, runtime, with_next

from . import _two_tables as two
from ._hlo import Computation, computations
from ._programs import mesh_of

DEVICES = 4
STEPS = 6


def marking(mesh: Any) -> two.LossFunction:
    """The loss, with an event where its forward begins and ends on a device, and where its backward does."""

    def event(x: Any, label: str) -> Any:
        return order.mark(x, label, mesh=mesh, spec=P(mesh.axis_names))

    def marked(place: str) -> Callable[[Any], Any]:
        @jax.custom_vjp
        def identity(x: Any) -> Any:
            return event(x, f"forward, {place}")

        identity.defvjp(lambda x: (identity(x), None), lambda _, g: (event(g, f"backward, {place}"),))
        return identity

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        rows = {name: marked(f"rows of {name}")(x) for name, x in rows.items()}
        return marked("losses")(two.losses_of(params, rows, batch)).mean()

    return loss_fn


def run_jitted(step: Any, batches: Any) -> None:
    state = step.init(two.make_params(), jax.random.key(0))
    for batch, upcoming in with_next(batches):
        state, _ = step(state, batch, upcoming)
    step.flush(state)


def run_scanned(step: Any, batches: Any) -> None:
    state = step.init(two.make_params(), jax.random.key(0))
    out = two.scanned(step)(state, two.stacked(batches), two.next_ids_of(batches))
    jax.block_until_ready(out)


@pytest.fixture
def mesh():
    return mesh_of(DEVICES)


@pytest.fixture
def step(mesh):
    with two.make_step(mesh, marking(mesh), staleness=1) as step:
        yield step


def positions(events: list[runtime.TimelineEvent], device: int) -> dict[tuple[str, str], list[int]]:
    """When each event happened on a device, by event and table, once for each step: as positions in the recording."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, event in enumerate(events):
        if event.device == device:
            found[event.name, event.table].append(position)
    return found


@pytest.mark.parametrize("run", [run_jitted, run_scanned])
def test_on_every_device_the_dense_part_lies_between_start_and_done(mesh, step, run):
    runtime.start_timeline()
    run(step, two.make_batches(STEPS))
    events = runtime.stop_timeline()

    lent_early = []
    for device in (device.id for device in mesh.devices.flat):
        at = positions(events, device)
        rows = [f"rows of {name}" for name in two.NAMES]
        for k in range(STEPS):
            forward_begins = min(at[f"forward, {place}", ""][k] for place in rows)
            forward_ends = at["forward, losses", ""][k]
            backward_begins = at["backward, losses", ""][k]
            backward_ends = max(at[f"backward, {place}", ""][k] for place in rows)
            assert forward_begins < forward_ends < backward_begins < backward_ends
            for name in two.NAMES:
                assert at["lookup_done", name][k] < at["update_begin", name][k]
                assert at["update_begin", name][k] < forward_begins, (device, k)
                # The first lookup was started before the first step.
                assert forward_ends < at["lookup_begin", name][k + 1] < backward_begins, (device, k)
                assert backward_ends < at["update_done", name][k] < at["stage_update", name][k], (device, k)
                # The rows are read in a table that has the update.
                assert at["update_ready", name][k] < at["lookup_lease", name][k + 1], (device, k)
                # The work itself begins with the leases. Nothing waits for them, but XLA issues them without delay.
                lent_early.append(at["update_lease", name][k] < forward_ends)
                lent_early.append(at["lookup_lease", name][k + 1] < backward_ends)
    assert sum(lent_early) >= 0.9 * len(lent_early)


def order_in_data(text: str) -> dict[str, bool]:
    """Which of the schedule's edges the compiled program has, for both tables, and that dense compute waits for no
    table that is lent."""

    def calls(step: Computation, target: str, label: str = "") -> list[str]:
        found = step.find(lambda i: i.calls(f"async_emb_{target}") and label in i.text)
        assert found, (target, label)
        return found

    def all_wait(later: list[str], earlier: list[str]) -> bool:
        return all(step.waits_for(a, b) for a in later for b in earlier)

    (step,) = [c for c in computations(text) if c.find(lambda i: i.calls("async_emb_stage_update"))]
    rows_forward, losses_forward = calls(step, "mark", "forward, rows"), calls(step, "mark", "forward, losses")
    rows_backward, losses_backward = calls(step, "mark", "backward, rows"), calls(step, "mark", "backward, losses")
    starts, dones = calls(step, "update_begin"), calls(step, "update_done")
    leases = calls(step, "update_lease") + calls(step, "lookup_lease_beside_update")
    dense = rows_forward + losses_forward + rows_backward + losses_backward
    assert not any(step.waits_for(a, b) for a in dense for b in leases)
    lookups, stages = calls(step, "lookup_begin_beside_update"), calls(step, "stage_update")
    return {
        "forward after update_start": all_wait(rows_forward, starts),
        "lookup_start after forward": all_wait(lookups, losses_forward),
        "backward after lookup_start": all_wait(losses_backward, lookups),
        "update_done after backward": all_wait(dones, rows_backward),
        "stage_update after update_done": all_wait(stages, dones),
    }


def compiled_jitted(step: Any) -> str:
    batch = two.make_batches(1)[0]
    program = step.program_for(batch)
    state = step.init(two.make_params(), jax.random.key(0))
    ids = two.ids_of(batch)
    return jax.jit(program.stale, donate_argnums=0).lower(state, batch, ids, ids).compile().as_text()


def compiled_scanned(step: Any) -> str:
    batches = two.make_batches(3)
    state = step.init(two.make_params(), jax.random.key(0))
    return two.scanned(step).lower(state, two.stacked(batches), two.next_ids_of(batches)).compile().as_text()


@pytest.mark.parametrize("compiled", [compiled_jitted, compiled_scanned])
def test_data_alone_gives_the_order(step, compiled):
    assert all(order_in_data(compiled(step)).values())


def test_without_depend_the_order_is_gone(step, monkeypatch):
    """What the tests above would miss if `depend` became an identity that the compiler sees through."""
    monkeypatch.setattr(order, "_depend_leaf", lambda x, pin: x)
    assert order_in_data(compiled_jitted(step)) == {
        "forward after update_start": False,
        "lookup_start after forward": False,
        "backward after lookup_start": False,
        "update_done after backward": False,
        "stage_update after update_done": True,
    }


@pytest.mark.parametrize("compiled", [compiled_jitted, compiled_scanned])
def test_no_lease_reads_a_buffer_that_the_dense_compute_may_be_given(step, compiled):
    """A lease ends with the work on the side. XLA lets whatever reuses a buffer wait for the calls that read it, so
    dense compute in the buffer of a pin that a lease reads would not overlap with that work."""
    text = compiled(step)
    (calls,) = [c for c in computations(text) if c.find(lambda i: i.calls("async_emb_stage_update"))]
    leases = calls.find(lambda i: "_lease" in i.text and i.opcode == "custom-call")
    assert len(leases) == 4
    kept = {"constant", "parameter"}  # buffers that live as long as the program, or as the loop around it

    def is_lent(name: str) -> bool:
        return calls.instructions[name].opcode in ("custom-call", "get-tuple-element")

    for lease in leases:
        *lent, last = calls.instructions[lease].operands
        assert all(is_lent(name) for name in lent)
        if calls.instructions[lease].calls("async_emb_lookup_lease_beside_update"):
            # A pin that the lease hands on, to the end of the step.
            assert "output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}" in calls.instructions[lease].text
            assert is_lent(last)
        else:
            assert calls.instructions[last].opcode in kept
