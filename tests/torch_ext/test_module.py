"""``AsyncEmbedding`` of torch: what a loop sees beside the bits, which tests/both_faces compares."""

from __future__ import annotations

import copy
import gc
import threading

import numpy as np
import pytest
import torch

import torch_ext
from torch_ext import (
    AsyncEmbedding,
    ContextError,
    ContextWarning,
    FailedContextError,
    IdError,
    PipelineError,
    RowwiseAdagrad,
    ThreadRanks,
)

IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])


def make(width: int = 4, **options) -> AsyncEmbedding:
    options = {"name": "table", "optimizer": RowwiseAdagrad(learning_rate=0.1)} | options
    return AsyncEmbedding(6, width, **options)


def train_once(table: AsyncEmbedding, ids: torch.Tensor = IDS) -> None:
    table(ids).sum().backward()
    table.step()


def on_ranks(size: int, function) -> list:
    return ThreadRanks(size).run(function)


# ---- the graph


def test_rows_have_the_shape_of_the_ids_and_are_in_the_graph():
    with make() as table:
        rows = table(IDS)
        assert rows.shape == (2, 3, 4)
        assert rows.requires_grad
        assert torch.equal(rows, table.weight[IDS])


def test_no_parameter_and_no_buffer_belongs_to_the_table():
    with make() as table:
        assert list(table.parameters()) == list(table.buffers()) == []


def test_backward_changes_nothing_and_step_changes_the_rows_that_were_looked_up():
    with make() as table:
        before = table.weight.clone()
        table(IDS).sum().backward()
        assert torch.equal(table.weight, before)
        table.step()
        changed = (table.weight != before).any(1)
        assert changed.tolist() == [True, True, True, False, False, True]
        assert table.finish() == torch_ext.UpdateReport(norm=pytest.approx(40**0.5), valid=True, pending=True)


def test_pieces_of_a_batch_bring_their_gradients_one_after_the_other():
    weights = []
    for pieces in (1, 3):
        with make() as table:
            rows = table(torch.arange(6))
            for piece in rows.chunk(pieces):
                (piece * piece).sum().backward()
            table.step()
            weights.append(table.weight.clone())
    assert torch.equal(*weights)


def test_the_gradient_of_the_dense_part_is_that_of_an_ordinary_embedding():
    dense = torch.nn.Linear(4, 1)
    with make() as table:
        plain = torch.nn.Embedding.from_pretrained(table.weight.clone())
        wanted = torch.autograd.grad(dense(plain(IDS)).square().sum(), dense.weight)[0]
        dense(table(IDS)).square().sum().backward()
        assert torch.equal(dense.weight.grad, wanted)
        table.step()


def test_evaluation_trains_nothing_and_takes_any_number_of_ids():
    with make() as table:
        train_once(table)
        for ids in (torch.zeros(0, dtype=torch.int64), torch.tensor(3), torch.arange(6), IDS.to(torch.int16)):
            rows = table.eval()(ids)
            assert not rows.requires_grad
            assert torch.equal(rows, table.weight[ids.long()])
        with torch.no_grad():
            assert not table.train()(IDS).requires_grad
        assert table.stats()["lookups"] == 1, "the context that trains has not seen the others"


def test_evaluation_between_forward_and_step_does_not_disturb_the_step():
    weights = []
    for evaluates in (False, True):
        with make(staleness=1) as table:
            for _ in range(3):
                rows = table(IDS)
                if evaluates:
                    table.lookup(torch.arange(6))
                (rows * 2).sum().backward()
                table.step()
            table.flush()
            weights.append(table.weight.clone())
    assert torch.equal(*weights)


def test_a_compiled_model_may_use_the_module_with_a_break_of_the_graph():
    dense = torch.nn.Linear(4, 1)
    with make() as table:
        model = torch.compile(lambda ids: dense(table(ids)).sum(), backend="eager")
        model(IDS).backward()
        table.step()
        assert table.finish().valid


# ---- calls that do not fit


def test_step_without_gradient_rows_is_refused_and_costs_nothing():
    with make() as table:
        with pytest.raises(PipelineError, match="step\\(\\) found no gradient rows"):
            table.step()
        loss = table(IDS).sum()
        with pytest.raises(PipelineError, match="found no gradient rows"):
            table.step()
        loss.backward()
        table.step()
        with pytest.raises(PipelineError, match="found no gradient rows"):
            table.step()
        assert table.stats()["updates"] == 1


