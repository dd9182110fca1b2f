"""`ddptrain schedule`: retrains at given times, with systemd or cron."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import JsonOption, parsed
from ddptrain.cli.printing import print_json, say, write
from ddptrain.errors import ExitCode, UsageError
from ddptrain.text_tables import clean_table

if TYPE_CHECKING:
    from ddptrain.schedule.entries import Entry
    from ddptrain.schedule.monitor import Finding

app = typer.Typer(name="schedule", help="Retrain at given times: add, list, check, remove.", no_args_is_help=True)

_GRACE = "10m"
_NONE = "no schedules are installed; ddptrain schedule add CONFIG --at TIME --install adds one"
_MINUTE = "%Y-%m-%d %H:%M"


At = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help='"03:00", "Mon 03:00", "Mon,Thu 03:00", "1st 04:30", "every 15m", hourly, or a cron expression.',
    ),
]
Zone = Annotated[
    str, typer.Option("--timezone", metavar="ZONE", help="As Europe/Berlin.  [default: that of this host]")
]
Grace = Annotated[str, typer.Option(metavar="TIME", help="How late a success may be, as 10m or 2h.")]


@app.command(short_help="Make what systemd or cron needs.")
def add(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", autocompletion=complete.configurations, help="A YAML file with a section retrain."
        ),
    ],
    at: At,
    as_: Annotated[
        Literal["systemd", "cron"] | None,
        typer.Option("--as", help="The scheduler.  [default: systemd where it runs, otherwise cron]"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the schedule.  [default: the name of the model]")] = "",
    timezone: Zone = "",
    jitter: Annotated[str, typer.Option(metavar="TIME", help="Delay each start by a random time up to this.")] = "",
    install: Annotated[bool, typer.Option("--install", help="Install it; otherwise it is only printed.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write files into this folder instead of printing them.")
    ] = None,
    system: Annotated[bool, typer.Option("--system", help="systemd: units of the system, not of the user.")] = False,
) -> None:
    """Write and check what a scheduler needs to retrain a model at given times."""
    import os

    from ddptrain.config.load import load_config
    from ddptrain.config.sections.retraining import duration_s
    from ddptrain.schedule import install as installing
    from ddptrain.schedule.due_times import host_zone, parse_schedule
    from ddptrain.schedule.entries import Entries
    from ddptrain.schedule.job import make_job
    from ddptrain.schedule.targets.target import write_parts

    if install and output:
        raise UsageError("--install and --output exclude each other: --install writes the files where they belong")
    schedule = parse_schedule(at, timezone or host_zone())
    target_name = as_ or installing.default_target()
    target = installing.make_target(target_name, system=system)
    delay_s = parsed("--jitter", jitter, duration_s) if jitter else 0.0
    resolved = load_config(config)
    job = make_job(resolved, schedule, name, delay_s, os.environ)
    parts = target.parts(job, output.absolute() if output else None)
    if problem := target.problem(parts):
        raise UsageError(problem)
    if output:
        write_parts(parts)
        done = [f"wrote {part.path}" for part in parts]
    else:
        write(line for part in parts for line in [f"# --- {part.path or part.name}", *part.text.splitlines(), ""])
        done = installing.install(job, target_name, target, parts, Entries(), system=system) if install else []
    next_time = schedule.next(datetime.now(UTC))
    notify = resolved.config.notify
    tells = bool(notify.urls) and "late" in notify.on
    for line in [*done, *target.notes(job), *_after(job.name, target_name, next_time, installed=install, tells=tells)]:
        say(line)


@app.command("list", short_help="Show the schedules: last, next and missed times.")
def list_(json: JsonOption = False) -> int:
    """Show the installed schedules: the last retraining, the next time, and the missed times."""
    from ddptrain.config.sections.retraining import duration_s
    from ddptrain.schedule.entries import Entries
    from ddptrain.schedule.monitor import look

    entries, problems = Entries().readable()
    grace = timedelta(seconds=duration_s(_GRACE))
    found = [(entry, look(entry, grace, with_missed=True)) for entry in entries]
    if json:
        print_json([_listed(entry, finding) for entry, finding in found])
    elif found:
        header = ("NAME", "MODEL", "WHEN", "WITH", "LAST", "NEXT", "MISSED", "STATE")
        write([clean_table([header, *(_row(entry, finding) for entry, finding in found)])])
    elif not problems:
        say(_NONE)
    for problem in problems:
        say(f"ddptrain: {problem}")
    return ExitCode.CLUSTER if problems else ExitCode.SUCCEEDED


@app.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]) -> None:
    """Remove an installed schedule from its scheduler. The model and its versions stay."""
    from ddptrain.schedule.entries import Entries
    from ddptrain.schedule.install import uninstall

    entry = uninstall(name, Entries())
    write([f"removed the schedule {name} from {entry.target}"])


@app.command(short_help="Report models whose retraining is late.")
def check(
    configs: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG", help="YAML files.  [default: all installed schedules]")
    ] = None,
    grace: Grace = _GRACE,
    notify: Annotated[
        bool, typer.Option(help="Send one message to the targets of notify; the next only after a success.")
    ] = True,
    at: At = "",
    timezone: Zone = "",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only problems: for cron, which mails output.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Report models without a successful retraining for longer than their schedule allows.

    Exit code 0: none; 9: at least one is late; 4: at least one could not be checked.
    """
    from ddptrain.config.sections.retraining import duration_s
    from ddptrain.schedule.entries import Entries
    from ddptrain.schedule.monitor import look

    allowed = timedelta(seconds=parsed("--grace", grace, duration_s))
    entries, problems = _to_check(configs or [], at, timezone)
    with Entries().locked("check", wait=False) as alone:  # two checks at the same time would notify twice
        found = [look(each, allowed, notify=notify and alone) for each in entries]
    lines = [] if at else list(problems)
    for finding in found:
        lines += [f"{finding.name}: {text}" for text in (finding.problem, *finding.warnings) if text]
    if json:
        print_json([_checked(finding) for finding in found])
    elif not quiet:
        write(line for finding in found for line in _lines(finding))
    for line in lines:
        say(f"ddptrain: {line}")
    if not (found or problems or quiet or json):
        say(_NONE)
    if any(finding.is_late for finding in found):
        return ExitCode.LATE
    return ExitCode.CLUSTER if problems or any(finding.problem for finding in found) else ExitCode.SUCCEEDED


