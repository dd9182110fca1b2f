import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.workloads.petnames.alphabet import decode
from ddptrain.workloads.petnames.data import make_rows, plan_epoch
from ddptrain.workloads.petnames.names import load_names
from ddptrain.workloads.petnames.params import PetnamesParams

CPU = torch.device("cpu")
NAMES = load_names(PetnamesParams()).names[::20]


def test_windows_hold_the_symbols_before_each_character_and_the_stop() -> None:
    rows = make_rows(["ada"], "window", 3, CPU)
    assert [decode(row) for row in rows.symbols.tolist()] == ["***a", "**ad", "*ada", "ada+"]
    assert rows.lengths.tolist() == [3, 3, 3, 3]


def test_names_are_padded_and_padding_is_no_target() -> None:
    rows = make_rows(["ada", "bo"], "full", 8, CPU)
    assert [decode(row) for row in rows.symbols.tolist()] == ["*ada+", "*bo+*"]
    assert rows.n_targets.tolist() == [4, 3]


def test_rows_are_bytes() -> None:
    assert make_rows(NAMES, "window", 8, CPU).symbols.dtype == torch.uint8


def test_a_batch_is_cut_to_its_longest_row() -> None:
    names = make_rows(["ada", "bo"], "full", 8, CPU)
    inputs, targets = names.batch(torch.tensor([1]))
    assert (decode(inputs[0].tolist()), decode(targets[0].tolist())) == ("*bo", "bo+")
    windows = make_rows(["ada"], "window", 8, CPU)
    inputs, targets = windows.batch(torch.tensor([0, 2]))
    assert [decode(row) for row in inputs.tolist()] == ["********", "******ad"] and decode(
        targets[:, 0].tolist()
    ) == "aa"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["window", "full"]),
    st.integers(1, len(NAMES)),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_ranks_take_every_row_once_in_as_many_steps(
    context: str, n_names: int, batch_size: int, world_size: int, epoch: int
) -> None:
    rows = make_rows(NAMES[:n_names], context, 8, CPU)
    plans = [plan_epoch(rows, batch_size, world_size, rank, 0, epoch) for rank in range(world_size)]
    taken = [row for plan in plans for share in plan for row in share.index.tolist()]
    assert sorted(taken) == list(range(len(rows)))
    for shares in zip(*plans, strict=True):
        sizes = [len(share.index) for share in shares]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size
        targets = sum(int(rows.n_targets[share.index].sum()) for share in shares)
        assert {share.total for share in shares} == {targets}


@pytest.mark.parametrize("context", ["window", "full"])
def test_other_ranks_go_on_with_the_rows_that_were_not_taken(context: str) -> None:
    rows = make_rows(NAMES, context, 8, CPU)
    taken: list[list[int]] = []
    seen: list[int] = []
    for world_size, steps in ((3, 2), (2, 3), (2, 1), (4, None)):
        plans = [plan_epoch(rows, 3, world_size, rank, 0, 1, taken) for rank in range(world_size)]
        seen += [row for plan in plans for share in plan[:steps] for row in share.index.tolist()]
        taken.append([world_size, steps or 0])
    assert sorted(seen) == list(range(len(rows)))
    assert plan_epoch(rows, 3, 2, 0, 0, 1, [[1, len(rows)]]) == []


@pytest.mark.parametrize("context", ["window", "full"])
def test_the_order_is_another_in_each_epoch_and_the_same_for_a_seed(context: str) -> None:
    rows = make_rows(NAMES, context, 8, CPU)

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [share.index.tolist() for share in plan_epoch(rows, 10, 2, 0, seed, epoch)]

    assert order(1, 1) == order(1, 1)
    assert order(1, 1) != order(1, 2)
    assert order(1, 1) != order(2, 1)


def test_plan_of_an_epoch_stays_as_runs_that_are_resumed_have_begun_it() -> None:
    rows = make_rows([chr(97 + n) * (1 + n % 5) for n in range(20)], "full", 8, CPU)
    (order,) = zip(*(share.index.tolist() for share in plan_epoch(rows, 1, 1, 0, 2, 3)), strict=True)
    assert order == (19, 3, 0, 4, 9, 12, 16, 14, 5, 17, 11, 15, 2, 8, 13, 6, 1, 18, 7, 10)


def test_batches_of_names_need_little_padding() -> None:
    names = load_names(PetnamesParams()).names
    rows = make_rows(names, "full", 8, CPU)
    read = sum(rows.batch(share.index)[0].numel() for share in plan_epoch(rows, 64, 1, 0, 0, 1))
    assert read < 1.3 * int(rows.n_targets.sum())