def test_backward_on_rows_of_an_earlier_lookup_is_refused():
    with make() as table:
        both = table(IDS), table(IDS + 0)
        with pytest.raises(PipelineError, match=r"backward has reached rows of a lookup that is over.*torch\.cat"):
            sum(both).sum().backward()
        table.step(apply=False)


def test_rows_that_were_announced_are_those_that_are_wanted():
    with make(staleness=1) as table:
        train_once(table)
        table.prefetch(IDS)
        with pytest.raises(PipelineError, match="6 ids were looked up in advance, but rows of 2 are wanted"):
            table(IDS[0, :2])
        with pytest.raises(PipelineError, match=r"token_ids of another batch.*row 1 at position 0"):
            table(IDS.flip(1))
        train_once(table)  # what was armed and staged is dropped, and the table works
        table.flush()


def test_prefetch_is_for_staleness_1():
    with make() as table, pytest.raises(PipelineError, match="prefetch needs staleness=1"):
        table.prefetch(IDS)


def test_raw_calls_in_a_wrong_order_are_refused_by_name():
    with make() as module:
        table = module.table
        for call in (table.lookup_done, table.update_start, table.update_done):
            with pytest.raises(PipelineError, match=f"'table': {call.__name__} has nothing to work on"):
                call()
        with pytest.raises(PipelineError, match="stage_update has nothing to work on; call lookup_done first"):
            table.stage_update(torch.zeros(6, 4))
        table.lookup_start(IDS)
        table.lookup_start(IDS)  # refused by the context, which says so at the next call
        with pytest.raises(PipelineError, match="lookup_start of step 2 came before lookup_done of step 1"):
            module.check()
        train_once(module)


def test_raw_calls_train_as_the_module_does():
    weights = []
    with make() as module:
        train_once(module)
        weights.append(module.weight.clone())
    with make() as module:
        table = module.table
        table.lookup_start(IDS)
        assert torch.equal(table.lookup_done(IDS).reshape(2, 3, 4), module.weight[IDS])
        table.stage_update(torch.ones(6, 4))
        table.update_start()
        assert table.update_done().valid
        weights.append(module.weight.clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.ones(3), "token ids are float32, but must be integers"),
        (torch.tensor([True]), "token ids are bool"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "token ids are on meta"),
    ],
)
def test_ids_that_are_none_are_refused(ids, message):
    with make() as table, pytest.raises(IdError, match=message):
        table(ids)


def test_no_ids_at_all_are_refused_with_advice():
    with make() as table, pytest.raises(ContextError, match=r"no token ids on rank 0.*fill up with padding_id"):
        table(torch.zeros(0, dtype=torch.int64))


def test_transformations_name_the_module():
    with make() as table, pytest.raises(IdError, match=r"AsyncEmbedding was called inside of torch\.func"):
        torch.func.vmap(table)(IDS)


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.double, lambda m: m.to("meta")])
def test_a_table_stays_where_and_what_it_is(change):
    model = torch.nn.Sequential(make())
    with pytest.raises(ContextError, match="a table is made on the CPU in its dtype and stays there"):
        change(model)
    model.float()  # which it is


def test_a_module_is_not_copied():
    with pytest.raises(PipelineError, match="save its state_dict"):
        copy.deepcopy(make())


def test_every_problem_of_a_configuration_is_listed():
    with pytest.raises(ContextError) as caught:
        AsyncEmbedding(
            0,
            2.5,
            name="",
            optimizer=torch.optim.SGD,
            dtype=torch.float64,
            id_policy="Error",
            padding_id=2**40,
            num_unique=0,
        )
    problems = "\n".join(caught.value.problems)
    for part in (
        "rows=0 must be an integer in [1, 2^31)",
        "width=2.5 must be an integer in [1, 2^20]",
        "must be a row optimizer",
        "dtype=torch.float64 is not supported",
        "id_policy='Error' is not one of",
        "name='' must be one line",
        "does not fit int32",
        "num_unique=0 must be an integer",
    ):
        assert part in problems
    with pytest.raises(ContextError, match="staleness=2 must be 0 or 1"):
        make(staleness=2)
    with pytest.raises(ContextError, match="is all of them; give the one that this thread is"):
        make(ranks=ThreadRanks(2))


def test_two_tables_at_work_need_two_names():
    with make() as one:
        train_once(one)
        with pytest.raises(ContextError, match="another AsyncEmbedding at work in this process has this name"):
            train_once(make())
    train_once(make())
    gc.collect()  # one that nobody has closed gives its name back when it goes away
    with make() as another:
        train_once(another)


