from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import ClusterError, Interrupted, RunLocked, UsageError
from ddptrain.protocol.events import Metrics
from ddptrain.results import ownership
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import newest_verified
from ddptrain.results.errors import ResultsError
from ddptrain.results.run import Run
from ddptrain.results.run_record import (
    AttemptRecord,
    DriverRecord,
    EnvironmentValue,
    FailureRecord,
    RunStatus,
)
from ddptrain.results.run_writer import RunWriter
from tests.unit.results.conftest import Stage


def log(writer: RunWriter, event: Metrics, rank: int) -> None:
    writer.add_metrics([event], rank)
    writer.flush()


def read(writer: RunWriter) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(writer.layout.run_json.read_text())
    return record


def make(runs_dir: Path, run_id: str | None = None) -> RunWriter:
    return RunWriter.create(runs_dir, run_id, "petnames", "name: petnames\n", "petnames", world_size=2)


def test_secrets_of_the_run_are_left_out_of_its_failure_and_events(tmp_path: Path) -> None:
    with make(tmp_path) as writer:
        writer.secrets = ["hunter2"]
        writer.event({"event": "rank_failed", "message": "no hunter2 here", "more": {"trace": ["hunter2"]}})
        failure = FailureRecord(message="hunter2 is wrong", traceback="open('s3://me:other@bucket/hunter2')")
        writer.finish(RunStatus.FAILED, 1, failure)
    record, (_, event) = read(writer), writer.layout.events_jsonl.read_text().splitlines()
    assert record["failure"]["message"] == "<left out> is wrong"
    assert record["failure"]["traceback"] == "open('s3://<left out>@bucket/<left out>')"
    assert json.loads(event)["message"] == "no <left out> here"
    assert "hunter2" not in event


def test_a_run_id_can_be_chosen_once(tmp_path: Path) -> None:
    with make(tmp_path, "mine") as writer:
        writer.finish(RunStatus.SUCCEEDED, 0)
    before = writer.layout.run_json.read_bytes()
    with pytest.raises(UsageError, match=r"run mine exists already.*choose another --run-id"):
        make(tmp_path, "mine")
    assert writer.layout.run_json.read_bytes() == before


@pytest.mark.parametrize("name", ["run.lock", "events.jsonl", "metrics.jsonl"])
def test_a_run_is_not_taken_up_through_a_link(tmp_path: Path, name: str) -> None:
    with make(tmp_path, "mine") as writer:
        writer.finish(RunStatus.FAILED, 1)
    (tmp_path / "precious").write_text("precious\n")
    (writer.layout.root / name).unlink()
    (writer.layout.root / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ResultsError, match=f"{name}: "):
        RunWriter.reopen(writer.layout.root, "")
    assert (tmp_path / "precious").read_text() == "precious\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_run_is_not_created_in_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o777)
    os.chown(tmp_path / "mine", 65534, 65534)
    with pytest.raises(ResultsError, match="mine: the folder belongs to another user"):
        make(tmp_path, "mine")
    assert os.listdir(tmp_path / "mine") == []


def test_a_driver_that_was_killed_before_run_json_was_written_is_followed_by_another(tmp_path: Path) -> None:
    with make(tmp_path, "mine") as writer:
        writer.finish(RunStatus.FAILED, 1)
    writer.layout.run_json.unlink()
    with make(tmp_path, "mine") as again:
        again.finish(RunStatus.SUCCEEDED, 0)
    again.layout.run_json.unlink()
    again.layout.lock_file.unlink()  # so it may be anyone's
    with pytest.raises(UsageError, match="is not a run's folder"):
        make(tmp_path, "mine")


def elsewhere(writer: RunWriter, age_s: float) -> None:
    """Let the run look like one of a driver on another host that has touched the lock file so many seconds ago."""
    driver = DriverRecord(1, "another-host", "another-boot")
    record = dataclasses.replace(writer.record, status=RunStatus.RUNNING, driver=driver)
    writer.layout.run_json.write_text(record.to_json())
    then = time.time() - age_s
    os.utime(writer.layout.lock_file, (then, then))


def test_run_of_another_host_is_not_resumed_while_its_driver_is_alive(tmp_path: Path) -> None:
    with make(tmp_path, "mine") as writer:
        writer.finish(RunStatus.FAILED, 1)
    elsewhere(writer, 5)
    with pytest.raises(RunLocked, match="running on another host: process 1 on another-host still writes to it"):
        RunWriter.reopen(writer.layout.root, "")
    elsewhere(writer, 60)
    with RunWriter.reopen(writer.layout.root, "") as again:
        assert again.record.driver == DriverRecord.of_this_process()
        again.finish(RunStatus.SUCCEEDED, 0)


