"""Object stores: with obstore's store in memory, its options, and what its errors mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from ddptrain.errors import UsageError
from ddptrain.storage import object_store
from ddptrain.storage.object_store import ObjectStore, settings_for, store_error
from ddptrain.storage.store import (
    Limits,
    Location,
    NotFound,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    TooLarge,
    Transient,
    WriteConflict,
    open_store,
)


@pytest.fixture(autouse=True)
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own accounts."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))


def at(source: str, **options: Any) -> Location:
    return Location.of(source, options)


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


# --- what a failed request says: the place, the value that may be wrong, and what to set ---


def said(text: str, **options: str) -> str:
    error = store_error(Location.of("s3://pets/dogs", options), "listed", "", OSError(text), 30.0)
    assert isinstance(error, StoreUnreachable | StoreForbidden)
    return str(error)


def test_closed_port_names_the_endpoint_without_its_password() -> None:
    start = "s3://pets/dogs can't be listed: no connection (Connection refused): "
    assert said(REFUSED) == f"{start}is its endpoint right, and the server up?"
    assert said(REFUSED, endpoint="http://h:9") == f"{start}is its endpoint, http://h:9, right, and the server up?"
    assert "secret" not in said(REFUSED, endpoint="http://me:secret@h:9")


def test_endpoint_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert said(REFUSED).endswith("is its endpoint, http://minio:9000, right, and the server up?")


def test_wrong_region_names_the_region_that_was_asked() -> None:
    wrong = "s3://pets/dogs is in another region than"
    assert said(REDIRECT, region="eu-west-1") == f"{wrong} eu-west-1: set params.source_options.region"
    assert said(REDIRECT) == f"{wrong} us-east-1, the default: set params.source_options.region"


# --- options of object stores ---


def settings(url: str, kind: str = "s3", **options: Any) -> dict[str, Any]:
    location = Location(url, options)
    return settings_for(location, kind, url.partition("://")[2].partition("/")[0], 1.0)[1]


def test_names_of_obstore_are_passed_on() -> None:
    options: dict[str, Any] = {
        "skip_signature": True,
        "endpoint": "http://host:1",
        "region": "eu-west-1",
        "request_payer": True,
    }
    client = {"allow_invalid_certificates": True}
    assert settings("s3://b/p", **options, client_options=client) == {**options, "client_options": client}
    open_store(Location("s3://b/p", {**options, "client_options": client}))


def test_environment_says_where_and_the_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://of-the-environment")
    assert settings("s3://b")["region"] == "us-east-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert "region" not in settings("s3://b")  # obstore reads the variables itself
    asked = settings("s3://b", endpoint="http://asked", region="us-west-2")
    assert {asked["endpoint"], asked["aws_endpoint_url_s3"]} == {"http://asked"} and asked["region"] == "us-west-2"


def test_profiles_of_awss_own_files_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        "[default]\nregion = eu-west-1\n[profile work]\nregion = eu-west-3\nendpoint_url = http://work\n"
    )
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = ds\n"
        "[work]\naws_access_key_id = w\naws_secret_access_key = w%s\naws_session_token = wt\n"
    )
    default, work = settings("s3://b"), settings("s3://b", profile="work")
    assert (default["credential_provider"]()["access_key_id"], default["region"]) == ("d", "eu-west-1")
    found = work["credential_provider"]()
    assert (found["secret_access_key"], found["token"]) == ("w%s", "wt")
    assert (work["region"], work["endpoint"]) == ("eu-west-3", "http://work")
    with pytest.raises(UsageError, match="the AWS profile wrok can't be used: "):
        settings("s3://b", profile="wrok")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    assert "credential_provider" not in settings("s3://b", region="x")


def test_missing_botocore_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(UsageError, match="AWS profiles are read with botocore: pip install"):
        settings("s3://b", profile="work")


def test_account_of_azure_is_in_the_address() -> None:
    location = Location("abfs://box@acc.dfs.core.windows.net/p", {"sas_key": "s"})
    bucket, found = settings_for(location, "az", "box@acc.dfs.core.windows.net", 1.0)
    assert (bucket, found) == ("box", {"account_name": "acc", "sas_key": "s", "client_options": {}})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"anon": True, "region": "x"}, "see params.source_options"),
        ({"no_such_option": 1, "region": "x"}, "s3://b/p can't be opened: "),
        ({"secret_access_key": ["12345"], "region": "x"}, "s3://b/p can't be opened: "),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(Location("s3://b/p", options))
    assert problem in str(caught.value) and "12345" not in str(caught.value)


def test_a_container_of_azure_is_no_secret() -> None:
    assert at("abfs://box@acc.dfs.core.windows.net/dogs").description == "abfs://box@acc.dfs.core.windows.net/dogs"
    assert "secret" not in at("abfs://me:secret@acc/dogs").description
    with pytest.raises(UsageError, match=r"az://box/dogs can't be opened: .*Account must be specified"):
        open_store(at("az://box/dogs"))


def test_a_url_without_a_bucket_is_a_clear_error() -> None:
    with pytest.raises(StoreMissing, match="contains no bucket"):
        open_store(at("s3:///x"))


# --- what errors of obstore mean ---

HERE = Location("s3://bucket/dogs", {"secret": "s3cret"})
STATUS = "Generic S3 error: Error performing GET http://h/b?sig=s3cret in 1ms - Server returned non-2xx status code: "


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("404 Not Found: <Error><Code>NoSuchBucket</Code></Error>", StoreMissing, "does not exist (404 NoSuchBucket)"),
        (
            "403 Forbidden: <Error><Code>AccessDenied</Code><Message>No.</Message>",
            StoreForbidden,
            "403 AccessDenied: No.",
        ),
        ("400 Bad Request: <Code>ExpiredToken</Code>", StoreForbidden, "refuses it (400 ExpiredToken)"),
        ("301 Moved Permanently: ", StoreForbidden, "set params.source_options.region"),
        ("503 Service Unavailable: <Code>SlowDown</Code>", StoreUnreachable, "503 SlowDown"),
        ("400 Bad Request: <Code>RequestTimeout</Code>", StoreUnreachable, "400 RequestTimeout"),
    ],
)
def test_a_status_of_a_listing_is_told_in_one_line(text: str, kind: type[StoreError], words: str) -> None:
    error = store_error(HERE, "listed", "", RuntimeError(STATUS + text), 6.0)
    assert type(error) is kind and words in str(error)
    assert "s3://bucket/dogs" in str(error) and "s3cret" not in str(error) and "\n" not in str(error)


def test_missing_credentials_are_told_as_what_they_are() -> None:
    text = (
        "Error performing PUT http://169.254.169.254/latest/api/token in 1s - Server returned non-2xx status code: 403"
    )
    assert "there are no credentials; set params.source_options" in str(
        store_error(HERE, "listed", "", RuntimeError(text), 6.0)
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (STATUS + "404 Not Found: ", NotFound),
        (STATUS + "403 Forbidden: ", StoreForbidden),
        (STATUS + "500 Internal Server Error: ", Transient),
        (STATUS + "429 Too Many Requests: ", Transient),
        ("HTTP error: request or response body error\nkind: Interrupted", Transient),
        ("whatever http://h/?sig=s3cret", Transient),
    ],
)
def test_an_error_of_one_image_says_whether_another_try_helps(text: str, kind: type[StoreError]) -> None:
    error = store_error(HERE, "read", "a/1.jpg", RuntimeError(text), 6.0)
    assert type(error) is kind and "s3cret" not in str(error)
