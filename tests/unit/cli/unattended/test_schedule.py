"""`ddptrain schedule` with programs in place of cron and systemd: what it prints, installs, lists and refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from ddptrain.cli.unattended import schedules as app
from ddptrain.errors import ClusterError, DdptrainError, ExitCode, UsageError
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords

CRONTAB = """#!/bin/sh
if [ -e {0}/broken ]; then echo "crontab: out of memory" >&2; exit 1; fi
if [ "$1" = -l ]; then cat {0}/crontab 2>/dev/null || {{ echo "no crontab for ada" >&2; exit 1; }}
elif [ -e {0}/refuse ]; then echo "errors in crontab file" >&2; exit 1
else cat > {0}/crontab; fi
"""
SYSTEMCTL = """#!/bin/sh
echo "$@" >> {0}/calls
if [ -e {0}/refuse ]; then echo "Failed to connect to bus" >&2; exit 1; fi
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration, programs that stand for crontab and systemctl, and own state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("SLACK_URL", raising=False)
    (tmp_path / "bin").mkdir()
    for name, text in (("crontab", CRONTAB), ("systemctl", SYSTEMCTL)):
        (tmp_path / "bin" / name).write_text(text.format(tmp_path))
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "nightly.yaml").write_text("workload: petnames\nretrain: {model: petnames}\nfailure: {grace_s: 45}\n")
    return tmp_path


def schedule(*arguments: str) -> Result:
    root = typer.Typer(result_callback=lambda code, **_: (_ for _ in ()).throw(typer.Exit(code or 0)))
    root.add_typer(app, name="schedule")
    return CliRunner().invoke(root, ["schedule", *arguments])


def refused(*arguments: str, error: type[DdptrainError] = UsageError) -> str:
    done = schedule(*arguments)
    assert isinstance(done.exception, error), done.output
    return str(done.exception)


def install(at: str = "0 * * * *", target: str = "cron", *options: str) -> Result:
    done = schedule("add", "nightly.yaml", "--at", at, "--as", target, "--install", *options)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done


def listed() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(schedule("list", "--json").stdout)
    return found


def test_add_prints_and_changes_nothing(place: Path) -> None:
    done = schedule("add", "nightly.yaml", "--at", "0 3 * * 1", "--as", "cron")
    assert done.exit_code == 0
    assert f"0 3 * * 1 {place}/config/ddptrain/schedules/petnames.sh # ddptrain schedule petnames" in done.stdout
    assert re.search(r"retrain \S+/nightly.yaml --slot '0 3 \* \* 1 \S+' --output plain", done.stdout)
    assert "nothing is installed" in done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["bin", "nightly.yaml"]


def test_installed_schedule_is_listed_and_removed_and_lines_of_the_user_stay(place: Path) -> None:
    mine = "MAILTO=ada\n# ddptrain schedule petnames is above\n5 4 * * * backup # ddptrain schedule petnames2\n"
    (place / "crontab").write_text(mine)
    for _ in range(2):  # a second time it replaces its own lines
        install()
        lines = (place / "crontab").read_text().removesuffix(mine).splitlines()
        assert [line.split(" /")[0] for line in lines] == ["0 * * * *", "@reboot"]
    (entry,) = listed()
    assert (entry["name"], entry["target"], entry["last"]) == ("petnames", "cron", None)
    header, row = schedule("list").stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "WHEN", "WITH", "LAST", "NEXT"]
    assert row.split()[:2] == ["petnames", "petnames"]
    assert schedule("remove", "petnames").stdout == "removed the schedule petnames from cron\n"
    assert (place / "crontab").read_text() == mine and listed() == []
    assert not list((place / "config").rglob("*.sh"))
    assert "there is no schedule petnames" in refused("remove", "petnames")


def test_schedule_of_another_configuration_is_not_replaced(place: Path) -> None:
    install()
    (place / "other.yaml").write_text((place / "nightly.yaml").read_text())
    message = refused("add", "other.yaml", "--at", "0 * * * *", "--as", "cron", "--install")
    assert f"there is a schedule petnames already, of {place}/nightly.yaml with cron" in message
    install("0 * * * *", "cron", "--name", "second")
    assert [entry["name"] for entry in listed()] == ["petnames", "second"]


