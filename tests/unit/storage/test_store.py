"""Places that hold images: folders, what fsspec knows, and what obstore is told about object stores."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ddptrain.errors import ExitCode, UsageError
from ddptrain.storage import options as storage_options
from ddptrain.storage.object_store import store_error
from ddptrain.storage.options import Settings, region_of, settings_for
from ddptrain.storage.store import (
    Location,
    NotFound,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
    fetch,
    open_store,
)

HARD_NAMES = ("x y/a b.jpg", "ü/é+1.jpg", "p%20q/100%.jpg", "h#s/q?m.jpg", "br[1]/~t*{}.jpg", "犬/犬.jpg")


@pytest.fixture(autouse=True)
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own accounts."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))


# --- locations ---


def at(source: str, **options: Any) -> Location:
    return Location.of(source, options)


@pytest.mark.parametrize(
    ("source", "url", "protocol"),
    [
        ("s3://bucket/prefix/", "s3://bucket/prefix", "s3"),
        ("S3://bucket/a b//", "s3://bucket/a b", "s3"),
        ("/data/dogs/", "/data/dogs", "file"),
        ("file:///data/dogs", "/data/dogs", "file"),
        ("builtin", "builtin", "builtin"),
    ],
)
def test_a_source_is_written_in_one_way(source: str, url: str, protocol: str) -> None:
    assert (at(source).url, at(source).protocol) == (url, protocol)


def test_a_path_is_relative_to_the_working_directory_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert at("dogs").url == str(tmp_path / "dogs")
    assert at("~/dogs").url == "/home/me/dogs"


def test_nothing_secret_shows_in_a_location() -> None:
    location = at("https://me:passw0rd@host/dogs", token="t0ken", secret="s3cret")
    assert all(secret not in f"{location!r} {location.description}" for secret in ("passw0rd", "t0ken", "s3cret"))


def test_drawings_need_no_store() -> None:
    store = open_store(at("builtin"))
    first = next(iter(store.listing()))
    assert store.get(first.key)


def test_no_library_that_must_not_be_forked_is_loaded_before_a_store_is_opened() -> None:
    code = "import ddptrain.workloads.images.data.listing, sys; print({'torch', 'obstore', 'fsspec'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == "set()", said.stderr


# --- folders ---


def test_a_folder_is_listed_and_read_whatever_its_files_are_called(tmp_path: Path) -> None:
    for name in HARD_NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    store = open_store(at(str(tmp_path)))
    listed = list(store.listing())
    assert sorted(item.key for item in listed) == sorted(HARD_NAMES)
    assert all(
        store.get(item.key) == item.key.encode() and item.size_bytes == len(item.key.encode()) for item in listed
    )


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.jpg").write_bytes(b"1")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "source")
    assert [item.key for item in open_store(at(str(tmp_path / "source"))).listing()] == ["a/1.jpg"]


def test_a_changed_file_has_another_version(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"1")
    store = open_store(at(str(tmp_path)))
    (before,) = store.listing()
    (tmp_path / "b.jpg").write_bytes(b"2")
    os.replace(tmp_path / "b.jpg", tmp_path / "a.jpg")
    (after,) = store.listing()
    assert before.version != after.version


@pytest.mark.parametrize(("path", "words"), [("none", "does not exist"), ("file", "is not a folder")])
def test_a_folder_that_is_none_is_missing(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreMissing, match=f"{tmp_path}/{path} {words}") as caught:
        list(open_store(at(str(tmp_path / path))).listing())
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_file_that_has_gone_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(NotFound) as caught:
        open_store(at(str(tmp_path))).get("a/1.jpg")
    assert caught.value.key == "a/1.jpg"


def test_a_folder_that_a_host_does_not_see_is_told_instead_of_its_images(tmp_path: Path) -> None:
    with pytest.raises(
        StoreMissing, match=rf"the folder {tmp_path}/none does not exist on .*: every rank must be able to read it"
    ):
        open_store(at(str(tmp_path / "none"))).get("a/1.jpg")


def test_one_file_is_fetched_by_its_path_or_url(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes(b"tench")
    assert fetch(str(tmp_path / "names.txt"), {}, "params.names", 10) == b"tench"
    fsspec.filesystem("memory").pipe_file("/fetched/names.txt", b"tench")
    assert fetch("memory://fetched/names.txt", {}, "params.names", 10) == b"tench"
    with pytest.raises(StoreMissing, match=r"none\.txt does not exist"):
        fetch(str(tmp_path / "none.txt"), {}, "params.names", 10)


# --- what fsspec knows ---


def test_a_file_system_of_fsspec_is_listed_and_read() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/pets/{name}": name.encode() for name in HARD_NAMES})
    store = open_store(at("memory://pets"))
    assert sorted(item.key for item in store.listing()) == sorted(HARD_NAMES)
    assert store.get(HARD_NAMES[2]) == HARD_NAMES[2].encode()
    with pytest.raises(NotFound):
        store.get("x y/none.jpg")
    with pytest.raises(StoreMissing, match="memory://nothing"):
        list(open_store(at("memory://nothing")).listing())


class Quiet(SimpleHTTPRequestHandler):
    failing = 0

    def do_GET(self) -> None:
        if "secret" in self.path:
            self.send_error(403)
        elif Quiet.failing:
            Quiet.failing -= 1
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_pages_of_links_are_listed_and_read_and_a_bad_moment_is_passed_over(tmp_path: Path) -> None:
    for name in HARD_NAMES:
        (tmp_path / "dogs" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "dogs" / name).write_bytes(name.encode())
    with serving(functools.partial(Quiet, directory=tmp_path)) as url:
        store = open_store(at(f"{url}/dogs/"))
        Quiet.failing = 1
        assert sorted(item.key for item in store.listing()) == sorted(HARD_NAMES)
        assert all(store.get(name) == name.encode() for name in HARD_NAMES)
        Quiet.failing = 1
        with pytest.raises(Transient, match="503"):
            store.get(HARD_NAMES[0])
        with pytest.raises(NotFound):
            store.get("x y/none.jpg")
        with pytest.raises(StoreMissing, match="/none does not exist"):
            list(open_store(at(f"{url}/none")).listing())
        with pytest.raises(StoreForbidden, match="403"):
            list(open_store(at(f"{url}/secret")).listing())
        Quiet.failing = 99  # a folder that can't be listed is no empty one
        with pytest.raises(StoreUnreachable, match="503"):
            list(store.listing())
        Quiet.failing = 0


class Endless(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        with suppress(OSError):
            while True:
                self.wfile.write(bytes(100_000))

    def log_message(self, *_: object) -> None: ...


def test_small_file_without_end_is_cut_off() -> None:
    with serving(Endless) as url:
        assert 1_000_000 < len(fetch(f"{url}/names.txt", {}, "params.names", 1_000_000)) < 20_000_000


def test_an_unknown_protocol_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match=r"params\.source nonsense://x can't be opened: ValueError"):
        open_store(at("nonsense://x"))


# --- options of object stores ---


def settings(url: str, kind: str = "s3", **options: Any) -> Settings:
    location = Location(url, options)
    return settings_for(location, kind, url.partition("://")[2].partition("/")[0], 1.0)


def test_names_of_s3fs_become_those_of_obstore() -> None:
    found = settings("s3://b/p", anon=True, endpoint_url="http://host:1", region="eu-west-1", requester_pays=True)
    assert found.store == {
        "skip_signature": True,
        "endpoint": "http://host:1",
        "region": "eu-west-1",
        "request_payer": True,
    }
    nested = {"endpoint_url": "http://host:1", "region_name": "eu-west-1", "verify": False}
    found = settings("s3://b/p", client_kwargs=nested)
    assert found.store == {"endpoint": "http://host:1", "region": "eu-west-1"}
    assert found.client == {"allow_invalid_certificates": True}


def test_a_key_of_the_options_is_used_without_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    found = settings("s3://b", key="k", secret="s", endpoint_url="http://host")
    assert found.credentials is not None
    assert found.credentials() == {"access_key_id": "k", "secret_access_key": "s", "token": None, "expires_at": None}


def test_the_environment_says_where_and_the_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://of-the-environment")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert settings("s3://b").store["endpoint"] == "http://of-the-environment"
    assert settings("s3://b").store["region"] == "eu-north-1"
    asked = settings("s3://b", endpoint_url="http://asked", region="us-west-2").store
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
    assert default.credentials is not None and default.credentials()["access_key_id"] == "d"
    assert default.store["region"] == "eu-west-1"
    assert work.credentials is not None and work.credentials()["secret_access_key"] == "w%s"
    assert work.store == {"region": "eu-west-3", "endpoint": "http://work"}
    with pytest.raises(UsageError, match=r'AWS has no profile "wrok".*did you mean work\?'):
        settings("s3://b", profile="wrok")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    assert settings("s3://b", region="x").credentials is None


def test_names_of_gcsfs_and_adlfs_become_those_of_obstore() -> None:
    assert settings("gs://b", "gs", token="anon").store == {"skip_signature": True}
    assert settings("gs://b", "gs", token="/key.json").store == {"application_credentials": "/key.json"}
    found = settings("abfs://box@acc.dfs.core.windows.net/p", "az", sas_token="s")
    assert found.bucket == "box" and found.store == {"account_name": "acc", "sas_key": "s"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"anonymous": True}, "params.source_options.anonymous is not an option of s3://: did you mean anon?"),
        (
            {"client_kwargs": {"region": "x"}},
            "client_kwargs.region is not an option of s3://: did you mean region_name?",
        ),
        ({"client_kwargs": 3}, "params.source_options.client_kwargs must be a mapping"),
        ({"anon": "yes"}, "params.source_options.anon must be true or false"),
        ({"endpoint_url": 9000}, "params.source_options.endpoint_url must be text, not 9000"),
        ({"secret": 12345}, "params.source_options.secret must be text; put it in quotes"),
        ({"key": "k"}, "needs both key and secret"),
        ({"token": "t"}, "needs both key and secret"),
        ({"verify": "/none.pem"}, "the certificates for s3://b/p can't be read"),
    ],
)
def test_an_option_that_does_not_do_is_a_clear_error(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings("s3://b/p", **options)
    assert complaint in str(caught.value) and "12345" not in str(caught.value)


def test_a_container_of_azure_is_no_secret() -> None:
    assert at("abfs://box@acc.dfs.core.windows.net/dogs").description == "abfs://box@acc.dfs.core.windows.net/dogs"
    assert "secret" not in at("abfs://me:secret@acc/dogs").description
    with pytest.raises(UsageError, match=r"az://box/dogs can't be opened: .*Account must be specified"):
        open_store(at("az://box/dogs"))


def test_a_url_without_a_bucket_is_a_clear_error() -> None:
    with pytest.raises(StoreMissing, match="contains no bucket"):
        open_store(at("s3:///x", anon=True))


class Aws(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(403)
        self.send_header("x-amz-bucket-region", "us-east-2")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_the_region_of_a_bucket_is_asked_of_aws_once(monkeypatch: pytest.MonkeyPatch) -> None:
    region_of.cache_clear()
    with serving(Aws) as url:
        ask = urllib.request.Request
        monkeypatch.setattr(urllib.request, "Request", lambda _, method: ask(url, method=method))
        assert settings("s3://bucket/p", anon=True).store["region"] == "us-east-2"
    assert settings("s3://bucket/q", anon=True).store["region"] == "us-east-2"
    region_of.cache_clear()


def test_an_aws_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(storage_options, "_asked_region", lambda bucket, timeout_s: str(go.wait(100)))
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match=r"s3://silent can't be listed: AWS did not answer within 0\.1 s"):
        region_of("silent", 0.1)
    go.set()
    assert time.monotonic() - began < 60


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
