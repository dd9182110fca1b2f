"""Late models in a registry: what is found, who is told, and how often."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.notify import sender
from ddptrain.notify.messages import Message
from ddptrain.notify.sender import Delivery
from ddptrain.results import ownership
from ddptrain.results.remote.lease import LOCK
from ddptrain.results.run_record import utc_now
from ddptrain.retrain.records import RetrainRecord, RetrainRecords
from ddptrain.schedule import monitor
from ddptrain.schedule.entries import Entry
from ddptrain.schedule.monitor import Finding, State, look

CONFIG = """
workload: petnames
retrain: {model: petnames}
notify: {urls: ["env:SLACK_URL"]}
"""
NOW = datetime(2026, 11, 22, 12, 30, tzinfo=UTC)
GRACE = timedelta(minutes=10)


class Sent:
    """Takes the place of the sender: what was sent, and the variables at that time."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.variables: list[str | None] = []
        self.problem = ""

    def __call__(self, message: Message, urls: Sequence[str], **_: Any) -> list[Delivery]:
        self.messages.append(message)
        self.variables.append(os.environ.get("SLACK_URL"))
        return [Delivery(url, self.problem) for url in urls]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    made = Sent()
    monkeypatch.setattr(sender, "send", made)
    monkeypatch.setattr(monitor, "_now", lambda: NOW)
    return made


@pytest.fixture
def watched(tmp_path: Path, sent: Sent) -> Entry:
    work = tmp_path / "work"
    work.mkdir()
    (work / "nightly.yaml").write_text(CONFIG)
    return Entry("petnames", "", str(work / "nightly.yaml"), str(work), "hourly", "UTC", target="", added_at="")


def add(work: Path | str, **fields: Any) -> None:
    records = RetrainRecords(ModelRegistry.open(f"{work}/models").folder, "petnames")
    records.create(RetrainRecord(number=0, model="petnames", run_id="", **fields))


def succeeded_at(work: Path | str, time: str) -> None:
    add(work, started_at=f"2026-11-22T{time}:00.000Z", ended_at=f"2026-11-22T{time}:30.000Z", status="promoted")


def state_of(finding: Finding) -> State:
    assert finding.judgement is not None, finding.problem
    return finding.judgement.state


def test_model_without_a_retraining_is_late(watched: Entry) -> None:
    finding = look(watched, GRACE)
    assert (state_of(finding), finding.model, finding.last) == (State.LATE, "petnames", None)
    assert finding.next == datetime(2026, 11, 22, 13, tzinfo=UTC)


def test_success_since_the_scheduled_time_is_found(watched: Entry) -> None:
    succeeded_at(watched.workdir, "12:01")
    assert state_of(look(watched, GRACE)) is State.OK


def test_grace_and_jitter_are_added(watched: Entry) -> None:
    succeeded_at(watched.workdir, "11:30")
    assert state_of(look(watched, timedelta(minutes=29))) is State.LATE
    assert state_of(look(watched, timedelta(minutes=31))) is State.OK
    assert state_of(look(dataclasses.replace(watched, jitter_s=120), timedelta(minutes=29))) is State.OK


@pytest.mark.parametrize("folder", ["", "000001"])  # of the model, or with `overlap: allow` of its retraining
def test_model_with_a_held_lock_is_running(watched: Entry, folder: str) -> None:
    add(watched.workdir, started_at="2026-11-22T12:00:01.000Z")
    assert state_of(look(watched, GRACE)) is State.LATE
    place = Path(watched.workdir) / "models" / "petnames" / "retrainings" / folder
    place.mkdir(exist_ok=True)
    held = ownership.take(place / LOCK)
    try:
        assert state_of(look(watched, GRACE)) is State.RUNNING
    finally:
        os.close(held)
    assert state_of(look(watched, GRACE)) is State.LATE


