"""`ddptrain schedule`: retrains at given times, with systemd or cron."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import JsonOption
from ddptrain.cli.printing import print_json, say, write
from ddptrain.errors import ExitCode, UsageError
from ddptrain.text_tables import clean_table

if TYPE_CHECKING:
    from ddptrain.schedule.check import Finding

app = typer.Typer(name="schedule", help="Retrain at given times: add, list, check, remove.", no_args_is_help=True)

_NONE = "no schedules are installed; ddptrain schedule add CONFIG --at TIME --install adds one"
_MINUTE = "%Y-%m-%d %H:%M"


@app.command(short_help="Make what systemd or cron needs.")
def add(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", autocompletion=complete.configurations, help="A YAML file with a section retrain."
        ),
    ],
    at: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help='A cron expression, as "0 3 * * 1" (Mondays at 03:00), also with a time zone, as "0 3 * * 1 '
            'Europe/Berlin".  [default zone: that of this host]',
        ),
    ],
    as_: Annotated[
        Literal["systemd", "cron"] | None,
        typer.Option("--as", help="The scheduler.  [default: systemd where it runs, otherwise cron]"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the schedule.  [default: the name of the model]")] = "",
    install: Annotated[bool, typer.Option("--install", help="Install it; otherwise it is only printed.")] = False,
    system: Annotated[bool, typer.Option("--system", help="systemd: units of the system, not of the user.")] = False,
) -> None:
    """Write what a scheduler needs to retrain a model at given times."""
    import os

    from ddptrain.config.load import load_config
    from ddptrain.schedule import install as installing
    from ddptrain.schedule.entries import Entries, make_entry, parse_schedule

    target = as_ or installing.default_target()
    if system and target != "systemd":
        raise UsageError("--system is for --as systemd, not for cron: leave it out")
    schedule = parse_schedule(at)
    entry = make_entry(load_config(config), schedule, target, name, os.environ, system=system)
    parts = installing.parts_of(entry)
    write(
        line for part in parts for line in [f"# --- {part.path or 'lines of the crontab'}", *part.text.splitlines(), ""]
    )
    if install:
        for line in installing.install(entry, Entries()):
            say(line)
        say(f"installed as {entry.name}; ddptrain schedule list shows it, schedule remove {entry.name} removes it")
        say("run `ddptrain schedule check --quiet` each hour from cron to be notified if it is late")
    else:
        say(f"nothing is installed: add --install to install it with {target}")
    say(f"next time: {schedule.next(datetime.now(UTC)):{_MINUTE}} UTC")


@app.command("list", short_help="Show the schedules, with the last and the next time.")
def list_(json: JsonOption = False) -> int:
    """Show the installed schedules: the last retraining, the next time, and the state of the model."""
    from ddptrain.schedule.check import check
    from ddptrain.schedule.entries import Entries

    entries, problems = Entries().readable()
    found = [check(entry) for entry in entries]
    if json:
        print_json([_as_dict(finding) for finding in found])
    elif found:
        header = ("NAME", "MODEL", "WHEN", "WITH", "LAST", "NEXT", "STATE")
        write([clean_table([header, *map(_row, found)])])
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
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only problems: for cron, which mails output.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Report models without a successful retraining for longer than their schedule allows, and notify users once.

    Exit code 0: none; 4: at least one is late, or could not be checked.
    """
    from ddptrain.schedule import check as checking
    from ddptrain.schedule.entries import Entries

    schedules = Entries()
    entries, problems = schedules.readable()
    with schedules.locked():  # two checks at the same time would notify twice
        found = [checking.check(entry, notify=True) for entry in entries]
    bad = [each for each in found if each.state in (checking.State.LATE, checking.State.UNKNOWN)]
    if json:
        print_json([_as_dict(finding) for finding in found])
    else:
        write(f"{each.entry.name}: {each.state}: {each.reason}" for each in found if not quiet or each in bad)
    for line in [*problems, *(f"{each.entry.name}: {warning}" for each in found for warning in each.warnings)]:
        say(f"ddptrain: {line}")
    if not (found or problems or quiet or json):
        say(_NONE)
    return ExitCode.CLUSTER if problems or bad else ExitCode.SUCCEEDED


def _row(finding: Finding) -> tuple[str, ...]:
    from zoneinfo import ZoneInfo

    entry, last = finding.entry, finding.last
    zone = ZoneInfo(entry.schedule.zone)
    following = entry.schedule.next(datetime.now(UTC)).astimezone(zone)
    shown = f"{datetime.fromisoformat(last.started_at).astimezone(zone):{_MINUTE}} {last.status}" if last else "-"
    state = str(finding.state) if finding.state != "unknown" else f"unknown: {finding.reason}"
    return entry.name, entry.model, entry.at, entry.target, shown, f"{following:{_MINUTE}}", state


def _as_dict(finding: Finding) -> dict[str, Any]:
    import dataclasses

    from ddptrain.schedule.entries import slot_text

    about = dataclasses.asdict(finding)
    del about["entry"], about["warnings"]
    return {
        **dataclasses.asdict(finding.entry),
        **about,
        "succeeded": slot_text(finding.succeeded) if finding.succeeded else None,
        "next": slot_text(finding.entry.schedule.next(datetime.now(UTC))),
    }