@pytest.mark.parametrize(("target", "says"), [("cron", "errors in crontab file"), ("systemd", "connect to bus")])
def test_failed_installation_changes_nothing(place: Path, target: str, says: str) -> None:
    arguments = ("add", "nightly.yaml", "--as", target, "--install", "--at")
    (place / "refuse").touch()
    assert says in refused(*arguments, "0 * * * *", error=ClusterError)
    assert listed() == [] and not [path for path in (place / "config").rglob("*petnames*") if path.is_file()]
    (place / "refuse").unlink()
    install("0 * * * *", target)
    before = {path: path.read_bytes() for path in (place / "config").rglob("*") if path.is_file()}
    (place / "refuse").touch()
    assert says in refused(*arguments, "0 3 * * *", error=ClusterError)
    assert [str(entry["at"])[:9] for entry in listed()] == ["0 * * * *"]
    assert {path: path.read_bytes() for path in (place / "config").rglob("*") if path.is_file()} == before


def test_crontab_that_cannot_be_read_is_not_replaced(place: Path) -> None:
    (place / "broken").touch()
    arguments = ("add", "nightly.yaml", "--as", "cron", "--install", "--at", "0 3 * * *")
    assert "crontab -l failed: crontab: out of memory" in refused(*arguments, error=ClusterError)
    (place / "bin" / "crontab").unlink()
    if not shutil.which("crontab"):
        assert "crontab is not installed here: install the package cron" in refused(*arguments)


def test_units_of_systemd_are_enabled_and_removed(place: Path) -> None:
    install("0 3 1 * 1 Europe/Berlin", "systemd")
    units = place / "config" / "systemd" / "user"
    service, timer = (units / f"ddptrain-petnames.{kind}" for kind in ("service", "timer"))
    assert "OnCalendar=*-*-01 03:00:00 Europe/Berlin\nOnCalendar=Mon *-*-*" in timer.read_text()
    assert f"WorkingDirectory={place}\n" in service.read_text() and "TimeoutStopSec=105\n" in service.read_text()
    assert "User=" not in service.read_text()
    assert schedule("remove", "petnames").exit_code == 0
    assert list(units.iterdir()) == []
    calls = ["daemon-reload", "enable --now ddptrain-petnames.timer", "disable --now ddptrain-petnames.timer"]
    assert (place / "calls").read_text().splitlines() == [f"--user {call}" for call in (*calls, calls[0])]


