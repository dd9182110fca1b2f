"""Every sample once an epoch by all ranks together, also after a resume by more or fewer of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ddptrain.rank.loader import RankLoader, make_loader, risk_of_fork
from tests.unit.rank.ranks import CPU, MakeRank, make_rank

__all__ = ["make_rank"]


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


@pytest.mark.parametrize(
    ("drop_last", "expected"),
    [
        (True, [[*range(0, 24, 2)], [*range(1, 24, 2)]]),  # four steps of 2 x 3 samples; 3 of 27 are left out
        (False, [[*range(0, 27, 2)], [*range(1, 27, 2), 0]]),  # the first sample is repeated
    ],
)
def test_27_samples_for_two_ranks_with_batches_of_3(drop_last: bool, expected: list[list[int]]) -> None:
    assert shares(27, 2, shuffle=False, drop_last=drop_last) == expected


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


def test_checkpoint_has_the_position_of_each_loader_and_epochs_continue(make_rank: MakeRank) -> None:
    model = torch.nn.Linear(1, 1)
    one = make_rank()
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
    two = make_rank(resume_from=str(one.folder / "staging" / "checkpoint-0"))
    two.context.resume(model=model)
    again = two.context.loader(data, batch_size=2)
    epochs = []
    for epoch in two.context.epochs(3):
        epochs.append(epoch)
        found += [int(sample) for batch in again for sample in batch]
    assert epochs == [2, 3]
    assert sorted(found) == sorted([*range(8)] * 3)


def test_fork_beside_threads_of_obstore_is_a_risk_and_another_start_method_is_none() -> None:
    ready, done = threading.Event(), threading.Event()

    def thread_of_obstore() -> None:
        ctypes.CDLL(None).prctl(15, b"tokio-rt-worker", 0, 0, 0)  # PR_SET_NAME: the name that obstore's threads have
        ready.set()
        done.wait()

    data: Any = torch.arange(4)
    loader: DataLoader[Any] = DataLoader(data, num_workers=1)
    thread = threading.Thread(target=thread_of_obstore)
    thread.start()
    ready.wait()
    try:
        assert "was used before a DataLoader forks" in risk_of_fork(loader)
        assert risk_of_fork(DataLoader(data, num_workers=1, multiprocessing_context="spawn")) == ""
    finally:
        done.set()
        thread.join()
