"""cron: a line in the crontab of the user, and the script that it starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ddptrain.errors import ClusterError, ExitCode, UsageError
from ddptrain.schedule.due_times import host_zone, same_zone
from ddptrain.schedule.job import Job
from ddptrain.schedule.targets import target
from ddptrain.schedule.targets.target import Part, Target

_MISSING = "install the package cron, or use --as systemd"
_LOG_BYTES = 5_000_000
_NO_CRONTAB = re.compile("no crontab for|No such file")  # Debian and cronie, busybox


class Cron(Target):
    """Two lines of the crontab: the schedule, and the start of the machine, which catches up a missed time once."""

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        from platformdirs import user_config_path

        if not same_zone(job.schedule.zone, host_zone(), datetime.now(UTC)):
            raise UsageError(
                f"--timezone: cron runs in the time zone of the host, {host_zone()}, not in {job.schedule.zone}: give "
                "the time in the zone of the host, or use --as systemd"
            )
        path = (folder or user_config_path("ddptrain", appauthor=False) / "schedules") / f"{job.name}.sh"
        command = shlex.quote(str(path)).replace("%", r"\%")
        lines = [f"{when} {command} {_mark(job.name)}" for when in (job.schedule.cron, "@reboot")]
        script = Part(path.name, _script(job), path, 0o700)
        crontab = f"{job.name}.crontab"
        return [script, Part(crontab, "\n".join([*lines, ""]), folder / crontab if folder else None)]

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        script, lines = parts
        with target.files_written([script]):
            # Before the user's own lines: a variable there holds for all lines below it.
            _write_crontab(lines.text + "".join(_others(job.name)))
        return ["added to the crontab; crontab -l shows it", f"log: {job.log_file}"]

    def remove(self, name: str, files: Sequence[Path]) -> None:
        """See Target."""
        before, after = _crontab(), _others(name)
        if "".join(after) != before:
            _write_crontab("".join(after))
        target.delete_files(files)

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        return target.missing_time_note(job, "cron starts it right after that")


def _script(job: Job) -> str:
    """Return the script: environment, secrets, log. Its output is the end of the log if it failed; cron mails that.

    The output passes through tee, so that a log that can't be written (full disk) neither stops nor hides anything.
    A retraining at its deadline has not failed: the next start continues.
    """
    env_file, log = shlex.quote(str(job.env_file)), shlex.quote(str(job.log_file))
    end = """'%s\\n' "exit code $code; the end of $log:" "$end\""""
    lines = [
        "#!/bin/sh",
        f"# {job.title}. `ddptrain schedule remove {job.name}` deletes it.",
        f"cd {shlex.quote(str(job.workdir))} || exit 2",
        *(f"export {key}={shlex.quote(value)}" for key, value in job.environment.items()),
        f"if [ -r {env_file} ]; then set -a; . {env_file}; set +a; fi",
        f"log={log}",
        'mkdir -p "$(dirname "$log")"',
        f'if [ "$(stat -c %s "$log" 2>/dev/null || echo 0)" -gt {_LOG_BYTES} ]; then mv -f "$log" "$log.1"; fi',
        *([target.sleep_line(job)] if job.jitter_s else []),
        "end=$({",
        "  date '+--- %F %T %z'",
        f"  {shlex.join(job.command)} 2>&1",
        '  echo "exit code $?"',
        '} | tee -a "$log" | tail -n 20)',
        "code=${end##*exit code }",
        f'if [ "$code" -ne 0 ] && [ "$code" -ne {int(ExitCode.DEADLINE)} ]; then printf {end}; fi',
        'exit "$code"',
    ]
    return "\n".join([*lines, ""])


def _mark(name: str) -> str:
    return f"# ddptrain schedule {name}"


def _crontab() -> str:
    try:
        return target.run_tool(["crontab", "-l"], missing=_MISSING)
    except ClusterError as error:
        if _NO_CRONTAB.search(str(error)):
            return ""
        raise  # what can't be read must not be replaced


def _others(name: str) -> list[str]:
    """Return the lines of the crontab that are not of this schedule, with their line ends."""
    return [line for line in _crontab().splitlines(keepends=True) if not line.rstrip().endswith(_mark(name))]


def _write_crontab(text: str) -> None:
    target.run_tool(["crontab", "-"], text, missing=_MISSING)
