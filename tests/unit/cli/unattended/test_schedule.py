"""`ddptrain schedule`: what each command prints, writes and refuses, with the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from ddptrain.cli.unattended.schedule import app
from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.results.run_record import utc_now
from ddptrain.retrain.records import RetrainRecord, RetrainRecords
from ddptrain.schedule.due_times import host_zone

CRONTAB = """#!/bin/sh
if [ "$1" = -l ]; then cat "{0}/crontab"; else cat > "{0}/crontab"; fi
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration, a program `crontab`, and state of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("SLACK_URL", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "crontab").write_text(CRONTAB.format(tmp_path))
    (tmp_path / "bin" / "crontab").chmod(0o755)
    (tmp_path / "nightly.yaml").write_text("workload: petnames\nretrain: {model: petnames}\n")
    return tmp_path


def schedule(*arguments: str) -> Result:
    root = typer.Typer(result_callback=lambda code, **_: (_ for _ in ()).throw(typer.Exit(code or 0)))
    root.add_typer(app, name="schedule")
    return CliRunner().invoke(root, ["schedule", *arguments])


def refused(*arguments: str) -> str:
    done = schedule(*arguments)
    assert isinstance(done.exception, DdptrainError), done.output
    assert done.exception.exit_code == ExitCode.USAGE
    return str(done.exception)


def install(*options: str) -> Result:
    done = schedule("add", "nightly.yaml", "--at", "hourly", "--as", "cron", "--install", *options)
    assert done.exit_code == 0, done.output
    return done


def test_add_prints_and_changes_nothing(place: Path) -> None:
    done = schedule("add", "nightly.yaml", "--at", "Mon 03:00", "--as", "cron")
    assert done.exit_code == 0
    assert f"{place}/config/ddptrain/schedules/petnames.sh # ddptrain schedule petnames" in done.stdout
    assert f"--slot 'Mon 03:00 {host_zone()}'" in done.stdout
    assert "nothing is installed" in done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["bin", "nightly.yaml"]


def test_add_writes_files_into_a_folder(place: Path) -> None:
    done = schedule("add", "nightly.yaml", "--at", "03:00", "--as", "cron", "--output", "out")
    assert (done.exit_code, done.stdout) == (0, "")
    assert (place / "out" / "petnames.sh").stat().st_mode & 0o777 == 0o700
    assert (place / "out" / "petnames.crontab").read_text().startswith(f"0 3 * * * {place}/out/petnames.sh # ")
    assert schedule("list", "--json").stdout == "[]\n"


def test_installed_schedule_is_listed_and_removed(place: Path) -> None:
    install("--jitter", "5m")
    assert (place / "crontab").read_text().startswith("0 * * * * ")
    [entry] = json.loads(schedule("list", "--json").stdout)
    assert (entry["name"], entry["target"], entry["state"]) == ("petnames", "cron", "waiting")
    assert (entry["cron"], entry["jitter_s"], entry["missed"]) == ("0 * * * *", 300, [])
    header, row = schedule("list").stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "WHEN", "WITH", "LAST", "NEXT", "MISSED", "STATE"]
    assert row.split()[:2] == ["petnames", "petnames"]
    assert schedule("remove", "petnames").stdout == "removed the schedule petnames from cron\n"
    assert (place / "crontab").read_text() == ""
    assert schedule("list", "--json").stdout == "[]\n"
    assert "there is no schedule petnames" in refused("remove", "petnames")


@pytest.mark.parametrize(("notify", "tells"), [("", False), ("notify: {urls: ['env:SLACK_URL']}\n", True)])
def test_installation_says_if_nobody_is_told_of_lateness(place: Path, notify: str, tells: bool) -> None:
    (place / "nightly.yaml").write_text("workload: petnames\nretrain: {model: petnames}\n" + notify)
    *_, last = install().output.splitlines()
    assert last.startswith("run `ddptrain schedule check --quiet`") and ("notify.urls" in last) is not tells


def test_same_schedule_is_replaced_and_another_one_is_refused(place: Path) -> None:
    install()
    install()
    assert (place / "crontab").read_text().count("ddptrain schedule petnames") == 2
    (place / "other.yaml").write_text((place / "nightly.yaml").read_text())
    message = refused("add", "other.yaml", "--at", "hourly", "--as", "cron", "--install")
    assert f"there is a schedule petnames already, of {place}/nightly.yaml with cron" in message
    install("--name", "second")
    assert [entry["name"] for entry in json.loads(schedule("list", "--json").stdout)] == ["petnames", "second"]


def test_failed_installation_changes_nothing(place: Path) -> None:
    tool = place / "bin" / "crontab"
    works = tool.read_text()
    tool.write_text('#!/bin/sh\n[ "$1" = -l ] || exit 1\n')
    arguments = ("add", "nightly.yaml", "--as", "cron", "--install", "--at")
    assert "crontab - failed" in str(schedule(*arguments, "hourly").exception)
    assert schedule("list", "--json").stdout == "[]\n"
    tool.write_text(works)
    install()
    tool.write_text('#!/bin/sh\n[ "$1" = -l ] || exit 1\n')
    assert "crontab - failed" in str(schedule(*arguments, "03:00").exception)
    assert [entry["at"] for entry in json.loads(schedule("list", "--json").stdout)] == ["hourly"]
    assert "hourly" in (place / "config" / "ddptrain" / "schedules" / "petnames.sh").read_text()


