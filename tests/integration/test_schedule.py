"""Schedules with the real programs: systemd, Debian's cron, and a server that gets alarms."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests.conftest import PATIENCE_S, Cli

CONFIG = """
workload: petnames
cluster: {gpus: 2}
retrain: {model: petnames, deadline: 6h}
notify: {urls: ["env:SLACK_URL"], heartbeat: "env:CHECK_URL"}
"""
# Trains in a moment: one rank that saves a checkpoint.
SCRIPT = """
import ddptrain, torch
ddptrain.context().checkpoint(model=torch.nn.Linear(2, 1), step=1, metrics={"val/loss": 1.0})
"""
SCRIPT_CONFIG = """
workload: {script: train.py}
name: fast
cluster: {ranks: 1, gpus: 0}
retrain: {model: fast, gate: {metric: val/loss, against: none}}
"""


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, in a git repository, and folders for state and settings of their own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    (tmp_path / ".git").mkdir()
    (tmp_path / "nightly.yaml").write_text(CONFIG)
    return tmp_path


# --- systemd ---


@pytest.fixture
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if not found:
        pytest.skip("systemd is not installed")
    return found


@pytest.mark.parametrize("system", [False, pytest.param(True, marks=pytest.mark.long)], ids=["user", "system"])
def test_systemd_accepts_the_units(
    homes: Path, run_cli: Cli, analyze: str, system: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128/a%20b")
    options = ["--system"] if system else []
    added = run_cli("schedule", "add", "nightly.yaml", "--at", "0 3 1 * 1", "--as", "systemd", *options)
    assert added.rc == 0, added.stderr
    units = []
    for part in added.stdout.split("# --- ")[1:]:
        path, text = part.split("\n", 1)
        units.append(str(homes / Path(path).name))
        Path(units[-1]).write_text(text)
    assert len(units) == 2
    mode = "--system" if system else "--user"
    done = subprocess.run(
        [analyze, mode, "--man=no", "verify", *units],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(homes)},
    )
    said = [line for line in done.stderr.splitlines() if "ddptrain" in line]
    assert (done.returncode, said) == (0, []), done.stderr


# --- cron ---


@pytest.fixture
def cron_daemon() -> Iterator[None]:
    """Debian's cron, running; the crontab of this user is restored afterwards."""
    cron = shutil.which("cron", path="/usr/sbin:/sbin")
    if not cron or not shutil.which("crontab") or os.geteuid() != 0:
        pytest.skip("cron is not installed, or this user can't start it")
    before = subprocess.run(["crontab", "-l"], capture_output=True, text=True, timeout=20)
    runs_already = any(
        process.info["name"] == "cron" and process.info["status"] != psutil.STATUS_ZOMBIE
        for process in psutil.process_iter(["name", "status"])
    )
    daemon = None if runs_already else subprocess.Popen([cron, "-f"], start_new_session=True)
    yield
    if before.returncode == 0:
        subprocess.run(["crontab", "-"], input=before.stdout, text=True, check=True, timeout=20)
    else:
        subprocess.run(["crontab", "-r"], capture_output=True, timeout=20)
    if daemon is not None:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(PATIENCE_S)


def processes_below(folder: Path) -> list[psutil.Process]:
    """The processes that a line of the crontab has started in a folder."""
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if any(str(folder) in word for word in process.info["cmdline"] or ())]


@pytest.mark.long
@pytest.mark.slow
def test_cron_retrains_at_the_next_minute(cron_daemon: None, homes: Path, run_cli: Cli) -> None:
    (homes / "train.py").write_text(SCRIPT)
    (homes / "fast.yaml").write_text(SCRIPT_CONFIG)
    added = run_cli("schedule", "add", "fast.yaml", "--at", "* * * * *", "--as", "cron", "--install")
    assert added.rc == 0, added.stderr
    started = datetime.now(UTC)
    deadline = time.monotonic() + 60 + PATIENCE_S
    while (
        not (last := json.loads(run_cli("schedule", "list", "--json").stdout)[0]["last"]) or last["status"] == "running"
    ):
        assert time.monotonic() < deadline, last
        time.sleep(2)
    assert run_cli("schedule", "remove", "fast").rc == 0
    assert "ddptrain schedule fast" not in subprocess.run(["crontab", "-l"], capture_output=True, text=True).stdout
    psutil.wait_procs(processes_below(homes), PATIENCE_S)
    record = json.loads((homes / "models" / "fast" / "retrainings" / "000001.json").read_text())
    assert record["status"] == "promoted"
    first = started.replace(second=0, microsecond=0) + timedelta(minutes=1)
    assert record["slot"] == first.isoformat().replace("+00:00", "Z")
    assert run_cli("schedule", "list", "--json").stdout == "[]\n"


# --- Alarms ---
