"""Every sample once an epoch by all ranks together, also after a resume by more or fewer of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddptrain.rank.loader import RankLoader, make_loader
from tests.unit.rank.ranks import Rank

CPU = torch.device("cpu")


def loaders(size: int, ranks: int, batch_size: int = 3, **more: object) -> list[RankLoader]:
    how = {"shuffle": True, "seed": 5, "drop_last": False, **more}
    data = torch.arange(size)
    return [make_loader(data, batch_size, rank, ranks, CPU, **how) for rank in range(ranks)]  # type: ignore[arg-type]


def seen(worker_group: list[RankLoader], steps: int | None = None) -> list[int]:
    """The samples of all ranks, in `steps` steps or to the epoch's end."""
    found: list[int] = []
    for loader in worker_group:
        for number, batch in enumerate(loader, 1):
            found += batch.tolist()
            if number == steps:
                break
    return found


def test_all_ranks_together_see_every_sample_once_in_an_order_of_the_epoch() -> None:
    worker_group = loaders(24, ranks=2)
    first = seen(worker_group)
    assert sorted(first) == list(range(24))
    assert first == seen(loaders(24, ranks=2))
    assert worker_group[0].epoch == 2
    second = seen(worker_group)
    assert sorted(second) == list(range(24)) and second != first


@pytest.mark.parametrize(
    ("size", "drop_last", "each", "different"),
    [(25, False, 13, 25), (25, True, 12, 24), (27, False, 14, 27), (27, True, 12, 24)],
)
def test_ranks_have_equally_many_samples_of_an_odd_number(
    size: int, drop_last: bool, each: int, different: int
) -> None:
    """`drop_last` leaves out the last batches that are not full on every rank, and repeats no sample."""
    worker_group = loaders(size, ranks=2, drop_last=drop_last)
    shares = [seen([loader]) for loader in worker_group]
    assert [len(share) for share in shares] == [each, each]
    assert len({*shares[0], *shares[1]}) == different
    assert {*shares[0], *shares[1]} <= set(range(size))


def test_order_is_kept_where_nothing_is_to_be_shuffled() -> None:
    assert seen(loaders(6, ranks=1, shuffle=False)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks_after", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_epoch_goes_on_where_a_checkpoint_was_taken_with_any_number_of_ranks(ranks_after: int, workers: int) -> None:
    before = loaders(48, ranks=2, num_workers=workers)
    first = seen(before, steps=4)
    state = before[0].state_dict()
    assert state == {"epoch": 1, "taken": 24}
    after = loaders(48, ranks=ranks_after, num_workers=workers if ranks_after == 1 else 0)
    for loader in after:
        loader.load_state_dict(state)
    assert sorted(first + seen(after)) == list(range(48))
    assert after[0].epoch == 2
    assert sorted(seen(after)) == list(range(48))


@pytest.mark.parametrize(("drop_last", "length"), [(False, 5), (True, 4)])
@pytest.mark.parametrize("workers", [0, 1])
def test_length_is_that_of_the_epoch_and_what_is_left_has_its_own_name(
    drop_last: bool, length: int, workers: int
) -> None:
    loader = loaders(25, ranks=2, drop_last=drop_last, num_workers=workers)[0]  # 25 samples in steps of 6
    seen_lengths, left = [len(loader)], [loader.remaining]
    for _ in loader:
        seen_lengths.append(len(loader))
        left.append(loader.remaining)
    assert seen_lengths == [length] * (length + 1)
    assert left == [*range(length, -1, -1)]
    assert (len(loader), loader.remaining) == (length, length), "the next epoch"


def test_resumed_epoch_has_its_whole_length_and_less_that_remains() -> None:
    first, second = loaders(48, ranks=2, batch_size=4)[0], loaders(48, ranks=3, batch_size=4)[0]
    seen([first], steps=2)
    assert (len(first), first.remaining) == (6, 4)
    second.load_state_dict(first.state_dict())
    assert (len(second), second.remaining) == (4, 3), "by the ranks that there are now"
    assert len(seen([second])) == 3 * 4 - 1, "32 samples are left, for 3 ranks 11 each"
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=len(second))
    assert schedule.total_steps == 8


def test_epoch_that_was_complete_is_over() -> None:
    (loader,) = loaders(7, ranks=1)
    for _ in loader:
        state = loader.state_dict()
    assert state == {"epoch": 1, "taken": 7}
    loader.load_state_dict(state)
    assert (loader.epoch, loader.state_dict()) == (2, {"epoch": 2, "taken": 0})


def shares(size: int, ranks: int, **more: object) -> list[list[int]]:
    return [[int(sample) for batch in loader for sample in batch] for loader in loaders(size, ranks, 3, **more)]


def test_order_is_the_permutation_of_seed_and_epoch_and_ranks_take_turns() -> None:
    expected = torch.randperm(24, generator=torch.Generator().manual_seed(5 * 1_000_003 + 1)).tolist()
    assert shares(24, 2) == [expected[::2], expected[1::2]]


