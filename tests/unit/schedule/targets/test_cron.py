"""cron: the script, the lines of the crontab, and the lines of the user around them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.schedule.targets import cron
from ddptrain.schedule.targets.cron import Cron
from tests.unit.schedule.jobs import make_job

SCRIPT = """#!/bin/sh
# ddptrain: retrains petnames (Mon 03:00 Europe/Berlin). `ddptrain schedule remove petnames` deletes it.
cd /srv/pets || exit 2
export PATH=/opt/venv/bin:/usr/bin
if [ -r /home/me/.config/ddptrain/petnames.env ]; then set -a; . /home/me/.config/ddptrain/petnames.env; set +a; fi
log=/home/me/.state/ddptrain/schedules/petnames.log
mkdir -p "$(dirname "$log")"
if [ "$(stat -c %s "$log" 2>/dev/null || echo 0)" -gt 5000000 ]; then mv -f "$log" "$log.1"; fi
sleep "$(shuf -i 0-600 -n 1)"
end=$({
  date '+--- %F %T %z'
  /opt/venv/bin/ddptrain retrain /srv/pets/nightly.yaml --slot 'Mon 03:00 Europe/Berlin' --output plain 2>&1
  echo "exit code $?"
} | tee -a "$log" | tail -n 20)
code=${end##*exit code }
if [ "$code" -ne 0 ] && [ "$code" -ne 8 ]; then printf '%s\\n' "exit code $code; the end of $log:" "$end"; fi
exit "$code"
"""
BEGAN = r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
CRONTAB = """0 3 * * 1 /home/me/.config/ddptrain/schedules/petnames.sh # ddptrain schedule petnames
@reboot /home/me/.config/ddptrain/schedules/petnames.sh # ddptrain schedule petnames
"""


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/.config")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/.state")
    monkeypatch.setattr(cron, "host_zone", lambda: "Europe/Berlin")


@pytest.fixture
def crontab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The content of the crontab of a program like cron's; it does not exist yet."""
    tool, table = tmp_path / "bin" / "crontab", tmp_path / "crontab"
    tool.parent.mkdir()
    tool.write_text(
        f"""#!/bin/sh
        if [ "$1" = -l ]; then cat {table} 2>/dev/null || {{ echo "no crontab for ada" >&2; exit 1; }}
        elif [ -e {tmp_path}/refuse ]; then echo "errors in crontab file" >&2; exit 1
        else cat > {table}; fi
        """
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return table


def test_script_and_lines() -> None:
    script, lines = Cron().parts(make_job(jitter_s=600), None)
    assert script.text == SCRIPT
    assert lines.text == CRONTAB
    assert (script.mode, lines.path) == (0o700, None)


def test_another_zone_than_that_of_the_host_is_refused() -> None:
    with pytest.raises(UsageError, match="cron runs in the time zone of the host, Europe/Berlin, not in UTC"):
        Cron().parts(make_job(zone="UTC"), None)
    assert Cron().parts(make_job(zone="Europe/Paris"), None)  # the same times


def test_percent_sign_of_a_path_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/100% ada")
    _, lines = Cron().parts(make_job(), None)
    assert lines.text.startswith(r"0 3 * * 1 '/home/100\% ada/ddptrain/schedules/petnames.sh' # ddptrain")


def test_own_lines_are_replaced_and_those_of_the_user_stay(crontab: Path) -> None:
    mine = "MAILTO=ada\n# ddptrain schedule petnames is above\n5 4 * * * backup # ddptrain schedule petnames2\n"
    crontab.write_text(mine)
    target, job = Cron(), make_job()
    for _ in range(2):
        parts = target.parts(job, None)
        target.install(job, parts)
        assert crontab.read_text() == parts[1].text + mine
    script = parts[0].path
    assert script is not None
    assert script.stat().st_mode & 0o777 == 0o700
    target.remove("petnames", [script])
    assert crontab.read_text() == mine
    assert not script.exists()


def test_first_crontab_of_a_user(crontab: Path) -> None:
    target, job = Cron(), make_job()
    parts = target.parts(job, None)
    target.install(job, parts)
    assert crontab.read_text() == parts[1].text


def test_refused_crontab_leaves_nothing(crontab: Path) -> None:
    (crontab.parent / "refuse").touch()
    target, job = Cron(), make_job()
    with pytest.raises(ClusterError, match="crontab - failed: errors in crontab file"):
        target.install(job, target.parts(job, None))
    assert list((crontab.parent / "config").rglob("*.sh")) == []


def test_crontab_that_cannot_be_read_is_not_replaced(crontab: Path) -> None:
    crontab.write_text("5 4 * * * backup\n")
    tool = crontab.parent / "bin" / "crontab"
    tool.write_text('#!/bin/sh\n[ "$1" = -l ] && { echo "crontab: out of memory" >&2; exit 1; }\n: > ' + f"{crontab}\n")
    target, job = Cron(), make_job()
    with pytest.raises(ClusterError, match="crontab -l failed: crontab: out of memory"):
        target.install(job, target.parts(job, None))
    with pytest.raises(ClusterError, match="out of memory"):
        target.remove("petnames", [])
    assert crontab.read_text() == "5 4 * * * backup\n"


def test_missing_cron_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="crontab is not installed here: install the package cron"):
        Cron().install(make_job(), Cron().parts(make_job(), None))
    assert list(tmp_path.rglob("*.sh")) == []


def run_script(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\n{program}\n")
    command.chmod(0o755)
    job = make_job(folder=tmp_path, command=(str(command), "a b"))
    script = Cron().parts(job, tmp_path)[0]
    path = tmp_path / "petnames.sh"
    path.write_text(script.text)
    path.chmod(script.mode)
    return subprocess.run([path], capture_output=True, text=True, env={"HOME": str(tmp_path)}, timeout=20)


def test_script_reads_secrets_and_writes_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ddptrain").mkdir()
    (tmp_path / "ddptrain" / "petnames.env").write_text("SLACK_URL='https://x/y z'\n")
    done = run_script(tmp_path, 'echo "$1 $SLACK_URL $PATH $PWD"')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = tmp_path / "state" / "ddptrain" / "schedules" / "petnames.log"
    began, line, end = log.read_text().splitlines()
    assert re.fullmatch(BEGAN, began) and end == "exit code 0"
    assert line == f"a b https://x/y z /opt/venv/bin:/usr/bin {tmp_path}"


def test_script_keeps_the_exit_code_and_prints_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log = tmp_path / "state" / "ddptrain" / "schedules" / "petnames.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * 5_000_001)
    done = run_script(tmp_path, "echo out of memory >&2; exit 7")
    head, _, tail = done.stdout.partition("\n")
    assert (done.returncode, head, tail) == (7, f"exit code 7; the end of {log}:", log.read_text())
    assert re.fullmatch(f"{BEGAN}\nout of memory\nexit code 7\n", tail)
    assert Path(f"{log}.1").stat().st_size == 5_000_001


def test_log_that_cannot_be_written_stops_nothing_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: what cron mails is the output of this night."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log = tmp_path / "state" / "ddptrain" / "schedules" / "petnames.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    done = run_script(tmp_path, r"echo 'not enough \disk space'; exit 4")
    assert done.returncode == 4
    assert done.stdout.startswith(f"exit code 4; the end of {log}:\n---")
    assert done.stdout.endswith("\nnot enough \\disk space\nexit code 4\n")
    assert "petnames.log: No space left on device" in done.stderr


def test_deadline_is_no_failure_that_cron_mails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = run_script(tmp_path, "echo saved; exit 8")
    assert (done.returncode, done.stdout, done.stderr) == (8, "", "")
