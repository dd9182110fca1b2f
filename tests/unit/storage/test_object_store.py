"""Object stores: with obstore's store in memory, its options, and what its errors mean."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import MemoryStore

from ddptrain.errors import ExitCode, RunLocked, UsageError
from ddptrain.storage import object_store
from ddptrain.storage.object_store import ObjectStore, open_folder, settings_for, store_error
from ddptrain.storage.sources import open_source
from ddptrain.storage.store import (
    Limits,
    Location,
    NotFound,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
    WriteConflict,
    is_plain,
    is_url,
)
from tests.unit.results.stores import watched_store


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


def test_folder_of_a_store_is_written_listed_and_read(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    store.write("a/b/deep", tmp_path / "x")
    store.below("a").write("near", b"12")
    store.write("ab/other", b"1")
    assert (store.folders(), store.below("a").folders(), store.below("none").folders()) == (["a", "ab"], ["b"], [])
    for files in (store.below("a").files(), {path[2:]: each for path, each in store.files("a").items()}):
        assert {path: each.size_bytes for path, each in files.items()} == {"b/deep": 3, "near": 2}
    assert store.below("none").files() == {} and store.read("none") is None
    store.remove("a/near")
    store.remove("a/near")
    assert store.read_all(["a/b/deep", "a/near"]) == {"a/b/deep": b"123"}


def test_content_is_limited_and_may_begin_later(store: ObjectStore) -> None:
    store.write("x", b"12345")
    assert (store.get("x"), store.get("x", start=3), store.read("x", limit_bytes=5)) == (b"12345", b"45", b"12345")
    with pytest.raises(StoreError, match=r"s3://bucket/runs/x can't be read: it has more than 4 bytes"):
        store.read("x", limit_bytes=4)
    for read in (lambda: store.get("none"), lambda: list(store.chunks("none"))):
        with pytest.raises(NotFound):
            read()


def test_files_are_downloaded_whole_or_not_at_all(store: ObjectStore, tmp_path: Path) -> None:
    store.write("x/log", b"12345")
    store.write("x/log.00001", b"678")
    store.below("x").fetch("log", tmp_path / "deep/copy")
    store.below("x").fetch(store.below("x").files(), tmp_path / "deep/copy", have_bytes=5, time_ns=7 * 10**9)
    assert (tmp_path / "deep/copy").read_bytes() == b"12345678" and (tmp_path / "deep/copy").stat().st_mtime == 7
    with pytest.raises(NotFound):
        store.fetch("x/none", tmp_path / "deep/none")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"{store.url}/x/log can't be downloaded: cannot write {tmp_path}/file/x: "):
        store.fetch("x/log", tmp_path / "file" / "x")


def test_large_object_comes_in_parts_of_one_version(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 4)
    store.write("x", b"123456789")
    assert list(store.chunks("x")) == [b"1234", b"5678", b"9"]
    parts = store.chunks("x")
    assert next(parts) == b"1234"
    store.write("x", b"abcdefghi")
    with pytest.raises(Transient, match="it was replaced meanwhile"):
        next(parts)


def test_conditional_write_needs_the_version_that_was_read(store: ObjectStore) -> None:
    assert store.read_versioned("run.lock") is None
    mine = store.write_versioned("run.lock", b"mine", None)
    with pytest.raises(WriteConflict):
        store.write_versioned("run.lock", b"theirs", None)
    read = store.read_versioned("run.lock")
    assert read is not None and (read.data, read.version) == (b"mine", mine.version)
    newer = store.write_versioned("run.lock", b"again", read)
    with pytest.raises(WriteConflict):
        store.write_versioned("run.lock", b"late", mine)
    assert store.get("run.lock") == b"again" and newer.version != mine.version


def test_conditions_are_tested_with_an_object_that_is_deleted(store: ObjectStore) -> None:
    store.write("other", b"")  # takes the version "0" of the store in memory, which the test uses as a wrong one
    assert store.test_conditions("probe") > 1.7e9
    assert list(store.files()) == ["other"]


def test_failures_that_may_pass_are_tried_again() -> None:
    store, fs = watched_store()
    fs.errors = [OSError("reset by peer"), TimeoutError()]
    store.write("a/b", b"1")
    fs.errors = [OSError("reset\nby peer")] * 3
    with pytest.raises(Transient, match=rf"^{store.url}/a/b can't be written: reset"):
        store.write("a/b", b"1")
    assert not fs.errors, "two retries"
    fs.errors = [PermissionDeniedError("no"), OSError("never asked")]
    with pytest.raises(StoreForbidden, match="no") as refused:
        store.read("a/b")
    assert len(fs.errors) == 1 and refused.value.exit_code == ExitCode.USAGE


def test_guard_is_asked_before_each_change_and_no_read(store: ObjectStore) -> None:
    store.write("there", b"1")

    def refuse() -> None:
        raise RunLocked("taken")

    guarded = replace(store, guard=refuse)
    for change in (
        lambda: guarded.write("x", b""),
        lambda: guarded.remove("there"),
        lambda: guarded.write_versioned("x", b"", None),
    ):
        with pytest.raises(RunLocked):
            change()
    assert list(guarded.files()) == ["there"] and guarded.read("there") == b"1"


@pytest.mark.parametrize("path", ["", "/", "a//b", "../a", "a/..", "./a", "a\\b", "a\nb"])
def test_path_that_leads_elsewhere_is_not_plain(path: str) -> None:
    assert not is_plain(path) and is_plain("a/b c/..d")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s5://b/c", "cannot keep runs or models in s5://b/c: give a path, or a bucket of S3, "),
        ("file:///tmp/runs", "give a path"),
        ("s3://", "give a bucket or a folder"),
    ],
)
def test_address_that_leads_nowhere_is_a_usage_error(url: str, says: str) -> None:
    assert is_url(url) and not is_url("/a//b")
    with pytest.raises(UsageError, match=says):
        open_folder(url)


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
    open_source(Location("s3://b/p", {**options, "client_options": client}))


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
        open_source(Location("s3://b/p", options))
    assert problem in str(caught.value) and "12345" not in str(caught.value)


def test_a_container_of_azure_is_no_secret() -> None:
    assert at("abfs://box@acc.dfs.core.windows.net/dogs").description == "abfs://box@acc.dfs.core.windows.net/dogs"
    assert "secret" not in at("abfs://me:secret@acc/dogs").description
    with pytest.raises(UsageError, match=r"az://box/dogs can't be opened: .*Account must be specified"):
        open_source(at("az://box/dogs"))


def test_a_url_without_a_bucket_is_a_clear_error() -> None:
    with pytest.raises(StoreMissing, match="contains no bucket"):
        open_source(at("s3:///x"))


# --- what errors of obstore mean ---

HERE = Location("s3://bucket/dogs", {"secret": "s3cret"})
STATUS = "Generic S3 error: Error performing GET http://h/b?sig=s3cret in 1ms - Server returned non-2xx status code: "


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