def _to_check(configs: list[str], at: str, timezone: str) -> tuple[list[Entry], list[str]]:
    """Return the schedules to check: all installed ones, those of the configurations, or the configurations at a time.

    Also returns a line for each installed schedule that can't be read.
    """
    from ddptrain.config.config_file import find_config
    from ddptrain.schedule.due_times import host_zone, parse_schedule
    from ddptrain.schedule.entries import Entries, Entry

    paths = [find_config(config).absolute() for config in configs]
    if at:
        if not paths:
            raise UsageError("--at needs a CONFIG: installed schedules have times of their own")
        schedule = parse_schedule(at, timezone or host_zone())
        common = (str(Path.cwd()), schedule.text, schedule.zone, "", "")
        return [Entry(path.stem, "", str(path), *common) for path in paths], []
    if timezone:
        raise UsageError("--timezone is for --at: installed schedules have time zones of their own")
    entries, problems = Entries().readable()
    known = {entry.config for entry in entries}
    if unknown := [path for path in paths if str(path) not in known]:
        raise UsageError(f"no schedule of {unknown[0]} is installed here: give --at, as in --at 'Mon 03:00'")
    return [entry for entry in entries if not paths or entry.config in map(str, paths)], problems


def _after(name: str, target: str, following: datetime, *, installed: bool, tells: bool) -> list[str]:
    """Return lines about the next steps. tells: whether users are notified if the model is late."""
    next_time = f"next time: {following:{_MINUTE}} UTC"
    if installed:
        shown = f"installed as {name}; ddptrain schedule list shows it, schedule remove {name} removes it"
        check = "run `ddptrain schedule check --quiet` each minute from cron to be notified if it is late"
        return [next_time, shown, check if tells else f"{check}; set notify.urls, and add late to notify.on"]
    return [next_time, f"nothing is installed: add --install to install it with {target}"]


def _row(entry: Entry, finding: Finding) -> tuple[str, ...]:
    from zoneinfo import ZoneInfo

    def local(time: datetime) -> str:
        return f"{time.astimezone(ZoneInfo(entry.zone)):{_MINUTE}}"

    last = finding.last
    missed = f"{len(finding.missed)}: {local(finding.missed[-1])}" if finding.missed else "-"
    return (
        entry.name,
        entry.model,
        str(entry.schedule),
        entry.target,
        f"{local(datetime.fromisoformat(last.started_at))} {last.status}" if last else "-",
        local(finding.next) if finding.next else "-",
        missed,
        str(finding.judgement.state) if finding.judgement else f"unknown: {finding.problem}",
    )


def _listed(entry: Entry, finding: Finding) -> dict[str, Any]:

    from ddptrain.schedule.due_times import slot_text

    about = {**dataclasses.asdict(entry), "cron": entry.schedule.cron, **_checked(finding)}
    last = dataclasses.asdict(finding.last) if finding.last else None
    return {**about, "missed": [slot_text(time) for time in finding.missed], "last": last}


def _checked(finding: Finding) -> dict[str, Any]:
    from ddptrain.schedule.due_times import slot_text

    judgement = finding.judgement
    return {
        "name": finding.name,
        "model": finding.model,
        "state": str(judgement.state) if judgement else None,
        "reason": judgement.reason if judgement else finding.problem,
        "slot": slot_text(judgement.slot) if judgement else None,
        "last_success": slot_text(judgement.succeeded) if judgement and judgement.succeeded else None,
        "next": slot_text(finding.next) if finding.next else None,
        "notified": list(finding.notified),
    }


def _lines(finding: Finding) -> list[str]:
    if finding.judgement is None:
        return []
    notified = f" (notified: {', '.join(finding.notified)})" if finding.notified else ""
    return [f"{finding.name}: {finding.judgement.state}: {finding.judgement.reason}{notified}"]
