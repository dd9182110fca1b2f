"""The list of a run's images from a real S3 server: what is asked of it, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.storage.sources import open_source
from ddptrain.storage.store import (
    Location,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
)
from ddptrain.workloads.images.listing import list_images, prepare
from tests.servers.faultproxy import Fault, FaultProxy, fault_proxy
from tests.servers.images_on_s3 import ImageBucket, draw, draw_folder, images_on_s3

HARD_NAMES = ("x y/a b.jpg", "ü/é+1.jpg", "p%20q/100%.jpg", "h#s/q?m.jpg", "br[1]/~t*{}.jpg", "犬/犬.jpg")
HARD_PREFIX = "a +%41 ü/Images"
ONE_LISTING = {"list": 2}  # of 1,250 keys: two pages


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageBucket]:
    folder = tmp_path_factory.mktemp("s3")
    hard = folder / "buckets" / "hard" / HARD_PREFIX
    for name in HARD_NAMES:
        (hard / name).parent.mkdir(parents=True)
        (hard / name).write_bytes(draw(seed=name))
    for part, number in (("train", 2), ("val", 1), ("test", 3)):
        draw_folder(folder / "buckets" / "split" / "pets" / part, ("cat", "dog"), number, (24, 24))
    with images_on_s3(folder) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def one_proxy(bucket: ImageBucket) -> Iterator[FaultProxy]:
    with fault_proxy(bucket.signed.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(one_proxy: FaultProxy) -> Iterator[FaultProxy]:
    one_proxy.reset()
    yield one_proxy
    one_proxy.reset()


def listed(url: str, options: dict[str, Any]) -> list[str]:
    return sorted(item.key for images in list_images(Location(url, options)).by_class.values() for item in images)


def test_every_page_is_listed_signed_or_anonymous_in_as_few_requests(bucket: ImageBucket, proxy: FaultProxy) -> None:
    assert listed(bucket.url, bucket.signed_options(proxy.url)) == list(bucket.keys)
    assert proxy.counts() == ONE_LISTING
    assert listed(bucket.url, bucket.anonymous_options()) == list(bucket.keys)


def test_the_environment_says_who_asks_and_where(bucket: ImageBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.signed.environment.items():
        monkeypatch.setenv(name, value)
    assert listed(bucket.url, {}) == list(bucket.keys)


def test_names_of_any_kind_are_listed_and_read(bucket: ImageBucket) -> None:
    for options in (bucket.signed_options(), bucket.anonymous_options()):
        store = open_source(Location(f"s3://hard/{HARD_PREFIX}", options))
        assert sorted(item.key for item in store.listing()) == sorted(HARD_NAMES)
        assert all(store.get(name) == draw(seed=name) for name in HARD_NAMES)


def test_a_listing_gets_over_errors_resets_and_answers_that_break_off(bucket: ImageBucket, proxy: FaultProxy) -> None:
    proxy.inject(Fault("status", status=500, first=1), Fault("reset", first=1), Fault("truncate", first=2))
    found = list_images(Location(bucket.url, bucket.signed_options(proxy.url)))
    assert sorted(item.key for images in found.by_class.values() for item in images) == list(bucket.keys)
    assert proxy.counts()["faults"] == 4


@pytest.mark.parametrize(
    ("url", "options", "kind", "words"),
    [
        ("s3://no-such-bucket/dogs", {}, StoreMissing, "s3://no-such-bucket/dogs does not exist (404 NoSuchBucket"),
        ("s3://images/dogs", {"secret_access_key": "wr0ng"}, StoreForbidden, "refuses it (403 SignatureDoesNotMatch"),
        ("s3://images/dogs", {"endpoint": "http://127.0.0.1:9"}, StoreUnreachable, "Connection refused"),
        (
            "s3://images/dogs",
            {"endpoint": "http://no-such-host.invalid"},
            StoreUnreachable,
            "s3://images/dogs can't",
        ),
    ],
)
def test_a_source_that_can_not_be_listed_is_told_in_one_line(
    bucket: ImageBucket, url: str, options: dict[str, Any], kind: type[StoreError], words: str
) -> None:
    with pytest.raises(StoreError) as caught:
        listed(url, bucket.signed_options() | options)
    assert type(caught.value) is kind and words in str(caught.value)
    assert "\n" not in str(caught.value) and "wr0ng" not in str(caught.value)


def test_a_store_that_does_not_answer_is_given_up_in_time(
    tmp_path: Path, bucket: ImageBucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddptrain.workloads.images.listing._TIMEOUT_S", 0.4)
    monkeypatch.setattr("ddptrain.workloads.images.listing._PATIENCE_S", 0.8)
    proxy.inject(Fault("stall", delay_s=60))
    params = {"source": bucket.url, "source_options": bucket.signed_options(proxy.url)}
    with pytest.raises(StoreUnreachable, match=r"s3://images/dogs/Images can't be listed: it did not answer within"):
        prepare(params, tmp_path, lambda line: None)
