from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.annotations import Annotations
from ddptrain.results.remote.lease import LOCK, Claim
from ddptrain.results.remote.stored_runs import StoredRuns
from ddptrain.results.run import Run
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import fetch_config, split_run
from ddptrain.results.show.log_follower import follow_logs
from ddptrain.storage.object_store import ObjectStore
from tests.unit.results.stores import WatchedStore, serve_folder, watched_store


@pytest.fixture
def watched() -> tuple[ObjectStore, WatchedStore]:
    return watched_store()


@pytest.fixture
def fs(watched: tuple[ObjectStore, WatchedStore]) -> WatchedStore:
    """The store of the runs, whose calls may fail."""
    return watched[1]


@pytest.fixture
def runs(tmp_path: Path, watched: tuple[ObjectStore, WatchedStore]) -> Iterator[StoredRuns]:
    """An empty store, seen from a machine whose folders are below tmp_path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield StoredRuns(watched[0])


def put_run(runs: StoredRuns, run_id: str, status: str = "succeeded", **fields: Any) -> ObjectStore:
    run = runs.store.below(run_id)
    record = {
        "run_id": run_id,
        "name": "n",
        "status": status,
        "started_at": "2025-01-01T00:00:00Z",
        "world_size": 1,
    } | fields
    run.write("run.json", json.dumps(record).encode())
    run.write("config.yaml", b"name: n\n")
    run.write("logs/rank-0.log", b"one\ntwo\n")
    run.write("artifacts/names.json", b"[1]")
    run.write("artifacts/large.bin", b"x" * 5000)
    return run


def hold(run: ObjectStore, **changes: Any) -> None:
    claim = dataclasses.replace(Claim.of_this_process(), **{"host": "elsewhere", **changes})
    run.write(LOCK, json.dumps(dataclasses.asdict(claim)).encode())


def files_of(view_root: Path) -> set[str]:
    return {path.relative_to(view_root).as_posix() for path in view_root.rglob("*") if path.is_file()}


def test_runs_are_listed_by_their_records_alone(runs: StoredRuns) -> None:
    assert runs.list() == []
    put_run(runs, "a-1")
    put_run(runs, "b-2", status="failed")
    runs.store.write("no-run/x", b"1")
    runs.store.write("..odd/run.json", b"{}")
    views = runs.list()
    assert {view.run_id: view.status for view in views} == {"a-1": "succeeded", "b-2": "failed"}
    assert views[0].as_dict()["run_dir"] == f"{runs.store.url}/{views[0].run_id}"
    assert files_of(views[0].root) == {"run.json"}
    for path in runs.store.files("a-1"):
        runs.store.remove(path)
    assert [view.run_id for view in runs.list()] == ["b-2"]


def test_record_that_is_too_large_is_unreadable_and_hides_no_other_run(runs: StoredRuns) -> None:
    put_run(runs, "a-1")
    runs.store.write("b-2/run.json", b" " * ((64 << 20) + 1))
    view = runs.get("b-2")
    assert view is not None and view.status == "unreadable" and "more than" in view.problem


def test_run_is_under_way_while_its_lock_is_fresh(runs: StoredRuns) -> None:
    run = put_run(runs, "a-1", status="running", driver={"host": "elsewhere", "pid": 1})
    assert runs.find("a-1").status == "failed"
    hold(run)
    assert runs.find("a").status == "running"
    hold(run, time_s=time.time() - 1000)
    (view,) = runs.list()
    assert view.record.failure is not None and "the driver has ended" in view.record.failure.message


def test_what_is_needed_is_fetched_and_the_rest_is_known_by_name(runs: StoredRuns) -> None:
    put_run(runs, "a-1")
    view = runs.find("a-1")
    assert view.artifacts() == {"large.bin": 5000, "names.json": 3}
    assert [view.shown_path(path) for path in view.logs().values()] == [f"{runs.store.url}/a-1/logs/rank-0.log"]
    assert not list(view.root.glob("logs/*"))
    assert view.log(0).read_text() == "one\ntwo\n"
    runs.store.write("a-1/logs/rank-0.log", b"new\nnew\n")
    assert runs.find("a-1").log(0).read_text() == "new\nnew\n"


def test_growing_log_is_followed_to_the_end(runs: StoredRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.results.remote.stored_runs._FOLLOW_EVERY_S", 0.0)
    run = put_run(runs, "a-1", status="running")
    hold(run)
    view = runs.find("a-1")
    lines = follow_logs(view, wait=lambda seconds: None)
    assert [next(lines), next(lines)] == ["one", "two"]
    run.write("logs/rank-0.log", b"one\ntwo\nthree\n")
    assert next(lines) == "three"
    run.write("logs/rank-0.log", b"one\ntwo\nthree\nend")
    put = json.loads(run.read("run.json") or b"")
    run.write("run.json", json.dumps({**put, "status": "succeeded"}).encode())
    assert list(lines) == ["end"]


def test_log_in_parts_is_one_file_and_other_files_with_a_number_are_their_own(runs: StoredRuns) -> None:
    run = put_run(runs, "a-1")
    for number, text in enumerate((b"three\n", b"four\n"), 1):
        run.write(f"logs/rank-0.log.{number:05d}", text)
    run.write("artifacts/data.json.00001", b"1")
    view = runs.find("a-1")
    assert view.log(0).read_text() == "one\ntwo\nthree\nfour\n"
    assert view.artifacts()["data.json.00001"] == 1 and [*view.logs()] == [0]
    run.write("logs/rank-0.log.00002", b"four\nfive\n")  # the last part has grown
    run.write("logs/rank-0.log", b"what is there is not read again\n"[:8])
    assert runs.find("a-1").log(0).read_text() == "one\ntwo\nthree\nfour\nfive\n"
    run.write("logs/rank-0.log", b"a new log\n")
    for number in (1, 2):
        run.remove(f"logs/rank-0.log.{number:05d}")
    assert runs.find("a-1").log(0).read_text() == "a new log\n"


def test_run_id_that_is_taken_is_refused(runs: StoredRuns) -> None:
    put_run(runs, "a-1")
    with (
        pytest.raises(UsageError, match="run a-1 exists already in memory://"),
        runs.claim("a-1", resumed=False),
    ):
        pass


def test_run_that_was_never_begun_leaves_nothing(runs: StoredRuns) -> None:
    with runs.claim("a-1", resumed=False):
        assert list(runs.store.files()) == [f"a-1/{LOCK}"]
    assert not runs.store.files()


def test_working_folder_is_private_and_newer_than_the_store_it_was_uploaded_to(
    runs: StoredRuns, fs: WatchedStore
) -> None:
    with runs.claim("a-1", resumed=False) as keeping:
        with RunWriter.create(runs.folder, "a-1", "n", "name: n\n", "w") as writer:
            keeping.begin(lambda text: None, lambda error: None)
            assert keeping.flush(60) == ""
            token = json.loads(runs.store.read(f"a-1/{LOCK}") or b"")["token"]
            assert runs.folder.stat().st_mode & 0o777 == 0o700
            writer.layout.log(0).write_text("not uploaded\n")
            fs.fails = lambda path: OSError("away")
            assert "not all in memory://" in keeping.flush(0.1)
        keeping.close(0.1)
    fs.fails = lambda path: None
    hold(runs.store.below("a-1"), token=token, released=True)
    with runs.claim("a-1", resumed=True) as keeping:
        assert (keeping.root / "logs/rank-0.log").read_text() == "not uploaded\n"


def test_working_folder_that_is_behind_the_store_is_kept_aside(runs: StoredRuns) -> None:
    run = put_run(runs, "a-1", status="failed")
    run.write("driver.log", b"printed by ")
    run.write("driver.log.00001", b"two drivers\n")
    stale = runs.folder / "a-1"
    stale.mkdir()
    (stale / "mine").write_text("not lost")
    said: list[str] = []
    with runs.claim("a-1", resumed=True) as keeping:
        keeping.begin(said.append, lambda error: None)
        assert (keeping.root / "logs/rank-0.log").read_text() == "one\ntwo\n"
        assert (keeping.root / "driver.log").read_text() == "printed by two drivers\n"
    (aside,) = runs.work.glob("a-1.before-*")
    assert (aside / "mine").read_text() == "not lost"
    assert said == [f"{runs.store.url}/a-1 was continued by another host; the copy of this host is kept in {aside}"]


def test_run_may_be_given_by_its_address() -> None:
    assert split_run("s3://bucket/deep/runs/a-1/", "runs") == ("s3://bucket/deep/runs", "a-1")
    assert split_run("runs/a-1", "s3://bucket") == ("s3://bucket", "runs/a-1")
    for text in ("s3://", "s3://bucket"):
        with pytest.raises(RunNotFound, match="is not a run's address"):
            split_run(text, "runs")


def test_configuration_file_is_copied_into_a_folder_of_its_own_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for run in "ab":
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "best.yaml").write_text(f"name: {run}\n")
    first, second = (fetch_config(f"{url}/runs/{run}/best.yaml") for run in "ab")
    assert (first.read_text(), second.read_text()) == ("name: a\n", "name: b\n")
    assert first.name == second.name == "best.yaml" and first.parent.stat().st_mode & 0o777 == 0o700
    for missing in (f"{url}/runs/a/other.yaml", f"{url}/runs/a/"):
        with pytest.raises(UsageError, match="there is no such file"):
            fetch_config(missing)


def test_run_of_this_machine_is_annotated_in_its_folder(runs: StoredRuns, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "run.json").write_text('{"run_id": "own", "status": "succeeded"}')
    assert runs.edit(str(own), lambda before: before.with_tags(["mine"])).tags == ("mine",)
    assert Run(own).annotations.tags == ("mine",)
    assert runs.store.files() == {}


def test_annotations_of_a_copy_follow_those_of_the_store(runs: StoredRuns) -> None:
    run = put_run(runs, "a-1")
    run.write("annotations.json", b'{"tags": ["v1"], "note": ""}')
    assert runs.find("a-1").annotations.tags == ("v1",)
    run.remove("annotations.json")
    assert runs.find("a-1").annotations == Annotations()