def test_of_two_hosts_that_resume_a_run_at_the_same_time_one_gets_it(tmp_path: Path) -> None:
    with make(tmp_path, "mine") as writer:
        writer.finish(RunStatus.FAILED, 1)
    elsewhere(writer, 60)
    lock = writer.layout.lock_file
    before = lock.read_bytes()

    def another_host_is_later() -> None:  # it does not see our lock
        while lock.read_bytes() in (before, b""):
            time.sleep(0.01)
        time.sleep(0.1)
        lock.write_text("process 9 on far\n")

    other = threading.Thread(target=another_host_is_later)
    other.start()
    with pytest.raises(RunLocked, match="taken over by process 9 on far"):
        RunWriter.reopen(writer.layout.root, "")
    other.join()
    assert not ownership.is_held(lock)


def test_driver_whose_run_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    lost = threading.Event()
    with make(tmp_path, "mine") as writer:
        writer.keep_heartbeat(lambda error: lost.set())
        writer.layout.lock_file.write_text("process 9 on far\n")
        assert lost.wait(30)
        before = {path: path.read_bytes() for path in writer.layout.root.glob("*.json*")}
        writer.event({"event": "late"})
        log(writer, Metrics(0, {"loss": 1.0}, 1, None), 0)
        writer.finish(RunStatus.FAILED, 6)
        assert isinstance(writer.loss, RunLocked)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_that_another_process_runs_is_refused(
    tmp_path: Path, driver: Callable[[str], subprocess.Popen[str]]
) -> None:
    driver("mine")
    with pytest.raises(RunLocked, match="run mine is running") as refused:
        make(tmp_path / "runs", "mine")
    assert refused.value.exit_code == 6


def test_an_empty_folder_is_taken_and_a_strange_one_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with make(tmp_path, "empty") as writer:
        writer.finish(RunStatus.SUCCEEDED, 0)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not a run's folder"):
        make(tmp_path, "strange")
    assert os.listdir(tmp_path / "strange") == ["thesis.tex"]


def test_secrets_of_the_ranks_never_reach_the_disk(writer: RunWriter) -> None:
    writer.update(rank_environment={"MY_TOKEN": EnvironmentValue("hunter2", "user")})
    assert "hunter2" not in writer.layout.run_json.read_text()


def test_metrics_are_lines_with_their_position(writer: RunWriter) -> None:
    log(writer, Metrics(2_500_000_000, {"train/loss": 1.5, "acc": math.nan}, 7, 0.5), 1)
    line = json.loads(writer.layout.metrics_jsonl.read_text())
    assert line == {"time_s": 2.5, "step": 7, "epoch": 0.5, "rank": 1, "attempt": 1, "train/loss": 1.5, "acc": None}


def test_a_metric_called_epoch_is_the_position_only_where_none_is_given(writer: RunWriter) -> None:
    log(writer, Metrics(0, {"epoch": 3.0, "rank": 9.0}), 1)
    log(writer, Metrics(0, {"epoch": 3.0}, epoch=4.0), 1)
    first, second = (json.loads(line) for line in writer.layout.metrics_jsonl.read_text().splitlines())
    assert (first["epoch"], first["rank"], second["epoch"]) == (3.0, 1, 4.0)


def test_last_metrics_of_a_resumed_run_are_those_that_count(writer: RunWriter, stage: Stage) -> None:
    policy = CheckpointPolicy()
    writer.go_on_from(None, policy)
    writer.update(attempts=(writer.next_attempt(None, 2),))
    for step in (1, 2, 3):
        log(writer, Metrics(0, {"loss": float(step)}, step), 0)
        if step == 2:
            log(writer, Metrics(0, {"val/loss": 20.0}, step), 1)
            writer.adopt_checkpoint(0, *stage(step), policy)
    log(writer, Metrics(0, {"val/loss": 30.0}, 3), 1)
    checkpoint = newest_verified(writer.layout, pytest.fail)
    writer.go_on_from(checkpoint, policy)
    assert writer.record.last_metrics == {"loss": 2.0, "val/loss": 20.0}
    writer.update(attempts=(*writer.record.attempts, writer.next_attempt(checkpoint, 2)))
    assert (writer.record.attempts[1].attempt, writer.record.attempts[1].resumed_from) == (2, 2)
    log(writer, Metrics(0, {"loss": 2.5}, 3), 0)
    attempts = [json.loads(line)["attempt"] for line in writer.layout.metrics_jsonl.read_text().splitlines()]
    assert attempts == [1, 1, 1, 1, 1, 2, 2]  # the first of attempt 2 says where it goes on