@pytest.mark.parametrize("system", [False, True])
def test_special_characters_are_for_each_program_what_they_are(
    place: Path, monkeypatch: pytest.MonkeyPatch, system: bool
) -> None:
    folder = place / "100% 'my' \"$pets\""
    folder.mkdir()
    shutil.copy("nightly.yaml", folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    done = schedule("add", "nightly.yaml", "--at", "0 3 * * *", "--as", "systemd", *(["--system"] if system else []))
    unit = str(place).replace("%", "%%") + "/100%% 'my' "
    assert f'WorkingDirectory={unit}"$pets"\n' in done.stdout
    assert f'"{unit}\\"$$pets\\"/nightly.yaml"' in done.stdout
    assert ("\nUser=" in done.stdout, "/etc/systemd/system/ddptrain-petnames.timer" in done.stdout) == (system, system)
    done = schedule("add", "nightly.yaml", "--at", "0 3 * * *", "--as", "cron")
    assert r"100\% " in done.stdout.split("# --- lines of the crontab")[1]


def run_script(place: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Install for cron, and start the script as cron does, with a program in place of ddptrain."""
    install()
    (place / "command").write_text(f"#!/bin/sh\n{program}\n")
    (place / "command").chmod(0o755)
    (script,) = (place / "config").rglob("petnames.sh")
    script.write_text(
        re.sub(r"^  \S+.* retrain .*(?= 2>&1)", f"  {place}/command 'a b'", script.read_text(), flags=re.MULTILINE)
    )
    return subprocess.run([script], capture_output=True, text=True, env={"HOME": str(place)}, timeout=20)


def test_script_reads_secrets_and_writes_the_log(place: Path) -> None:
    (place / "config" / "ddptrain").mkdir(parents=True)
    (place / "config" / "ddptrain" / "petnames.env").write_text("SLACK_URL='https://x/y z'\n")
    (place / "config" / "ddptrain" / "petnames.env").chmod(0o600)
    done = run_script(place, 'echo "$1 $SLACK_URL $PATH $PWD"')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    began, line, end = (place / "state/ddptrain/schedules/petnames.log").read_text().splitlines()
    assert began.startswith("--- 2") and end == "exit code 0"
    assert line == f"a b https://x/y z {place}/bin:/usr/bin:/bin {place}"


def test_script_prints_the_end_of_a_failure_and_keeps_the_log_small(place: Path) -> None:
    log = place / "state/ddptrain/schedules/petnames.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * 5_000_001)
    done = run_script(place, "echo out of memory >&2; exit 7")
    assert done.returncode == 7 and done.stdout.startswith(f"exit code 7; the end of {log}:\n--- ")
    assert done.stdout.endswith("\nout of memory\nexit code 7\n")
    assert Path(f"{log}.1").stat().st_size == 5_000_001
    log.unlink()
    log.symlink_to("/dev/full")  # a full disk neither stops nor hides anything
    done = run_script(place, r"echo 'not enough \disk space'; exit 4")
    assert done.returncode == 4 and done.stdout.endswith("\nnot enough \\disk space\nexit code 4\n")
    done = run_script(place, "echo saved; exit 8")  # its deadline: the next start continues
    assert (done.returncode, done.stdout) == (8, "")


def test_secrets_are_written_nowhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_URL", "json://hunter22hunter22")
    monkeypatch.setenv("https_proxy", "http://ada:hunter22@proxy:3128")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter22")
    with (place / "nightly.yaml").open("a") as file:
        file.write('notify: {urls: ["env:SLACK_URL", "json://10.0.0.5"], heartbeat: "env:CHECK_URL"}\n')
    done = install()
    secrets = place / "config" / "ddptrain" / "petnames.env"
    names = "AWS_SECRET_ACCESS_KEY, CHECK_URL, SLACK_URL, https_proxy"
    assert f"write the values of {names} into {secrets}" in done.stderr
    assert secrets.stat().st_mode & 0o777 == 0o600
    for path in (path for path in place.rglob("*") if path.is_file()):
        assert b"hunter22" not in path.read_bytes(), path
    secrets.write_text("\n".join(f"{name}=x" for name in names.split(", ")))
    assert "write the values" not in install().stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at", "Mon 03:00"], '"Mon 03:00" is not a time'),
        (["--at", "0 3 * * * Mars/Base"], '"Mars/Base" is not a time zone'),
        (["--at", "0 3 * * *", "--name", "../x"], "is not a name of a schedule"),
        (["--at", "0 3 * * *", "--system"], "--system is for --as systemd, not for cron"),
        (["--at", "0 3 * * * Asia/Kolkata"], "cron runs in the time zone of the host"),
    ],
)
def test_wrong_options_are_refused(place: Path, options: list[str], message: str) -> None:
    assert message in refused("add", "nightly.yaml", "--as", "cron", *options)
    assert sorted(path.name for path in place.iterdir()) == ["bin", "nightly.yaml"]


def test_folder_whose_name_would_begin_a_line_of_its_own_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "a\nExecStartPre=touch x").mkdir()
    monkeypatch.chdir(place / "a\nExecStartPre=touch x")
    assert "a line break" in refused("add", str(place / "nightly.yaml"), "--at", "0 3 * * *", "--as", "cron")


def test_list_has_the_last_retraining_and_names_damaged_files(place: Path) -> None:
    install()
    damaged = place / "config" / "ddptrain" / "schedules" / "dogs.sh"
    damaged.write_text("#!/bin/sh")
    records = RetrainRecords(ModelRegistry.open(str(place / "models")).folder, "petnames")
    records.create(RetrainRecord(0, "petnames", "2026-11-22T03:00:00.000Z", status="unchanged"))
    done = schedule("list")
    assert done.exit_code == ExitCode.CLUSTER and f"ddptrain: {damaged} is damaged" in done.stderr
    assert re.search(r"2026-11-2\d \d\d:00 unchanged", done.stdout)
    damaged.unlink()
    (place / "models/petnames/retrainings/000001.json").write_text("{")
    done = schedule("list")
    assert done.exit_code == 0 and "unknown: " in done.stdout
