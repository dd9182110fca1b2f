"""A bucket's folder, with obstore's store in memory: parts, folders, limits and conditional writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from ddptrain.storage import object_store
from ddptrain.storage.object_store import ObjectStore, store_error
from ddptrain.storage.store import (
    Limits,
    Location,
    NoConditionalWrites,
    NotFound,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    TooLarge,
    Transient,
    Versioned,
    WriteConflict,
)

REFUSED = 'Generic S3 error: HTTP error: request error, after 4 retries, kind: Connect, error: "Connection refused"'
REDIRECT = (
    "Generic S3 error: Received redirect without LOCATION, this normally indicates an incorrectly configured region"
)


@pytest.fixture
def store() -> ObjectStore:
    memory: Any = MemoryStore()
    return ObjectStore(Location("s3://bucket/runs", {}, "results.dir"), memory, Limits())


def test_files_and_folders_are_listed_from_any_folder(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    store.put("a/b/deep", tmp_path / "x")
    store.put("a/near", b"12")
    store.put("ab/other", b"1")
    assert (store.folders(), store.folders("a"), store.folders("none")) == (["a", "ab"], ["b"], [])
    assert {item.key: item.size_bytes for item in store.listing("a")} == {"a/b/deep": 3, "a/near": 2}
    assert list(store.listing("none")) == []
    store.delete("a/near")
    assert [item.key for item in store.listing("a")] == ["a/b/deep"]


def test_content_is_limited_and_may_begin_later(store: ObjectStore) -> None:
    store.put("x", b"12345")
    assert (store.get("x"), store.get("x", start=3), store.get("x", limit_bytes=5)) == (b"12345", b"45", b"12345")
    with pytest.raises(TooLarge, match=r"s3://bucket/runs/x can't be read: it has more than 4 bytes"):
        store.get("x", limit_bytes=4)
    for read in (lambda: store.get("none"), lambda: list(store.chunks("none"))):
        with pytest.raises(NotFound):
            read()


def test_missing_bucket_is_not_taken_for_a_missing_object() -> None:
    class WithoutBucket:
        def get(self, key: str, options: object) -> None:
            raise FileNotFoundError(f"Object at location {key} not found: status code: 404 <Code>NoSuchBucket</Code>")

    memory: Any = WithoutBucket()
    with pytest.raises(StoreMissing, match=r"s3://bucket/cats does not exist \(404 NoSuchBucket\)"):
        ObjectStore(Location("s3://bucket/cats"), memory, Limits()).get("x")


def test_large_object_comes_in_parts_of_one_version(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 4)
    store.put("x", b"123456789")
    assert list(store.chunks("x")) == [b"1234", b"5678", b"9"]
    parts = store.chunks("x")
    assert next(parts) == b"1234"
    store.put("x", b"abcdefghi")
    with pytest.raises(Transient, match="it was replaced meanwhile"):
        next(parts)


def test_conditional_write_needs_the_version_that_was_read(store: ObjectStore) -> None:
    assert store.get_versioned("run.lock") is None
    mine = store.put_versioned("run.lock", b"mine", None)
    with pytest.raises(WriteConflict):
        store.put_versioned("run.lock", b"theirs", None)
    read = store.get_versioned("run.lock")
    assert read is not None and (read.data, read.version) == (b"mine", mine.version)
    newer = store.put_versioned("run.lock", b"again", read)
    with pytest.raises(WriteConflict):
        store.put_versioned("run.lock", b"late", mine)
    assert store.get("run.lock") == b"again" and newer.version != mine.version


def test_conditions_are_tested_with_an_object_that_is_deleted(store: ObjectStore) -> None:
    store.put("other", b"")  # takes the version "0" of the store in memory, which the test uses as a wrong one
    assert store.test_conditions("probe") > 1.7e9
    assert [item.key for item in store.listing()] == ["other"]


def test_store_that_ignores_conditions_is_found_out(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_always(key: str, data: bytes, before: Versioned | None) -> Versioned:
        store.put(key, data)
        return Versioned(data)

    monkeypatch.setattr(store, "put_versioned", write_always)
    with pytest.raises(NoConditionalWrites, match="the store ignores the conditions of writes"):
        store.test_conditions("probe")
    assert list(store.listing()) == []


# --- what a failed request says: the place, the value that may be wrong, and what to set ---


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def said(text: str, **options: str) -> str:
    error = store_error(Location.of("s3://pets/dogs", options), "listed", "", OSError(text), 30.0)
    assert isinstance(error, StoreUnreachable | StoreForbidden)
    return str(error)


def test_closed_port_names_the_endpoint_without_its_password() -> None:
    start = "s3://pets/dogs can't be listed: no connection (Connection refused), tried 5 times: "
    assert said(REFUSED) == f"{start}is its endpoint right, and the server up?"
    assert said(REFUSED, endpoint_url="http://h:9") == f"{start}is its endpoint, http://h:9, right, and the server up?"
    assert "secret" not in said(REFUSED, endpoint_url="http://me:secret@h:9")


def test_endpoint_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert said(REFUSED).endswith("is its endpoint, http://minio:9000, right, and the server up?")


def test_wrong_region_names_the_region_that_was_asked() -> None:
    wrong = "s3://pets/dogs is in another region than"
    assert said(REDIRECT, region="eu-west-1") == f"{wrong} eu-west-1: set params.source_options.region"
    assert said(REDIRECT) == f"{wrong} us-east-1, the default: set params.source_options.region"
