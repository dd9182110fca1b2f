"""Which runs `results sync` leaves alone: those of a living driver, wherever it is, and those of other users."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.tracking import wandb_sync
from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_run
from ddptrain.errors import UsageError
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import load_run
from ddptrain.results.ownership.driver_heartbeat import Heartbeat
from ddptrain.results.run_record import DriverRecord, RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.tracker_records import RECORDED
from ddptrain.tracking.wandb import transaction_log
from ddptrain.tracking.wandb.sync_command import SyncOutput
from ddptrain.tracking.wandb.transaction_log import LoggedFile, SeparateRun
from ddptrain.tracking.wandb.wandb_folders import RunPart, parts_in


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run that W&B has recorded offline; run.json says that a driver on another host runs it, silent for an hour."""
    with RunWriter.create(tmp_path, "a-run", "n", "", "w") as writer:
        part = writer.layout.tracking_dir / "wandb" / "offline-run-20250101_000000-w1"
        part.mkdir(parents=True)
        (part / "run-w1.wandb").write_bytes(b"recorded")
        writer.update(tracking={"wandb": {"id": "w1", "mode": "offline"}})
        writer.finish(RunStatus.SUCCEEDED, 0)
    driver = DriverRecord(1, "another-host", "another-boot")
    record = dataclasses.replace(writer.record, status=RunStatus.RUNNING, driver=driver)
    writer.layout.run_json.write_text(record.to_json())
    for path in writer.layout.root.iterdir():
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return writer.layout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key of W&B's."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sync(layout: RunLayout) -> SyncResult:
    return sync_run(load_run(layout.root), {"HOME": os.environ["HOME"]}, time.monotonic() + 60)


def test_run_of_another_host_is_left_alone_while_its_heart_beats_however_little_it_logs(layout: RunLayout) -> None:
    kept = Heartbeat(layout.heartbeat_file)
    assert sync(layout).skipped == "it is running"
    kept.close()


def test_run_of_another_host_that_shows_no_sign_of_life_is_not_taken_for_a_finished_one(layout: RunLayout) -> None:
    assert sync(layout).skipped == "its driver may be running on another-host, which cannot be seen from this host"


@pytest.mark.usefixtures("home")
def test_run_of_another_host_whose_heart_has_stopped_is_sent(layout: RunLayout) -> None:
    Heartbeat(layout.heartbeat_file)
    os.utime(layout.heartbeat_file, (1, 1))
    with pytest.raises(UsageError, match="there is no API key"):
        sync(layout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_run_of_another_user_is_left_alone(layout: RunLayout) -> None:
    os.chown(layout.root, 65534, 65534)
    assert sync(layout).skipped == "it belongs to another user"
    assert not (layout.tracking_dir / "wandb" / ".sync.lock").exists()


@pytest.mark.usefixtures("home")
def test_lock_of_a_sync_is_not_taken_through_a_link(layout: RunLayout, tmp_path: Path) -> None:
    record = dataclasses.replace(load_run(layout.root).record, status=RunStatus.SUCCEEDED, failure=None)
    layout.run_json.write_text(record.to_json())
    (tmp_path / "precious").write_text("precious\n")
    (layout.tracking_dir / "wandb" / ".sync.lock").symlink_to(tmp_path / "precious")
    environ = {"HOME": os.environ["HOME"], "WANDB_API_KEY": "0" * 40}
    sent = sync_run(load_run(layout.root), environ, time.monotonic() + 60)
    assert ".sync.lock: it is a symbolic link" in sent.problem and sent.waiting == 1
    assert (tmp_path / "precious").read_text() == "precious\n"


def test_marks_are_not_left_through_links(layout: RunLayout, tmp_path: Path) -> None:
    view = load_run(layout.root)
    (part,) = wandb_sync._waiting(view)
    part.log.with_suffix(".wandb.synced").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResultsError, match="symbolic link"):
        wandb_sync._mark(part)
    assert not (tmp_path / "elsewhere").exists()


def part_of(layout: RunLayout, name: str = "offline-run-20250101_000000-w1", run_id: str = "w1") -> RunPart:
    folder = layout.tracking_dir / "wandb" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"run-{run_id}.wandb").write_bytes(b"recorded")
    return next(part for part in parts_in(folder.parent) if part.folder == folder)