def test_file_for_secrets_is_prepared_without_values(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_URL", "json://hunter22hunter22")
    with (place / "nightly.yaml").open("a") as file:
        file.write('notify: {urls: ["env:SLACK_URL"]}\n')
    done = install()
    secrets = place / "config" / "ddptrain" / "petnames.env"
    assert f"write the values of SLACK_URL into {secrets}" in done.stderr
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert "# SLACK_URL=\n" in secrets.read_text()
    for path in (path for path in place.rglob("*") if path.is_file()):
        assert b"hunter22" not in path.read_bytes(), path
    secrets.write_text("SLACK_URL=json://hunter22\n")
    assert "write the values" not in install().stderr
    assert secrets.read_text() == "SLACK_URL=json://hunter22\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at", "soon"], '--at is "soon", which is not a time'),
        (["--at", "03:00", "--timezone", "Mars/Base"], '"Mars/Base" is not a time zone'),
        (["--at", "03:00", "--jitter", "soon"], '--jitter: the text "soon" is not a duration'),
        (["--at", "03:00", "--jitter", "24h"], "make it shorter"),
        (["--at", "03:00", "--name", "../x"], "is not a name of a schedule"),
        (["--at", "03:00", "--system"], "--system is for --as systemd, not for cron"),
        (["--at", "03:00", "--install", "--output", "x"], "--install and --output exclude each other"),
        (["--at", "03:00", "--timezone", "Asia/Kolkata"], "cron runs in the time zone of the host"),
    ],
)
def test_wrong_options_are_refused(place: Path, options: list[str], message: str) -> None:
    assert message in refused("add", "nightly.yaml", "--as", "cron", *options)
    assert sorted(path.name for path in place.iterdir()) == ["bin", "nightly.yaml"]


def test_missing_configuration_is_refused(place: Path) -> None:
    assert "there is no such file" in refused("add", "missing.yaml", "--at", "03:00", "--as", "cron")


def succeed(place: Path) -> None:
    records = RetrainRecords(ModelRegistry.open(str(place / "models")).folder, "petnames")
    records.create(RetrainRecord(0, "petnames", utc_now(), "", status="unchanged", ended_at=utc_now()))


def test_check_of_a_configuration_at_a_time(place: Path) -> None:
    arguments = ("check", "nightly.yaml", "--at", "every 1m", "--grace", "1s")
    late = schedule(*arguments)
    assert late.exit_code == ExitCode.LATE
    assert late.stdout.startswith("nightly: late: no retraining has succeeded since the scheduled time ")
    succeed(place)
    fine = schedule(*arguments, "--grace", "1m")
    assert (fine.exit_code, fine.stdout[:26]) == (0, "nightly: ok: last success ")
    assert schedule(*arguments, "--grace", "1m", "--quiet").output == ""


def test_check_of_installed_schedules(place: Path) -> None:
    none = schedule("check")
    assert (none.exit_code, none.stdout) == (0, "")
    assert "no schedules are installed" in none.stderr
    install()
    waiting = schedule("check")
    assert (waiting.exit_code, waiting.stdout[:28]) == (0, "petnames: waiting: first at ")
    file = place / "state" / "ddptrain" / "schedules" / "petnames.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "added_at": "2020-01-01T00:00:00.000Z"}))
    assert schedule("check", "nightly.yaml", "--grace", "0s").exit_code == ExitCode.LATE
    [found] = json.loads(schedule("check", "--grace", "0s", "--json").stdout)
    assert (found["state"], found["last_success"], found["notified"]) == ("late", None, [])


def test_check_that_cannot_read_is_an_error(place: Path) -> None:
    install()
    (place / "nightly.yaml").unlink()
    done = schedule("check", "--quiet")
    assert (done.exit_code, done.stdout) == (ExitCode.CLUSTER, "")
    assert "petnames: " in done.stderr and "there is no such file" in done.stderr


def test_damaged_schedule_does_not_hide_the_others(place: Path) -> None:
    install()
    damaged = place / "state" / "ddptrain" / "schedules" / "dogs.json"
    damaged.write_text("{")
    for command in ("check", "list"):
        done = schedule(command)
        assert done.exit_code == ExitCode.CLUSTER
        assert "petnames" in done.stdout
        assert f"ddptrain: {damaged} is damaged" in done.stderr


def test_check_of_an_unknown_configuration_needs_a_time(place: Path) -> None:
    assert "no schedule of" in refused("check", "nightly.yaml")
    assert "--at needs a CONFIG" in refused("check", "--at", "03:00")
    assert "--timezone is for --at" in refused("check", "--timezone", "UTC")
    assert "--grace: " in refused("check", "--grace", "soon")
