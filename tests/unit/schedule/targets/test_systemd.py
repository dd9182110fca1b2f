"""systemd: the units, and the calendar events of cron expressions."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError
from ddptrain.schedule.targets.systemd import Systemd, on_calendar
from tests.unit.schedule.jobs import make_job

SERVICE = """[Unit]
Description=ddptrain: retrains petnames (Mon 03:00 Europe/Berlin)

[Service]
Type=exec
WorkingDirectory=/srv/pets
Environment=PATH=/opt/venv/bin:/usr/bin
EnvironmentFile=-/home/me/.config/ddptrain/petnames.env
ExecStart=/opt/venv/bin/ddptrain retrain /srv/pets/nightly.yaml --slot "Mon 03:00 Europe/Berlin" --output plain
SuccessExitStatus=8
RestartForceExitStatus=75
RestartSec=60
KillMode=mixed
TimeoutStopSec=90
"""
TIMER = """[Unit]
Description=ddptrain: retrains petnames (Mon 03:00 Europe/Berlin)

[Timer]
OnCalendar=Mon *-*-* 03:00:00 Europe/Berlin
Persistent=true
AccuracySec=1s
RandomizedDelaySec=600

[Install]
WantedBy=timers.target
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/.config")


def test_units() -> None:
    service, timer = Systemd().parts(make_job(jitter_s=600, stop_s=90), None)
    assert (service.text, timer.text) == (SERVICE, TIMER)
    assert service.path == Path("/home/me/.config/systemd/user/ddptrain-petnames.service")
    assert timer.path == Path("/home/me/.config/systemd/user/ddptrain-petnames.timer")


def test_units_of_the_system_name_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    service, timer = Systemd(system=True).parts(make_job(), None)
    assert "\nUser=ada\n" in service.text
    assert timer.path == Path("/etc/systemd/system/ddptrain-petnames.timer")


def test_special_characters_are_escaped() -> None:
    folder = Path('/home/me/100% "my" $pets')
    service, _ = Systemd().parts(make_job(folder=folder, environment={"A": "x y%"}), None)
    assert 'WorkingDirectory=/home/me/100%% "my" $pets\n' in service.text
    assert 'Environment="A=x y%%"\n' in service.text
    assert r'"/home/me/100%% \"my\" $$pets/nightly.yaml"' in service.text


@pytest.mark.parametrize(
    ("cron", "events"),
    [
        ("* * * * *", ["*-*-* *:*:00 UTC"]),
        ("*/30 0-2 * * *", ["*-*-* 00,01,02:00,30:00 UTC"]),
        ("0 3 * * 1,4", ["Mon,Thu *-*-* 03:00:00 UTC"]),
        ("30 4 1,15 2 *", ["*-02-01,15 04:30:00 UTC"]),
        ("0 3 1 * 0", ["*-*-01 03:00:00 UTC", "Sun *-*-* 03:00:00 UTC"]),
    ],
)
def test_calendar_events(cron: str, events: list[str]) -> None:
    assert on_calendar(cron, "UTC") == events


def test_failed_installation_leaves_no_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    target, job = Systemd(), make_job()
    parts = target.parts(job, None)
    with pytest.raises(ClusterError, match="systemctl --user daemon-reload failed: Failed to connect to bus"):
        target.install(job, parts)
    assert list((tmp_path / "systemd" / "user").iterdir()) == []


def test_installed_timer_is_enabled_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    target, job = Systemd(), make_job()
    parts = target.parts(job, None)
    target.install(job, parts)
    files = [part.path for part in parts if part.path]
    assert [file.read_text() for file in files] == [part.text for part in parts]
    target.remove("petnames", files)
    assert not any(file.exists() for file in files)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now ddptrain-petnames.timer",
        "--user disable --now ddptrain-petnames.timer",
        "--user daemon-reload",
    ]