def checkpoint_file(layout: RunLayout, step: str = "step-9", content: bytes = b"weights") -> Path:
    path = layout.checkpoints_dir / step / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("folder", "md5", "is_found"),
    [
        ("step-9", "", True),
        ("step-9", "LoD3CuYyUtsAfLMlnn2QRA==", False),
        ("step-9", base64.b64encode(hashlib.md5(b"weights").digest()).decode(), True),
        ("step-8", "", False),
        ("other", "", False),
    ],
)
def test_checkpoint_of_a_log_is_where_the_run_keeps_that_step(
    layout: RunLayout, folder: str, md5: str, is_found: bool
) -> None:
    kept = checkpoint_file(layout)
    checkpoint_file(layout, "other")
    logged = LoggedFile(f"/scratch/sending/{folder}/model.safetensors", "model", md5)
    assert wandb_sync._locate(logged, load_run(layout.root)) == (kept if is_found else None)


def test_checkpoint_that_a_link_leads_to_is_not_sent(layout: RunLayout, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"key")
    checkpoint_file(layout).unlink()
    (layout.checkpoints_dir / "step-9" / "model.safetensors").symlink_to(secret)
    logged = LoggedFile("/s/step-9/model.safetensors", "model", "")
    assert wandb_sync._locate(logged, load_run(layout.root)) is None
    assert wandb_sync._locate(LoggedFile("model.safetensors", "model", ""), load_run(layout.root)) is None


def test_staged_file_is_where_it_was_or_in_the_data_of_the_run(layout: RunLayout, tmp_path: Path) -> None:
    view = load_run(layout.root)
    there = tmp_path / "data" / "artifacts" / "staging" / "abc"
    moved = layout.tracking_dir / "wandb" / "data" / "artifacts" / "staging" / "abc"
    logged = LoggedFile(str(there), "dataset", "")
    assert wandb_sync._locate(logged, view) is None
    for path in (moved, there):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
        assert wandb_sync._locate(logged, view) == path
    assert wandb_sync._locate(dataclasses.replace(logged, is_list=True), view) is None
    for other in (f"{there}/../abc", f"{there.parent}/a/b", "/etc/passwd"):
        assert wandb_sync._locate(LoggedFile(other, "dataset", ""), view) is None