def test_users_are_told_once_until_the_next_success(
    watched: Entry, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded_at(watched.workdir, "09:01")
    assert look(watched, GRACE, notify=True).notified == ("env:SLACK_URL",)
    assert look(watched, GRACE, notify=True).notified == ()
    assert len(sent.messages) == 1
    assert "petnames" in sent.messages[0].title
    assert "the last success was 2026-11-22 09:01 UTC" in sent.messages[0].text
    # A success ends the state; the next time without one is told again. `late` was recorded at the real time.
    later = datetime.fromisoformat(utc_now()) + timedelta(hours=1)
    add(watched.workdir, started_at=later.isoformat(), ended_at=later.isoformat(), status="unchanged")
    monkeypatch.setattr(monitor, "_now", lambda: later + timedelta(hours=3))
    assert look(watched, GRACE, notify=True).notified == ("env:SLACK_URL",)
    assert len(sent.messages) == 2


def test_message_that_nobody_got_is_sent_again(watched: Entry, sent: Sent) -> None:
    sent.problem = "the server does not answer"
    finding = look(watched, GRACE, notify=True)
    assert finding.notified == ()
    assert finding.warnings == ("message not delivered to env:SLACK_URL: the server does not answer",)
    look(watched, GRACE, notify=True)
    assert len(sent.messages) == 2


@pytest.mark.parametrize("notify", ["on: [failed]\n  urls: [json://x]", "urls: []"])
def test_nobody_is_told_who_does_not_want_it(watched: Entry, sent: Sent, notify: str) -> None:
    Path(watched.config).write_text(f"workload: petnames\nretrain: {{model: petnames}}\nnotify:\n  {notify}\n")
    assert state_of(look(watched, GRACE, notify=True)) is State.LATE
    assert sent.messages == []


def installed_with_secrets(watched: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    (folder / "ddptrain").mkdir()
    file = folder / "ddptrain" / "petnames.env"
    file.write_text("SLACK_URL=json://here\n")
    file.chmod(0o600)
    return dataclasses.replace(watched, added_at="2026-11-22T08:30:00.000Z")


def test_secret_variables_are_set_for_the_message_only(
    watched: Entry, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLACK_URL", raising=False)
    installed = installed_with_secrets(watched, tmp_path, monkeypatch)
    folder = Path.cwd()
    look(installed, GRACE, notify=True)
    assert sent.variables == ["json://here"]
    assert "SLACK_URL" not in os.environ
    assert Path.cwd() == folder


def test_variable_of_the_environment_wins(
    watched: Entry, sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACK_URL", "json://there")
    installed = installed_with_secrets(watched, tmp_path, monkeypatch)
    look(installed, GRACE, notify=True)
    assert (sent.variables, os.environ["SLACK_URL"]) == (["json://there"], "json://there")


def test_registry_of_the_environment_is_used(watched: Entry, tmp_path: Path) -> None:
    succeeded_at(tmp_path, "12:01")
    assert state_of(look(dataclasses.replace(watched, models_dir=str(tmp_path / "models")), GRACE)) is State.OK


def break_config(watched: Entry) -> None:
    Path(watched.config).write_text("workload: petnames\nretrain: {}\n")


def remove_config(watched: Entry) -> None:
    Path(watched.config).unlink()


def remove_folder(watched: Entry) -> None:
    Path(watched.config).unlink()
    Path(watched.workdir).rmdir()


def damage_record(watched: Entry) -> None:
    succeeded_at(watched.workdir, "12:01")
    (Path(watched.workdir) / "models" / "petnames" / "retrainings" / "000001.json").write_text("{")


def drop_section(watched: Entry) -> None:
    Path(watched.config).write_text("workload: petnames\n")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (break_config, "retrain.model: is required"),
        (remove_config, "there is no such file"),
        (remove_folder, "cannot enter the folder"),
        (damage_record, "000001.json is damaged"),
        (drop_section, "has no section retrain"),
    ],
)
def test_problem_is_one_line(watched: Entry, harm: Any, message: str) -> None:
    harm(watched)
    finding = look(watched, GRACE)
    assert finding.judgement is None
    assert message in finding.problem
    assert "\n" not in finding.problem
    assert not finding.is_late


def test_missed_times_are_counted_since_the_installation(watched: Entry) -> None:
    succeeded_at(watched.workdir, "10:01")
    installed = dataclasses.replace(watched, added_at="2026-11-22T08:30:00.000Z")
    missed = look(installed, GRACE, with_missed=True).missed
    assert missed == tuple(datetime(2026, 11, 22, hour, tzinfo=UTC) for hour in (9, 11, 12))


def test_killed_retraining_does_not_hide_missed_times(watched: Entry) -> None:
    add(watched.workdir, started_at="2026-11-22T10:00:01.000Z", slot="2026-11-22T10:00:00Z")
    installed = dataclasses.replace(watched, added_at="2026-11-22T09:30:00.000Z")
    missed = look(installed, GRACE, with_missed=True).missed
    assert missed == tuple(datetime(2026, 11, 22, hour, tzinfo=UTC) for hour in (11, 12))
