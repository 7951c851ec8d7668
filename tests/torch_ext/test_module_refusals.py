"""What ``AsyncEmbedding`` of torch refuses or warns of, in words that say what to do, before anything has changed."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from torch_ext import AsyncEmbedding, ContextError, ContextWarning, PipelineError, RowwiseAdagrad, ThreadRanks

IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])
LAZY = RowwiseAdagrad(learning_rate=0.1, half_life=5, lazy=True)


def make(**options) -> AsyncEmbedding:
    options = {"name": "table", "optimizer": RowwiseAdagrad(learning_rate=0.1)} | options
    return AsyncEmbedding(6, 4, **options)


def train_once(table: AsyncEmbedding) -> None:
    table(IDS).sum().backward()
    table.step()


def bits_of(state) -> dict[str, bytes]:
    return {key: tensor.numpy().tobytes() for key, tensor in state.items()}


# ---- states


def staged_state() -> dict[str, torch.Tensor]:
    with make(optimizer=LAZY, staleness=1) as table:
        train_once(table)
        train_once(table)
        return table.state_dict()


def with_value(key: str, value: int, at: int | None = None):
    def change(state):
        changed = state[key].clone()
        changed[... if at is None else at] = value
        return state | {key: changed}

    return change


IMPOSSIBLE = {
    "a staged id beyond the table": (with_value("staged_ids", 6, 3), r"1 ids outside .* \[0, 6\): 6 at position 3"),
    "a staged id below -1": (with_value("staged_ids", -2, 0), "-2 at position 0 is the first"),
    "a negative step": (with_value("step", -3), r"step=-3 must be in \[0, 2\^31\)"),
    "rows of the future": (with_value("last_step", 9, 4), "last_step of row 4 is 9, outside of the 1 updates"),
    "a negative last_step": (with_value("last_step", -1, 0), "last_step of row 0 is -1"),
    "half of what is staged": (
        lambda state: {key: x for key, x in state.items() if key != "staged_grads"},
        "staged_ids, staged_apply, but no staged_grads",
    ),
    "a step that is none": (lambda s: s | {"step": torch.tensor(1.5)}, "step is float32, but must be of an integer"),
    "staged before the first step": (
        lambda s: s | {"step": torch.tensor(0), "last_step": s["last_step"] * 0},
        "staged before the first step",
    ),
    "NumPy arrays": (lambda s: s | {"weight": s["weight"].numpy()}, "weight is a ndarray, but must be a torch.Tensor"),
    "gradients of another dtype": (
        lambda s: s | {"staged_grads": s["staged_grads"].double()},
        r"staged_grads is float64\[6, 4\], but the table needs float32\[6, 4\]",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_state_that_cannot_have_been_is_refused_and_nothing_changes(case):
    change, message = IMPOSSIBLE[case]
    state = staged_state()
    table = make(optimizer=LAZY, staleness=1, seed=3)
    table.load_state_dict(state)
    before = bits_of(table.state_dict())
    with pytest.raises(RuntimeError, match=message):
        table.load_state_dict(change(state), strict=False)
    assert bits_of(table.state_dict()) == before, "also what is staged"
    table.flush()
    table.close()


def test_staged_gradients_are_refused_by_a_table_that_would_never_apply_them():
    state = staged_state()
    table = make(optimizer=LAZY)
    with pytest.raises(RuntimeError, match=r"gradients of 6 ids staged, which staleness=0 never applies"):
        table.load_state_dict(state)
    with pytest.raises(ContextError, match=r"which staleness=0 never applies"):
        table.load_arrays({key: tensor.numpy() for key, tensor in state.items()})


@pytest.mark.parametrize("change", [lambda s: s.pop("step"), lambda s: s.update(bias=torch.ones(1))])
def test_a_strict_load_that_raises_has_changed_nothing(change):
    table, other = make(), make(seed=5)
    state = dict(other.state_dict())
    change(state)
    before = bits_of(table.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        table.load_state_dict(state)
    assert bits_of(table.state_dict()) == before
    table.load_state_dict(state, strict=False)
    assert torch.equal(table.weight, other.weight)


def test_a_state_that_one_rank_refuses_is_taken_by_none():
    state = make().state_dict()

    def work(ranks):
        table = make(ranks=ranks, seed=3)
        before = bits_of(table.state_dict())
        given = state if ranks.rank == 0 else state | {"step": torch.tensor(-1)}
        with pytest.raises(RuntimeError, match="step=-1 must be") as caught:
            table.load_state_dict(given)
        assert bits_of(table.state_dict()) == before
        return str(caught.value)

    first, second = ThreadRanks(2).run(work)
    assert "rank 1 cannot load its state" in first
    assert "rank 1 cannot" not in second


# ---- what would be lost


def test_a_step_that_was_forgotten_is_told():
    with make() as table:
        table(IDS).sum().backward()
        with pytest.warns(ContextWarning, match=r"gradient rows of lookup 1, but no step\(\) took them"):
            table(IDS)
        table(IDS).sum().backward()
        table.step()
    table = make()
    table(IDS).sum().backward()
    with pytest.warns(ContextWarning, match="lookup 1, but no step"):
        table.__exit__(None, None, None)


def test_staged_gradients_that_a_state_dict_has_are_not_lost():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ContextWarning)
        for take in (AsyncEmbedding.state_dict, AsyncEmbedding.to_arrays):
            with make(staleness=1) as table:
                train_once(table)
                take(table)
    table = make(staleness=1)
    train_once(table)
    table.state_dict()
    train_once(table)  # which the state_dict does not have
    with pytest.warns(ContextWarning, match="gradients of step 1 were staged"):
        table.__exit__(None, None, None)


# ---- arguments


def test_every_problem_of_the_module_and_its_table_is_listed_at_once():
    with pytest.raises(ContextError) as caught:
        AsyncEmbedding(
            0, 4, name="table", optimizer=LAZY, staleness=2, gradient_scale=float("nan"), seed=-1, sync_errors="no"
        )
    for part in ("rows=0", "staleness=2", "gradient_scale=nan", "seed=-1", "sync_errors='no'"):
        assert any(part in problem for problem in caught.value.problems), part


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("eps", 1e-8, 1e-6), ("lazy", False, True), ("half_life", None, 5.0), ("max_grad_norm", None, 1.0)],
)
def test_optimizers_that_differ_between_ranks_are_refused_by_field_rank_and_value(name, one, other):
    def work(ranks):
        settings = {"learning_rate": 0.1, name: other if ranks.rank == 2 else one}
        with pytest.raises(ContextError) as caught:
            train_once(make(ranks=ranks, optimizer=RowwiseAdagrad(**settings)))
        return str(caught.value)

    told = (
        f"async_emb context 'table': optimizer.{name} differs between ranks: {str(one)!r} in rank 0, rank 1, "
        f"{str(other)!r} in rank 2"
    )
    assert ThreadRanks(3).run(work) == [told] * 3


def test_schedules_of_the_table_that_differ_between_ranks_are_refused():
    def work(ranks):
        with pytest.raises(ContextError, match="staleness differs between ranks: 0 in rank 0, 1 in rank 1"):
            train_once(make(ranks=ranks, staleness=ranks.rank))

    ThreadRanks(2).run(work)


# ---- places where a table cannot be used


@pytest.mark.parametrize("call", [lambda t: t(IDS), lambda t: t.lookup(IDS), AsyncEmbedding.state_dict])
def test_a_fork_is_refused_at_once_with_advice(call, monkeypatch):
    with make() as table:
        train_once(table)
        table.finish()
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)  # what a forked worker sees
        with pytest.raises(PipelineError, match=rf"was made in process {own}, and is used in process") as caught:
            call(table)
        assert "Workers of a DataLoader should give ids" in caught.value.__notes__[0]
        monkeypatch.undo()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_module_is_refused_with_the_route(reentrant):
    with make() as table:
        weight = torch.ones(4, requires_grad=True)
        run = lambda weight: (table(IDS) * weight).sin().sum()  # noqa: E731
        loss = torch.utils.checkpoint.checkpoint(run, weight, use_reentrant=reentrant)
        with pytest.raises(PipelineError, match=r"inside of backward.*outside of torch\.utils\.checkpoint"):
            loss.backward()
    with make() as table:
        rows = table(IDS)
        run = lambda rows: (rows * weight).sin().sum()  # noqa: E731
        torch.utils.checkpoint.checkpoint(run, rows, use_reentrant=reentrant).backward()
        table.step()
        assert table.finish().valid


@pytest.mark.parametrize("ranks", [1, 3])  # of three, the rows have padding
def test_rows_may_be_changed_in_place(ranks):
    def work(rank, in_place):
        with make(ranks=rank) as table:
            rows = table(IDS)
            changed = rows.mul_(3) if in_place else rows * 3
            changed.square().sum().backward()
            table.step()
            return table.state_dict()["weight"]

    wanted, got = (ThreadRanks(ranks).run(lambda rank, way=way: work(rank, way))[0] for way in (False, True))
    np.testing.assert_array_equal(got.numpy(), wanted.numpy())
