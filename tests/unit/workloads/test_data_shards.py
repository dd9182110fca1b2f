import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.workloads.data_shards import EpochProgress, plan_epoch, plan_validation


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_ranks_take_every_image_once_in_as_many_steps(n: int, batch_size: int, world_size: int, epoch: int) -> None:
    for plans in (
        [plan_epoch(n, batch_size, world_size, rank, 0, epoch) for rank in range(world_size)],
        [plan_validation(n, batch_size, world_size, rank) for rank in range(world_size)],
    ):
        taken = [image for plan in plans for share in plan for image in share.index.tolist()]
        assert sorted(taken) == list(range(n))
        for shares in zip(*plans, strict=True):
            sizes = [len(share.index) for share in shares]
            assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size
            assert {share.total for share in shares} == {sum(sizes)}


def test_other_ranks_go_on_with_the_images_that_were_not_taken() -> None:
    taken: list[list[int]] = []
    seen: list[int] = []
    for world_size, steps in ((3, 2), (2, 3), (2, 1), (4, None)):
        plans = [plan_epoch(100, 3, world_size, rank, 0, 1, taken) for rank in range(world_size)]
        seen += [image for plan in plans for share in plan[:steps] for image in share.index.tolist()]
        taken.append([world_size, steps or 0])
    assert sorted(seen) == list(range(100))
    assert plan_epoch(100, 3, 2, 0, 0, 1, [[1, 100]]) == []


def test_the_order_is_another_in_each_epoch_and_the_same_for_a_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat([share.index for share in plan_epoch(100, 10, 2, 0, seed, epoch)]).tolist()

    assert order(1, 1) == order(1, 1)
    assert order(1, 1) != order(1, 2)
    assert order(1, 1) != order(2, 1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_images_are_validated_in_order(world_size: int) -> None:
    plans = [plan_validation(20, 2, world_size, rank) for rank in range(world_size)]
    steps = [torch.cat([share.index for share in shares]).tolist() for shares in zip(*plans, strict=True)]
    assert [sorted(step) for step in steps] == [
        list(part.numpy()) for part in torch.arange(20).tensor_split(len(steps))
    ]
    assert len(steps) == {1: 10, 3: 4}[world_size]
    assert plan_validation(0, 2, world_size, 0) == []


def test_plan_of_an_epoch_stays_as_runs_that_are_resumed_have_begun_it() -> None:
    plans = [[share.index.tolist() for share in plan_epoch(7, 2, 2, rank, 3, 5)] for rank in (0, 1)]
    assert plans == [[[6, 3], [2, 4]], [[5, 1], [0]]]


def test_progress_in_an_epoch_continues_with_the_same_ranks_and_begins_again_with_others() -> None:
    assert EpochProgress.resumed([], 0.0, 0.0, 2) == EpochProgress()
    taken = [[4, 7], [2, 3]]
    same = EpochProgress.resumed(taken, 0.25, 0.5, 2)
    assert same == EpochProgress([[4, 7]], 0.25, 3, is_resumed=True)
    assert same.done(12) == 0.4375 and same.state(2) == {"taken": taken, "begun": 0.25}
    other = EpochProgress.resumed(taken, 0.25, 0.5, 3)
    assert other == EpochProgress(taken, 0.5, 0, is_resumed=True)
    assert other.done(12) == 0.5 and other.state(3) == {"taken": taken, "begun": 0.5}