def test_last_metrics_have_those_that_only_the_checkpoint_has(writer: RunWriter, stage: Stage) -> None:
    for rank, value in ((0, 1.0), (1, 3.0)):
        log(writer, Metrics(0, {"train/loss": value, "lr": 0.1}, step=9), rank)
    event, source = stage(9, {"train/loss": 1.5, "val/loss": 2.5})
    writer.adopt_checkpoint(0, event, source, CheckpointPolicy())
    assert read(writer)["last_metrics"] == {"train/loss": 2.0, "val/loss": 2.5, "lr": 0.1}


def test_attempts_of_a_killed_driver_have_failed_when_the_run_continues(writer: RunWriter) -> None:
    writer.update(
        attempts=(
            AttemptRecord(1, "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", 2, "preempted"),
            AttemptRecord(2, "2026-01-01T00:02:00Z", "2026-01-01T00:03:00Z", 2),
            AttemptRecord(3, "2026-01-01T00:04:00Z", None, 2),
        )
    )
    writer.finish(RunStatus.FAILED, 1)
    writer.close()
    ended_at = Run(writer.layout.root).record.ended_at
    assert ended_at is not None
    with RunWriter.reopen(writer.layout.root, "workload: toy\n") as again:
        assert [(one.attempt, one.outcome, one.ended_at) for one in again.record.attempts] == [
            (1, "preempted", "2026-01-01T00:01:00Z"),
            (2, "failed", "2026-01-01T00:03:00Z"),
            (3, "failed", ended_at),
        ]


def test_run_is_waiting_until_it_has_ranks_and_its_status_stays_running(writer: RunWriter) -> None:
    assert (Run(writer.layout.root).shown_status, read(writer)["status"]) == ("waiting", "running")
    writer.update(waiting=False)
    assert Run(writer.layout.root).shown_status == "running"
    writer.update(waiting=True)
    writer.finish(RunStatus.CANCELLED, 130)
    assert Run(writer.layout.root).shown_status == "cancelled"


@pytest.mark.parametrize(
    ("error", "status", "exit_code", "message"),
    [
        (ClusterError("no slots"), "failed", 4, "no slots"),
        (Interrupted(15), "cancelled", 143, "interrupted by SIGTERM"),
        (KeyboardInterrupt(), "cancelled", 130, "interrupted"),
        (ZeroDivisionError("oops"), "failed", 3, "oops"),
    ],
)
def test_a_driver_that_fails_says_so_in_run_json(
    tmp_path: Path, error: BaseException, status: str, exit_code: int, message: str
) -> None:
    with pytest.raises(type(error)), make(tmp_path, "r") as writer:
        raise error
    record = read(writer)
    assert (record["status"], record["exit_code"]) == (status, exit_code)
    assert record["failure"]["message"] == message
    assert ("Traceback" in record["failure"]["traceback"]) == (exit_code == 3)


def test_a_driver_that_forgets_to_finish_has_not_succeeded(tmp_path: Path) -> None:
    with make(tmp_path, "r") as writer:
        pass
    assert (read(writer)["status"], read(writer)["exit_code"]) == ("failed", 3)


def test_continued_run_forgets_its_end_and_keeps_its_start(tmp_path: Path) -> None:
    with make(tmp_path, "r") as writer:
        writer.update(result=5, versions={"torch": "1"}, checkpoints=("step-1",))
        writer.finish(RunStatus.FAILED, 1, FailureRecord(message="no"))
    before = read(writer)
    with RunWriter.reopen(tmp_path / "r", "params: {b: 2}\n") as again:
        found = read(again)
        assert again.last_versions == {"torch": "1"} and again.layout.config_yaml.read_text() == "params: {b: 2}\n"
        again.finish(RunStatus.SUCCEEDED, 0)
    gone = ("exit_code", "ended_at", "duration_s", "failure", "result")
    assert [found[name] for name in gone] == [None] * 5
    assert (found["status"], found["waiting"], found["params"]) == ("running", True, {"b": 2})
    assert found["started_at"] == before["started_at"] and found["checkpoints"] == ["step-1"]
    assert found["earlier_s"] == before["duration_s"] and "torch" in found["versions"]


def test_run_that_is_resumed_by_a_job_keeps_its_earlier_seconds_while_it_waits(tmp_path: Path) -> None:
    with make(tmp_path, "r") as writer:
        writer.finish(RunStatus.PREEMPTED, 75)
    writer.layout.run_json.write_text(json.dumps({**read(writer), "duration_s": 100.0, "queued": {"place": 2}}))
    with RunWriter.reopen(tmp_path / "r", "") as submitted:
        submitted.enqueue(())
    waits = Run(tmp_path / "r")
    assert (waits.status, waits.duration_s, waits.record.queued) == ("queued", 100.0, None)
    with RunWriter.reopen(tmp_path / "r", "") as again:
        assert again.record.earlier_s == 100.0