# ---- what steps leave to say


def test_bad_ids_are_told_by_the_next_call_and_the_step_was_done():
    with make() as table:
        rows = table(torch.tensor([1, 9]))
        assert torch.equal(rows[1], torch.zeros(4))
        rows.sum().backward()
        table.step()
        with pytest.raises(
            IdError, match=r"token id 9 at position 1 of lookup step 1 is outside .* \[0, 6\)"
        ) as caught:
            table(IDS)
        assert "It was dropped" in caught.value.__notes__[0]
        assert table.finish().valid
        train_once(table)


def test_sync_errors_tells_at_once():
    with make(sync_errors=True) as table:
        table(torch.tensor([-3])).sum().backward()
        with pytest.raises(IdError, match="token id -3 at position 0"):
            table.step()
        train_once(table)


def test_a_lookup_for_evaluation_tells_of_its_own_ids():
    with make() as table:
        with pytest.raises(IdError, match="token id 6 at position 1"):
            table.lookup([0, 6])
        assert table.lookup([0, 5]).shape == (2, 4)


def test_a_block_that_ends_with_gradients_staged_warns():
    table = make(staleness=1)
    with pytest.warns(ContextWarning, match="gradients of step 0 were staged: that update is lost"), table:
        train_once(table)


def test_a_closed_table_opens_again():
    table = make()
    train_once(table)
    table.close()
    assert table.stats() == {}
    train_once(table)
    table.close()


# ---- threads as ranks


def test_a_rank_that_raises_ends_the_others_with_its_words():
    seen = []

    def work(ranks):
        with make(ranks=ranks) as table:
            try:
                train_once(table)
                if ranks.rank == 1:
                    raise ValueError("the data are gone")
                for _ in range(2):
                    train_once(table)
            except FailedContextError as error:
                seen.append(str(error))
                raise

    with pytest.raises(ValueError, match="the data are gone") as caught:
        on_ranks(3, work)
    assert "On rank 1 of 3." in caught.value.__notes__
    assert len(seen) == 2
    assert all("rank 1 left its block with ValueError: the data are gone" in text for text in seen)


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setenv("ASYNC_EMB_TIMEOUT_SECONDS", "0.5")

    def work(ranks):
        table = make(ranks=ranks)
        train_once(table)
        table.finish()
        if ranks.rank == 1:
            return None
        with pytest.raises(FailedContextError) as caught:
            table(IDS)
        table.close()  # the caller knows
        return str(caught.value)

    told = on_ranks(2, work)[0]
    assert "timed out after 0.5 s in lookup_start of step 2: missing rank 1" in told


def test_ranks_that_mean_different_tables_are_told_which_field(monkeypatch):
    def work(ranks):
        table = make(ranks=ranks, padding_id=None if ranks.rank == 0 else 3)
        with pytest.raises(ContextError) as caught:
            table(IDS if ranks.rank < 2 else IDS[0])
        return caught.value.problems

    problems = on_ranks(3, work)
    assert problems[0] == problems[1] == problems[2]
    assert problems[0] == (
        "async_emb context 'table': tokens_per_rank differs between ranks: 6 in rank 0, rank 1, 3 in rank 2",
        "async_emb context 'table': num_unique differs between ranks: 18 in rank 0, rank 1, 9 in rank 2",
        "async_emb context 'table': padding_id differs between ranks: None in rank 0, 3 in rank 1, rank 2",
    )


def test_prefetch_waits_for_no_update_and_its_rows_have_it():
    gone_on = threading.Event()

    def work(ranks, prefetches=True):
        with make(ranks=ranks, staleness=1) as table:
            train_once(table)
            if prefetches:
                table.prefetch(IDS)
                if ranks.rank == 1:
                    assert gone_on.wait(60)  # the update of rank 0 cannot end before this rank starts its own
            loss = table(IDS).sum()
            if prefetches:
                table.prefetch(IDS)
            gone_on.set()
            loss.backward()
            table.step()
            rows = table(IDS).detach()
            table.flush()
            return rows, table.weight.clone()

    for got, wanted in zip(on_ranks(2, work), on_ranks(2, lambda ranks: work(ranks, prefetches=False)), strict=True):
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


