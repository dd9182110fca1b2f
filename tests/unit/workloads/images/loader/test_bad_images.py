"""Unreadable images: how many a run tolerates, what is said of them, and what replaces them."""

from __future__ import annotations

import random

import pytest

from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.bad_images import BadImages, TooManyBadImages, check_bad

N = 10  # images of each class; the last two of each validate
MANIFEST = Manifest(
    url="/images",
    classes=("a", "b"),
    keys=tuple(f"{name}/{number}.jpg" for name in "ab" for number in range(N)),
    labels=(0,) * N + (1,) * N,
    sizes=(-1,) * 2 * N,
    versions=("",) * 2 * N,
    train=(*range(8), *range(10, 18)),
    val=(8, 9, 18, 19),
)


def test_fraction_itself_is_tolerated_and_one_image_more_is_not() -> None:
    check_bad(2, 200, 0.01, {})
    with pytest.raises(TooManyBadImages) as caught:
        check_bad(3, 200, 0.01, {"a/1.jpg": "gone", "a/2.jpg": "empty"})
    assert str(caught.value) == (
        "3 of 200 images could not be read, which is more than params.max_bad_fraction 0.01 allows: repair them, or "
        "raise it\n  a/1.jpg: gone\n  a/2.jpg: empty"
    )


def test_20_images_are_named() -> None:
    with pytest.raises(TooManyBadImages) as caught:
        check_bad(25, 25, 0.5, {f"{number}.jpg": "gone" for number in range(25)})
    _, *named, more = str(caught.value).splitlines()
    assert (len(named), more) == (20, "  and 5 more")
    with pytest.raises(TooManyBadImages) as caught:
        check_bad(20, 20, 0.5, {f"{number}.jpg": "gone" for number in range(20)})
    assert len(str(caught.value).splitlines()) == 21


def test_image_is_told_once_and_too_many_end_the_run() -> None:
    told: list[str] = []
    bad = BadImages(MANIFEST, 0.1, told.append)
    for index in (3, 12, 3):
        bad.add(index, "gone\x1b[2J")
    assert told == [r"bad image a/3.jpg: gone\u001b[2J", r"bad image b/2.jpg: gone\u001b[2J"]
    assert bad.by_key() == {"a/3.jpg": "gone\x1b[2J", "b/2.jpg": "gone\x1b[2J"}
    with pytest.raises(TooManyBadImages, match="3 of 20 images"):
        bad.add(19, "gone")


def test_replacements_are_the_other_training_images_of_the_class_from_a_place_that_the_seed_gives() -> None:
    bad = BadImages(MANIFEST, 1.0, lambda _: None)
    bad.add(12, "gone")
    bad.add(15, "gone")
    first = random.Random(7).randrange(8)
    expected = [index for index in [*range(10 + first, 18), *range(10, 10 + first)] if index not in (12, 15)]
    others = bad.others(12, 7)
    assert [next(others) for _ in expected] == expected
    with pytest.raises(TooManyBadImages, match=r"no image of class b could be read, the last one being b/2\.jpg: gone"):
        next(others)
