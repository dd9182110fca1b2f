"""systemd: a service and a timer, of the user or of the system."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddptrain.errors import ClusterError, ExitCode
from ddptrain.schedule.expressions import values
from ddptrain.schedule.job import Job
from ddptrain.schedule.targets import target
from ddptrain.schedule.targets.target import Part, Target

_WEEK_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_MISSING = "use --as cron"
_SYSTEM_FOLDER = Path("/etc/systemd/system")


class Systemd(Target):
    """A timer that catches up a missed time after the next start of the machine. The log is in the journal."""

    def __init__(self, *, system: bool = False) -> None:
        """system: whether they are units of the system, which only root can install, instead of the user's."""
        self._system = system
        self._systemctl = ["systemctl"] if system else ["systemctl", "--user"]

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        where = folder or self._folder()
        name = unit_name(job.name)
        return [
            Part(f"{name}.service", self._service(job), where / f"{name}.service"),
            Part(f"{name}.timer", _timer(job), where / f"{name}.timer"),
        ]

    def problem(self, parts: Sequence[Part]) -> str:
        """See Target."""
        if not shutil.which("systemd-analyze"):
            return ""
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, part.name) for part in parts]
            for path, part in zip(paths, parts, strict=True):
                path.write_text(part.text, encoding="utf-8")
            command = ["systemd-analyze", *([] if self._system else ["--user"]), "--man=no", "verify", *map(str, paths)]
            with tempfile.TemporaryDirectory() as runtime:
                environment = {"XDG_RUNTIME_DIR": runtime, **os.environ}
                done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
            error_lines = [line for line in done.stderr.splitlines() if folder in line or "ddptrain-" in line]
        refused = done.returncode and error_lines
        return f"systemd refuses the unit: {error_lines[0].replace(f'{folder}/', '')}" if refused else ""

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        timer = parts[1].name
        with target.files_written(parts):
            target.run_tool([*self._systemctl, "daemon-reload"], missing=_MISSING)
            target.run_tool([*self._systemctl, "enable", "--now", timer], missing=_MISSING)
        log = f"log: journalctl {'' if self._system else '--user '}-u {unit_name(job.name)}"
        return [f"enabled {timer}; {' '.join(self._systemctl)} list-timers shows it", log]

    def remove(self, name: str, files: Sequence[Path]) -> None:
        """See Target."""
        with suppress(ClusterError):  # the unit is not loaded any more; its files are deleted below
            target.run_tool([*self._systemctl, "disable", "--now", f"{unit_name(name)}.timer"], missing=_MISSING)
        target.delete_files(files)
        with suppress(ClusterError):
            target.run_tool([*self._systemctl, "daemon-reload"], missing=_MISSING)

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        notes = target.missing_time_note(job, "systemd skips this time")
        if not self._system and not Path("/var/lib/systemd/linger", getpass.getuser()).exists():
            notes.insert(0, "timers of a user run only while the user is logged in, until: loginctl enable-linger")
        return notes

    def _folder(self) -> Path:
        from platformdirs import user_config_path

        return _SYSTEM_FOLDER if self._system else user_config_path("systemd", appauthor=False) / "user"

    def _service(self, job: Job) -> str:
        """Return the service. A preempted retraining starts again; one at its deadline continues at the next time."""
        environment = [f"Environment={_quoted(f'{key}={value}')}" for key, value in job.environment.items()]
        return _lines(
            "[Unit]",
            f"Description={_escaped(job.title)}",
            "",
            "[Service]",
            "Type=exec",
            *([f"User={getpass.getuser()}"] if self._system else []),
            f"WorkingDirectory={_escaped(str(job.workdir))}",
            *environment,
            f"EnvironmentFile=-{_escaped(str(job.env_file))}",
            f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in job.command)}",
            f"SuccessExitStatus={int(ExitCode.DEADLINE)}",
            f"RestartForceExitStatus={int(ExitCode.PREEMPTED)}",
            "RestartSec=60",
            "KillMode=mixed",
            f"TimeoutStopSec={job.stop_s}",
        )


def unit_name(name: str) -> str:
    """Return the name of the units of a schedule, without the suffix."""
    return f"ddptrain-{name}"


def on_calendar(cron: str, zone: str) -> list[str]:
    """Convert a cron expression to systemd's calendar events: two if it names days of the month and of the week."""
    minute, hour, month_day, month, week_day = cron.split()
    time = f"{_numbers(hour, 1)}:{_numbers(minute, 0)}:00 {zone}"
    days = _numbers(month_day, 2)
    on_week_days = ",".join(_WEEK_DAYS[day] for day in values(week_day, 4)) + " "
    if week_day == "*":
        dates = [f"*-{_numbers(month, 3)}-{days}"]
    elif month_day == "*":
        dates = [f"{on_week_days}*-{_numbers(month, 3)}-*"]
    else:
        dates = [f"*-{_numbers(month, 3)}-{days}", f"{on_week_days}*-{_numbers(month, 3)}-*"]
    return [f"{date} {time}" for date in dates]


def _numbers(field: str, position: int) -> str:
    return "*" if field == "*" else ",".join(f"{number:02}" for number in values(field, position))


def _timer(job: Job) -> str:
    return _lines(
        "[Unit]",
        f"Description={_escaped(job.title)}",
        "",
        "[Timer]",
        *(f"OnCalendar={calendar}" for calendar in on_calendar(job.schedule.cron, job.schedule.zone)),
        "Persistent=true",
        "AccuracySec=1s",
        *([f"RandomizedDelaySec={job.jitter_s}"] if job.jitter_s else []),
        "",
        "[Install]",
        "WantedBy=timers.target",
    )


def _lines(*lines: str) -> str:
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a word of a command or an assignment, as systemd reads it."""
    escaped = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if any(char in escaped for char in " '\"\\;") else escaped
