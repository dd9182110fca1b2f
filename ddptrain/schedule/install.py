"""Adds schedules to systemd or cron, lists and removes them. What they read is in templates/.

A unit, or the script that cron starts, has the entry as JSON in a comment: there is no other record.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal
from zoneinfo import ZoneInfo

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from platformdirs import user_config_path

from ddptrain.config.wording import did_you_mean
from ddptrain.errors import ClusterError, ExitCode, UsageError, one_line
from ddptrain.file_ops import make_private, write_atomic
from ddptrain.log import Log
from ddptrain.schedule.entries import Entry, host_zone

_log = Log(__name__)
_TOOL_TIMEOUT_S = 60.0
_UNITS = Path("/etc/systemd/system")
_RECORD = "# ddptrain schedule: "
_NO_CRONTAB = re.compile("no crontab for|No such file")  # Debian and cronie, busybox


@dataclass(frozen=True, slots=True)
class Part:
    """A text for a scheduler. path: the file that it becomes; None for lines of the crontab."""

    text: str
    path: Path | None = None
    mode: int = 0o644


def _user_units() -> Path:
    return user_config_path("systemd", appauthor=False) / "user"


def _scripts() -> Path:
    return user_config_path("ddptrain", appauthor=False) / "schedules"


def default_target() -> Literal["systemd", "cron"]:
    """Return systemd where it runs, otherwise cron."""
    return "systemd" if Path("/run/systemd/system").is_dir() else "cron"


def parts_of(entry: Entry) -> list[Part]:
    """Return the texts for the scheduler: service and timer, or script and lines of the crontab.

    The second line of the crontab catches up a missed time once, at the start of the machine, as does Persistent=true.
    Raises UsageError if cron cannot use the time zone.
    """
    paths = _files_of(entry)
    if entry.target == "systemd":
        return [Part(_rendered(f"{path.suffix[1:]}.j2", entry), path) for path in paths]
    zone = entry.schedule.zone
    if not _same_zone(zone, host_zone()):
        raise UsageError(
            f"cron runs in the time zone of the host, {host_zone()}, not in {zone}: give the time in the zone of the "
            "host, or use --as systemd"
        )
    (path,) = paths
    command = shlex.quote(str(path)).replace("%", r"\%")
    lines = [f"{when} {command} {_mark(entry.name)}\n" for when in (entry.schedule.cron, "@reboot")]
    return [Part(_rendered("cron.sh.j2", entry), path, 0o700), Part("".join(lines))]


def _files_of(entry: Entry) -> list[Path]:
    if entry.target == "cron":
        return [_scripts() / f"{entry.name}.sh"]
    folder = _UNITS if entry.system else _user_units()
    return [folder / f"{_unit(entry.name)}.{kind}" for kind in ("service", "timer")]


def installed() -> tuple[list[Entry], list[str]]:
    """Return the installed schedules, by name, and a line for each file that is damaged."""
    entries, problems = [], []
    folders = {_UNITS: "ddptrain-*.service", _user_units(): "ddptrain-*.service", _scripts(): "*.sh"}
    for folder, pattern in folders.items():
        for path in sorted(folder.glob(pattern)):
            text = path.read_text(encoding="utf-8", errors="replace")
            try:
                entries.append(Entry.from_json(text.partition(_RECORD)[2].partition("\n")[0]))
            except (ValueError, UsageError):
                problems.append(f"{path} is damaged: delete it, and add the schedule again")
    return sorted(entries, key=lambda entry: entry.name), problems


def find(name: str) -> Entry:
    """Return a schedule; of two of one name that of who asks. Raises UsageError if there is none of this name."""
    entries, _ = installed()
    named = [entry for entry in entries if entry.name == name]
    if named:
        return min(named, key=lambda entry: entry.system != (os.geteuid() == 0))
    known = [entry.name for entry in entries]
    hint = did_you_mean(name, known) or "none is installed; ddptrain schedule add CONFIG --at TIME --install"
    raise UsageError(f"there is no schedule {name}: {hint}")


def install(entry: Entry) -> list[str]:
    """Install a schedule; one of the same name, configuration and scheduler is replaced.

    Returns what was done, in lines. Raises UsageError, ClusterError: then everything is as before.
    """
    replaced = (entry.config, entry.target, entry.system)
    for before in installed()[0]:
        if before.name != entry.name or (before.config, before.target, before.system) == replaced:
            continue
        scheduler = f"{before.target}{' of the system' if before.system else ''}"
        raise UsageError(
            f"there is a schedule {entry.name} already, of {before.config} with {scheduler}: choose another "
            f"--name, or ddptrain schedule remove {entry.name}"
        )
    parts = parts_of(entry)
    old = [replace(part, text=part.path.read_text()) for part in parts if part.path and part.path.is_file()]
    try:
        done = _prepare_env_file(entry)
        _write_files(parts)
        done += _activate(entry, parts)
    except (UsageError, ClusterError, OSError) as error:
        _delete_files(entry)
        _write_files(old)
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
        raise
    _log.info("schedule installed", schedule=entry.name, target=entry.target)
    return done


def uninstall(name: str) -> Entry:
    """Remove a schedule from its scheduler. Raises UsageError, ClusterError: its files stay."""
    entry = find(name)
    if entry.target == "systemd":
        with suppress(ClusterError):  # the unit is not loaded any more; its files are deleted below
            _run([*_systemctl(entry), "disable", "--now", f"{_unit(name)}.timer"])
    elif "".join(after := _other_lines(name)) != (crontab := _crontab()):
        assert crontab
        _run(["crontab", "-"], "".join(after))
    _delete_files(entry)
    if entry.target == "systemd":
        with suppress(ClusterError):
            _run([*_systemctl(entry), "daemon-reload"])
    _log.info("schedule removed", schedule=name, target=entry.target)
    return entry


def _activate(entry: Entry, parts: Sequence[Part]) -> list[str]:
    if entry.target == "cron":
        # Before the user's own lines: a variable there holds for all lines below it.
        _run(["crontab", "-"], parts[1].text + "".join(_other_lines(entry.name)))
        return ["added to the crontab; crontab -l shows it", f"log: {entry.log_file}"]
    unit, systemctl = _unit(entry.name), _systemctl(entry)
    _run([*systemctl, "daemon-reload"])
    _run([*systemctl, "enable", "--now", f"{unit}.timer"])
    done = [
        f"enabled {unit}.timer; {' '.join(systemctl)} list-timers shows it",
        f"log: journalctl {'' if entry.system else '--user '}-u {unit}",
    ]
    if not entry.system and not Path("/var/lib/systemd/linger", getpass.getuser()).exists():
        done.append("timers of a user run only while the user is logged in, until: loginctl enable-linger")
    return done


def _write_files(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.path:
            part.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(part.path, part.text.encode(), mode=part.mode)


def _delete_files(entry: Entry) -> None:
    for path in _files_of(entry):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot delete {path}: {error.strerror}") from error


def _prepare_env_file(entry: Entry) -> list[str]:
    """Create the file for the secret variables, with mode 600 and without values. Raises OSError."""
    if not entry.secrets:
        return []
    path = entry.env_file
    if not os.path.lexists(path):
        lines = [f"# Secret variables of {entry.title}", *(f"# {name}=" for name in entry.secrets), ""]
        make_private(path.parent)
        write_atomic(path, "\n".join(lines).encode(), mode=0o600)
    text = path.read_text(encoding="utf-8", errors="replace")
    missing = [name for name in entry.secrets if not re.search(rf"^(?:export )?{name}=.", text, re.MULTILINE)]
    return [f"write the values of {', '.join(missing)} into {path}"] if missing else []


def _rendered(template: str, entry: Entry) -> str:
    # No HTML: each value passes the filter for its place instead.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"sh": lambda value: shlex.quote(str(value)), "percent": _percent, "unit": _unit_word}
    codes = {"deadline": int(ExitCode.DEADLINE), "preempted": int(ExitCode.PREEMPTED)}
    about = {"entry": entry, "record": f"{_RECORD}{entry.to_json()}", "user": getpass.getuser()}
    return environment.get_template(template).render(**about, **codes)


def _percent(value: object) -> str:
    return str(value).replace("%", "%%")


def _unit_word(value: object) -> str:
    """Return a word of a command or an assignment, as systemd reads it."""
    escaped = _percent(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if any(char in escaped for char in " '\"\\;") else escaped


def _unit(name: str) -> str:
    return f"ddptrain-{name}"


def _systemctl(entry: Entry) -> list[str]:
    return ["systemctl"] if entry.system else ["systemctl", "--user"]


def _mark(name: str) -> str:
    return f"# ddptrain schedule {name}"


def _crontab() -> str:
    try:
        return _run(["crontab", "-l"])
    except ClusterError as error:
        if _NO_CRONTAB.search(str(error)):
            return ""
        raise  # what can't be read must not be replaced


def _other_lines(name: str) -> list[str]:
    """Return the lines of the crontab that are not of this schedule, with their line ends."""
    return [line for line in _crontab().splitlines(keepends=True) if not line.rstrip().endswith(_mark(name))]


def _same_zone(one: str, other: str) -> bool:
    """Return whether two zones have the same time now and in half a year: UTC has several names."""
    times = [datetime.now(UTC) + timedelta(days=days) for days in (0, 182)]
    return all(ZoneInfo(one).utcoffset(time) == ZoneInfo(other).utcoffset(time) for time in times)


def _run(command: Sequence[str], text: str = "") -> str:
    """Run a program with `text` as its input; return what it printed. Raises UsageError, ClusterError."""
    _log.info("tool started", command=" ".join(command))
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            list(command),
            input=text,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        other = "install the package cron, or use --as systemd" if command[0] == "crontab" else "use --as cron"
        raise UsageError(f"{command[0]} is not installed here: {other}") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)} did not end within {_TOOL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise ClusterError(f"{command[0]} can't be started: {error.strerror}") from None
    if done.returncode:
        reason = one_line(done.stderr) or one_line(done.stdout) or f"exit code {done.returncode}"
        raise ClusterError(f"{' '.join(command)} failed: {reason}")
    return done.stdout
