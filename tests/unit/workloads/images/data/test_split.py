"""Which images are used, and which of them train."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.workloads.images.listing import split

ByClass = dict[str, list[str]]


def classes(*sizes: int) -> ByClass:
    return {f"class-{i}": [f"class-{i}/{number}.jpg" for number in range(size)] for i, size in enumerate(sizes)}


def all_keys(by_class: ByClass) -> set[str]:
    return {key for keys in by_class.values() for key in keys}


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 3),
)
def test_every_image_is_on_one_side_and_every_class_trains(sizes: list[int], share: float, seed: int) -> None:
    by_class = classes(*sizes)
    train, val = split(by_class, share, seed)
    assert train | val == all_keys(by_class) and not train & val
    for keys in by_class.values():
        n = len(train & set(keys))
        assert n >= 1 and abs(n - len(keys) * share) <= 1


def test_the_whole_is_as_exact_as_it_can_be_and_each_class_too() -> None:
    by_class = classes(*[171] * 60, *[172] * 60)
    train, val = split(by_class, 0.8, 0)
    assert (len(train), len(val)) == (16464, 4116)
    assert {len(train & set(keys)) for keys in by_class.values()} <= {136, 137, 138}


@pytest.mark.parametrize(
    ("sizes", "share", "expected"),
    [
        ((5, 5), 0.7, 7),  # 3.5 of each class: one has 4, the other 3
        ((7, 4), 0.5, 6),  # 3.5 and 2: the sum is 5.5
        ((3, 3, 3), 0.5, 4),  # 1.5 of each class: the sum is 4.5, which Python rounds to the even number
        ((1, 1, 1, 1), 0.5, 4),  # each class trains on one image at least
        ((10, 1), 0.05, 2),
    ],
)
def test_fractional_counts_are_rounded_so_that_the_sum_is_right(
    sizes: tuple[int, ...], share: float, expected: int
) -> None:
    by_class = classes(*sizes)
    train, val = split(by_class, share, 0)
    assert (len(train), len(val)) == (expected, sum(sizes) - expected)
    assert [round(len(keys) * share - len(train & set(keys)), 6) <= 1 for keys in by_class.values()] == [True] * len(
        sizes
    )


def test_the_class_with_the_largest_remainder_gets_the_image_that_is_missing() -> None:
    assert trained(classes(7, 4, 6), 0.5) == [3, 2, 3]  # 3.5, 2 and 3 images; the sum is 8.5, rounded to 8
    assert sorted(trained(classes(7, 4, 7), 0.5)) == [2, 3, 4]  # 3.5, 2 and 3.5 images; the sum is 9


def trained(by_class: dict[str, list[str]], share: float) -> list[int]:
    train, _ = split(by_class, share, 0)
    return [len(train & set(keys)) for keys in by_class.values()]


def test_which_images_train_stays_the_same_in_later_versions() -> None:
    """A resumed run must find the split that it began with."""
    assert split(classes(5, 5), 0.7, 0)[1] == {"class-0/2.jpg", "class-1/2.jpg", "class-1/3.jpg"}
    assert split(classes(4), 0.5, 3)[0] == {"class-0/0.jpg", "class-0/2.jpg"}


def test_neither_the_order_of_keys_nor_that_of_classes_matters() -> None:
    by_class = classes(9, 30, 4, 1)
    shuffled = {name: random.Random(1).sample(keys, len(keys)) for name, keys in reversed(by_class.items())}
    assert split(by_class, 0.7, 5) == split(shuffled, 0.7, 5)


def test_another_seed_splits_otherwise() -> None:
    assert split(classes(50, 50), 0.5, 1) != split(classes(50, 50), 0.5, 2)


def test_all_images_train_when_nothing_is_to_validate() -> None:
    by_class = classes(3, 4)
    assert split(by_class, 1.0, 0) == (all_keys(by_class), set())