def test_seeds_of_any_size_are_reduced_to_63_bits() -> None:
    seed = (10**18 * 1_000_003 + 1) % 2**63
    expected = torch.randperm(24, generator=torch.Generator().manual_seed(seed)).tolist()
    assert shares(24, 1, seed=10**18) == [expected]


@pytest.mark.parametrize(
    ("drop_last", "expected"),
    [
        (True, [[*range(0, 24, 2)], [*range(1, 24, 2)]]),  # four steps of 2 x 3 samples; 3 of 27 are left out
        (False, [[*range(0, 27, 2)], [*range(1, 27, 2), 0]]),  # the first sample is repeated
    ],
)
def test_27_samples_for_two_ranks_with_batches_of_3(drop_last: bool, expected: list[list[int]]) -> None:
    assert shares(27, 2, shuffle=False, drop_last=drop_last) == expected


@pytest.mark.parametrize(("drop_last", "expected"), [(True, (3, 3)), (False, (4, 4))])
def test_27_samples_after_a_resume(drop_last: bool, expected: tuple[int, int]) -> None:
    worker_group = loaders(27, 2, drop_last=drop_last)
    for loader in worker_group:
        loader.load_state_dict({"epoch": 2, "taken": 6})
    assert (worker_group[0].remaining, worker_group[1].remaining) == expected, "21 samples in steps of 6"
    assert [len([*loader]) for loader in worker_group] == [*expected]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_rest_of_an_epoch_is_the_same_as_without_a_resume(steps: int) -> None:
    for straight, resumed in zip(loaders(27, 4, batch_size=2), loaders(27, 4, batch_size=2), strict=True):
        resumed.load_state_dict({"epoch": 1, "taken": steps * 2 * 4})
        whole, rest = [[*each] for each in (straight, resumed)]
        assert [batch.tolist() for batch in whole[steps:]] == [batch.tolist() for batch in rest]


def test_repeated_samples_fill_ranks_that_outnumber_the_samples() -> None:
    assert shares(2, 5, shuffle=False) == [[0], [1], [0], [1], [0]]


def test_random_numbers_of_workers_differ_by_rank_and_repeat_in_each_run() -> None:
    def seeds() -> list[int]:
        found = []
        for loader in loaders(24, ranks=3):
            next(iter(loader))
            assert loader.generator is not None
            found.append(loader.generator.initial_seed())
        return found

    assert len(set(seeds())) == 3 and seeds() == seeds()


def test_defaults_of_torchs_dataloader_can_be_changed() -> None:
    (plain,), (kept,) = loaders(24, ranks=1), loaders(24, ranks=1, num_workers=1)
    (changed,) = loaders(24, ranks=1, num_workers=1, persistent_workers=False)
    assert [one.persistent_workers for one in (plain, kept, changed)] == [False, True, False]
    assert plain.pin_memory is False
    device = torch.device("cuda")
    on_gpu = make_loader(torch.arange(4), 2, 0, 1, device, shuffle=True, seed=0, drop_last=False)  # type: ignore[arg-type]
    assert on_gpu.pin_memory is True


def test_epoch_that_is_set_again_keeps_its_position_and_another_one_begins() -> None:
    (loader,) = loaders(24, ranks=1)
    seen([loader], steps=2)
    loader.set_epoch(1)
    assert loader.state_dict() == {"epoch": 1, "taken": 6}
    loader.set_epoch(4)
    assert loader.state_dict() == {"epoch": 4, "taken": 0}


def test_data_without_a_length_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(TypeError, match="needs data that has a length"):
        make_loader(Stream(), 2, 0, 1, CPU, shuffle=True, seed=0, drop_last=False)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_sampler_of_the_user_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(TypeError, match=f"leave {name} out, or use torch's DataLoader"):
        make_loader(range(4), 2, 0, 1, CPU, shuffle=True, seed=0, drop_last=False, **{name: None})  # type: ignore[arg-type]


def test_place_of_each_loader_stands_in_the_checkpoint_and_epochs_go_on(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    model = torch.nn.Linear(1, 1)
    one = Rank(tmp_path / "one")
    data: torch.utils.data.Dataset[torch.Tensor] = torch.arange(8)  # type: ignore[assignment]
    loader = one.context.loader(data, batch_size=2)
    found = []
    for epoch in one.context.epochs(3):
        for batch in loader:
            found += batch.tolist()
            if epoch == 2 and loader.state_dict()["taken"] == 4:
                break
        if epoch == 2:
            break
    one.context.checkpoint(model=model, step=6)
    one.context.close()
    one.file.close()
    two = Rank(tmp_path / "two", resume_from=str(tmp_path / "one" / "staging" / "checkpoint-0"))
    two.context.resume(model=model)
    again = two.context.loader(data, batch_size=2)
    epochs = []
    for epoch in two.context.epochs(3):
        epochs.append(epoch)
        found += [int(sample) for batch in again for sample in batch]
    two.file.close()
    assert epochs == [2, 3]
    assert sorted(found) == sorted([*range(8)] * 3)