def test_a_refusal_on_one_rank_is_told_to_all_and_the_table_works_on():
    def go_wrong(table, rank):
        train_once(table)
        table.prefetch(IDS)
        for _ in range(2):  # a rank hears of it in the call that it is in, or in its next
            train_once(table, IDS.flip(0) if rank == 1 else IDS)

    def work(ranks):
        with make(ranks=ranks, staleness=1) as table:
            with pytest.raises(PipelineError, match="token_ids of another batch") as caught:
                go_wrong(table, ranks.rank)
            before = table.state_dict()
            train_once(table)
            table.flush()
            return str(caught.value), before["weight"], table.state_dict()["weight"]

    told, before, after = zip(*on_ranks(2, work), strict=True)
    assert told[0] == told[1]
    assert torch.equal(before[0], before[1])
    assert torch.equal(after[0], after[1])
    assert not torch.equal(before[0], after[0])


def test_another_batch_size_may_follow_while_gradients_are_staged():
    wanted = []
    for size in (1, 2):

        def work(ranks):
            with make(ranks=ranks, staleness=1) as table:
                for count in (8, 4, 8, 2):
                    share = count // ranks.size
                    ids = torch.arange(count) % 5
                    train_once(table, ids[ranks.rank * share : (ranks.rank + 1) * share])
                table.flush()
                return table.to_arrays()["weight"]

        wanted.append(on_ranks(size, work)[0])
    np.testing.assert_array_equal(*wanted)


def test_initial_tables_are_the_same_bits_on_any_number_of_ranks():
    whole = [
        on_ranks(size, lambda ranks: make(width=7, ranks=ranks, seed=3).to_arrays()["weight"])[0] for size in (1, 2, 5)
    ]
    np.testing.assert_array_equal(whole[0], whole[1])
    np.testing.assert_array_equal(whole[0], whole[2])
    assert 0.03 < whole[0].std() < 0.07
    assert not np.array_equal(whole[0], make(width=7, seed=4).to_arrays()["weight"])


# ---- state


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_state_dict_goes_on_to_the_same_bits_on_another_number_of_ranks(staleness, lazy):
    optimizer = RowwiseAdagrad(learning_rate=0.1, half_life=4, weight_decay=0.1, lazy=lazy)
    ids = torch.arange(12).reshape(2, 6) % 5

    def work(saved, steps):
        def on(ranks):
            share = 6 // ranks.size
            with make(width=7, ranks=ranks, staleness=staleness, optimizer=optimizer) as table:
                if saved is not None:
                    table.load_state_dict(saved)
                for step in steps:
                    mine = ids[step % 2, ranks.rank * share : (ranks.rank + 1) * share]
                    (table(mine) * (step + 1)).sum().backward()
                    table.step()
                state = table.state_dict()
                table.flush()
                return state, table.state_dict()

        return on

    _, wanted = on_ranks(3, work(None, range(4)))[0]
    saved, _ = on_ranks(2, work(None, range(2)))[0]
    assert ("staged_ids" in saved) == (staleness == 1)
    _, got = on_ranks(6, work(saved, range(2, 4)))[0]
    assert got.keys() == wanted.keys()
    for key in wanted:
        assert torch.equal(got[key], wanted[key]), key
    assert wanted["weight"].shape == (6, 7)
    assert wanted["step"] == 4


def test_a_state_dict_of_a_model_has_the_table_and_round_trips_through_a_file(tmp_path):
    model = torch.nn.ModuleDict({"users": make(name="users"), "dense": torch.nn.Linear(4, 1)})
    train_once(model["users"])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = torch.nn.ModuleDict({"users": make(name="others", seed=9), "dense": torch.nn.Linear(4, 1)})
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert list(model.state_dict()) == ["users.weight", "users.accumulator", "users.step", "dense.weight", "dense.bias"]
    assert torch.equal(other["users"].weight, model["users"].weight)
    model["users"].close()


def test_the_table_of_an_ordinary_embedding_can_be_loaded():
    plain = torch.nn.Embedding(6, 4)
    table = make()
    with pytest.raises(RuntimeError, match=r'Missing key.*"accumulator", "step"'):
        table.load_state_dict(plain.state_dict())
    table.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(table.weight, plain.weight)
    with pytest.raises(RuntimeError, match=r"weight is float32\[6, 5\], but the table needs \[6, 4\]"):
        table.load_state_dict(torch.nn.Embedding(6, 5).state_dict(), strict=False)


def test_loading_keeps_the_storage():
    with make() as table:
        address = table.weight.data_ptr()
        table.load_arrays({"weight": np.ones((6, 4), np.float32)})
        assert table.weight.data_ptr() == address
        train_once(table)
        table.flush()
        assert table.weight.data_ptr() == address, "updates are in place"