def test_log_is_sent_as_it_is_unless_files_are_elsewhere_or_a_later_part_was_sent(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = load_run(layout.root)
    staged: list[LoggedFile] = []
    rewritten: list[tuple[object, ...]] = []
    monkeypatch.setattr(transaction_log, "staged_files", lambda _: staged)
    monkeypatch.setattr(
        transaction_log, "rewrite", lambda log, new, _, code, separate: rewritten.append((log, new, code, separate))
    )
    part, later = part_of(layout), part_of(layout, "run-20250102_000000-w1")
    (part.folder / "files").mkdir()
    (later.folder / "unsent").write_text("")
    assert wandb_sync._prepare(part, [part, later], view, tmp_path / "1") == (part.log, 0)
    kept = checkpoint_file(layout)
    staged.append(LoggedFile(str(kept), "model", ""))
    assert wandb_sync._prepare(part, [part], view, tmp_path / "2") == (part.log, 0)
    assert rewritten == []

    staged += [LoggedFile(f"/gone/step-{step}/{name}", "model", "") for step in (4, 5) for name in "ab"]
    new = tmp_path / "3" / part.folder.name / "run-w1.wandb"
    assert wandb_sync._prepare(part, [part], view, tmp_path / "3") == (new, 2)
    assert rewritten.pop() == (part.log, new, None, None)
    assert [path.name for path in new.parent.iterdir()] == ["files"]
    assert (new.parent / "files").readlink() == part.folder / "files"

    staged.clear()
    (later.folder / "unsent").write_text("sent")
    new = tmp_path / "4" / part.folder.name / "run-w1.wandb"
    assert wandb_sync._prepare(part, [part, later], view, tmp_path / "4") == (new, 0)
    assert rewritten.pop() == (part.log, new, 0, None)
    assert wandb_sync._prepare(later, [part, later], view, tmp_path / "5") == (later.log, 0)

    ranks_part = part_of(layout, "offline-run-20250101_000000-w1-rank_1")
    new = tmp_path / "6" / ranks_part.folder.name / "run-w1-rank_1.wandb"
    assert wandb_sync._prepare(ranks_part, [ranks_part], view, tmp_path / "6") == (new, 0)
    assert rewritten.pop() == (ranks_part.log, new, None, SeparateRun("w1-rank_1", "rank_1", "a-run"))

    staged.append(LoggedFile("/gone/table.json", "table", ""))
    with pytest.raises(wandb_sync._NotSent, match=r"^1 files of artifacts are missing, as /gone/table.json$"):
        wandb_sync._prepare(part, [part], view, tmp_path / "7")
    (part.folder / "files" / "link").symlink_to("/etc")
    with pytest.raises(wandb_sync._NotSent, match="files/link is a symbolic link"):
        wandb_sync._prepare(part, [part], view, tmp_path / "8")


def test_state_of_a_part_that_was_overtaken_is_left_out_unless_it_was_recorded_offline(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = load_run(layout.root)
    monkeypatch.setattr(transaction_log, "staged_files", lambda _: [])
    monkeypatch.setattr(transaction_log, "rewrite", lambda *_: None)
    later = part_of(layout, "run-20250103_000000-w1")
    for name, expected in (
        ("offline-run-20250101_000000-w1", ["run-w1.wandb.syncstate"]),
        ("run-20250102_000000-w1", []),
    ):
        part = part_of(layout, name)
        part.log.with_suffix(".wandb.syncstate").touch()
        new, _ = wandb_sync._prepare(part, [part, later], view, tmp_path / name)
        assert [path.name for path in new.parent.iterdir()] == expected


def test_rounds_send_the_earliest_part_of_each_run_and_give_up_a_run_that_was_not_taken(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = part_of(layout), part_of(layout, "offline-run-20250102_000000-w1")
    other, refused = (part_of(layout, f"offline-run-20250103_000000-{name}", name) for name in ("w2", "w3"))
    later = part_of(layout, "offline-run-20250104_000000-w3", "w3")
    layout.run_json.write_text(dataclasses.replace(load_run(layout.root).record, tracking={}).to_json())
    rounds: list[list[RunPart]] = []

    def send(view: object, parts: list[RunPart], env: object, deadline: float) -> tuple[str, dict[RunPart, int]]:
        assert (env, deadline) == ({"A": "1"}, 7.0)
        rounds.append(sorted(parts, key=lambda part: part.folder.name))
        for part in parts:
            if part != refused:
                part.log.with_suffix(".wandb.synced").touch()
        return "", dict.fromkeys(parts, 2)

    monkeypatch.setattr(wandb_sync, "_send", send)
    result = wandb_sync._send_all(load_run(layout.root), {"A": "1"}, 7.0)
    assert rounds == [[first, other, refused], [second]]
    assert result == SyncResult("a-run", sent=3, waiting=2, left_out=6, problem="W&B has not taken it")
    assert later in wandb_sync._waiting(load_run(layout.root))


def test_parts_are_sent_together_and_marked_and_their_addresses_are_kept(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, refused = part_of(layout), part_of(layout, "offline-run-20250102_000000-w2", "w2")
    bad, empty = (part_of(layout, f"offline-run-20250103_000000-{name}", name) for name in ("w3", "w4"))
    folder = layout.tracking_dir / "wandb"
    (folder / "links.json").write_text('{"w0": "https://w/0"}')
    (empty.folder / "unsent").write_text("")
    view, now = load_run(layout.root), time.monotonic()
    calls: list[tuple[list[Path], object, float]] = []

    def prepare(one: RunPart, family: list[RunPart], view: object, scratch: Path) -> tuple[Path, int]:
        assert family == [one]
        if one == bad:
            raise wandb_sync._NotSent("it is bad")
        if one == refused:
            return one.log, 0
        scratch.mkdir()
        (scratch / "run-w1.wandb").touch()
        return scratch / "run-w1.wandb", 3

    def sync_logs(logs: list[Path], env: object, cwd: Path, timeout_s: float) -> SyncOutput:
        assert cwd.is_dir() and not list(cwd.iterdir())
        calls.append((logs, env, timeout_s))
        logs[0].with_suffix(".wandb.synced").touch()
        logs[0].with_suffix(".wandb.syncstate").write_bytes(b"state")
        return SyncOutput("refused", {"w1": "https://w/1"})

    monkeypatch.setattr(wandb_sync, "_prepare", prepare)
    monkeypatch.setattr(wandb_sync, "sync_logs", sync_logs)
    monkeypatch.setattr(transaction_log, "is_empty", lambda log: log == empty.log)
    sent = wandb_sync._send(view, [part, refused, bad, empty], {"A": "1"}, now + 1000)
    assert sent == ("it is bad", {part: 3, refused: 0})
    ((logs, env, timeout_s),) = calls
    assert [log.name for log in logs] == ["run-w1.wandb", "run-w2.wandb"] and env == {"A": "1"}
    assert 0 < timeout_s <= 1000
    assert [one.sent for one in (part, refused, bad, empty)] == [True, False, False, True]
    assert (part.folder / "run-w1.wandb.syncstate").read_bytes() == b"state"
    assert not (empty.folder / "unsent").exists()
    assert json.loads((folder / "links.json").read_text()) == {"w0": "https://w/0", "w1": "https://w/1"}
    assert wandb_sync._send(view, [bad], {}, now + 1000) == ("it is bad", {})
    assert wandb_sync._send(view, [refused], {}, now + 1000)[0] == "refused"
    late = wandb_sync._send(view, [part], {}, now - 1)
    assert late == ("the time limit (--timeout) was over before it began", {}) and len(calls) == 2


class Stored:
    """A run in a store: writes down what is done with it. late: the time is over before its files are fetched."""

    def __init__(self, done: list[str], *, late: bool = False) -> None:
        self.done, self.late, self.store = done, late, SimpleNamespace(below=lambda folder: folder)

    def refresh(self) -> None:
        self.done.append("refresh")

    def fetch(self, parts: object, deadline: float) -> None:
        self.done.append("fetch")
        if self.late:
            raise TimeoutError

    def upload_states(self) -> None:
        self.done.append("upload states")


@pytest.mark.parametrize(
    ("late", "fails", "expected"),
    [
        (False, False, ["fetch", "send", "upload states"]),
        (False, True, ["fetch", "send", "upload states"]),  # what was sent before is known to the next sync
        (True, False, ["fetch"]),
    ],
)
def test_stored_run_is_locked_while_it_is_sent_and_keeps_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, layout: RunLayout, late: bool, fails: bool, expected: list[str]
) -> None:
    done: list[str] = []

    class Lock:
        def __init__(self, store: object) -> None:
            done.append(f"lock of {store}")

        def take(self, *, contested: bool) -> None:
            done.append(f"take, contested {contested}")

        def keep(self, lost: object) -> None:
            done.append("keep")

        def release(self, *, forget: bool) -> None:
            done.append(f"release, forget {forget}")

    def send(*_: object) -> SyncResult:
        done.append("send")
        if fails:
            raise wandb_sync._NotSent("no network")
        return SyncResult("a-run", sent=1)

    for name, stand_in in (
        ("StoreLock", Lock),
        ("_send_all", send),
        ("_check_ended", lambda view: None),
        ("_environment", lambda view, environ: {}),
    ):
        monkeypatch.setattr(wandb_sync, name, stand_in)
    view: Any = load_run(layout.root)
    stored: Any = Stored(done, late=late)

    def sync_stored() -> SyncResult:
        return wandb_sync._sync_stored(view, view, stored, {}, time.monotonic() + 60)

    if late or fails:
        with pytest.raises(wandb_sync._NotSent, match="--timeout" if late else "no network"):
            sync_stored()
    else:
        assert sync_stored() == SyncResult("a-run", sent=1)
    locked = [f"lock of {RECORDED}", "take, contested True", "keep", "refresh"]
    assert done == ["refresh", *locked, *expected, "release, forget True"]


@pytest.mark.parametrize("problems", [["", ""], ["refused", ""], ["", "refused"]])
def test_all_runs_are_sent_and_one_problem_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, layout: RunLayout, problems: list[str]
) -> None:
    results = [SyncResult(str(number), problem=problem) for number, problem in enumerate(problems)]
    left, told = iter(results), list[SyncResult]()
    monkeypatch.setattr(wandb_sync, "sync_run", lambda view, environ, deadline: next(left))
    assert wandb_sync.sync_runs([load_run(layout.root)] * 2, 60.0, told.append) is (problems == ["", ""])
    assert told == results


def test_stored_run_of_which_nothing_waits_is_not_locked(monkeypatch: pytest.MonkeyPatch, layout: RunLayout) -> None:
    monkeypatch.setattr(wandb_sync, "_waiting", lambda view: [])
    done: list[str] = []
    view, stored = load_run(layout.root), Stored(done)
    found = wandb_sync._sync_stored(view, view, stored, {}, 0.0)  # type: ignore[arg-type]
    assert (found, done) == (SyncResult("a-run"), ["refresh"])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (SyncResult("r"), "r: nothing to send to W&B"),
        (SyncResult("r", sent=2), "r: 2 sent to W&B"),
        (SyncResult("r", sent=2, left_out=1), "r: 2 sent to W&B, without 1 checkpoint that the run no longer keeps"),
        (SyncResult("r", skipped="it is running"), "r: skipped, it is running"),
        (SyncResult("r", sent=2, waiting=1, problem="refused"), "r: 1 of 3 W&B runs not sent: refused"),
        (SyncResult("r", problem="damaged"), "r: not sent: damaged"),
    ],
)
def test_result_of_a_run_is_one_line(result: SyncResult, expected: str) -> None:
    assert result.summary == expected
