"""`ddptrain retrain`, `schedule` and `notify`: training that cron or systemd starts, and messages about it."""

from __future__ import annotations

import dataclasses
import json as json_
import os
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.printing import print_json, print_result, say, write
from ddptrain.cli.train import reporting_of
from ddptrain.errors import ExitCode, UsageError
from ddptrain.text_tables import clean_table

if TYPE_CHECKING:
    from ddptrain.schedule.check import Finding

schedules = typer.Typer(help="Retrain at given times: add, list, check, remove.", no_args_is_help=True)
notifications = typer.Typer(help="Notifications of runs and retrainings: try them.", no_args_is_help=True)

_NONE = "no schedules are installed; ddptrain schedule add CONFIG --at TIME --install adds one"
_MINUTE = "%Y-%m-%d %H:%M"


def retrain(
    config: opt.Config,
    overrides: Annotated[list[str] | None, opt.set_option("params.epochs=3")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train although nothing has changed, or the data look wrong.")
    ] = False,
    slot: Annotated[
        str,
        typer.Option(
            metavar="TIME|SCHEDULE",
            help="The scheduled time, which is run at most once: 2026-03-01T03:00Z, or a cron expression as "
            '"0 3 * * 1 Europe/Berlin", which stands for its latest time.',
        ),
    ] = "",
    promote_anyway: Annotated[
        str, typer.Option(metavar="REASON", help="Promote the new version also if the gate rejects it.")
    ] = "",
    ranks: opt.RanksOption = None,
    cluster: opt.ClusterOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data, print what would be done, change nothing.")
    ] = False,
    all_ranks: opt.AllRanksOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
    report: opt.ReportOption = None,
) -> int:
    """Train a model anew, and make the result the champion if it is better.

    It can be started at any time and from anywhere: one start at a time works on a model, and a start continues what
    an earlier one could not finish. Exit codes: 0 promoted, or nothing to do; 7 rejected by the gate; 8 out of time,
    the next start continues; others as of train. CONFIG has a section retrain.

    Examples:
        ddptrain retrain nightly.yaml
        ddptrain retrain nightly.yaml --promote-anyway "new labels"
    """
    from ddptrain.config.load import load_config

    options = opt.field_options(ranks, cluster, opt.PLACES.runs_dir)
    if (models_dir := opt.PLACES.models_dir) is not None:
        options[f"models.dir={json_.dumps(models_dir)}"] = f"--models-dir {models_dir}"
    with reporting_of(config, report) as reporting:
        resolved = opt.checked(partial(load_config, opt.local_config(config)), overrides or [], options)
        from ddptrain.retrain.retraining import retrain as run
        from ddptrain.retrain.start import RetrainOptions
        from ddptrain.schedule.entries import resolve_slot

        reporting.name, reporting.secrets = resolved.config.name, resolved.secrets
        slot, anyway = resolve_slot(slot), promote_anyway.strip()
        chosen = RetrainOptions(
            force, slot, dry_run, output.value, anyway, opt.wants_full_traceback(), all_ranks, reporting
        )
        return run(resolved, chosen)


@schedules.command(short_help="Make what systemd or cron needs.")
def add(
    config: opt.Config,
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
    """Write what a scheduler needs to retrain a model at given times. CONFIG has a section retrain.

    Examples:
        ddptrain schedule add nightly.yaml --at "0 3 * * 1" --as systemd
    """
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


@schedules.command("list", short_help="Show the schedules, with the last and the next time.")
def list_(json: opt.JsonOption = False) -> int:
    """Show the installed schedules: the last retraining, the next time, and the state of the model.

    Examples:
        ddptrain schedule list
    """
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
        say(f"{problem}")
    return ExitCode.CLUSTER if problems else ExitCode.SUCCEEDED


@schedules.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]) -> None:
    """Remove an installed schedule from its scheduler. The model and its versions stay.

    Examples:
        ddptrain schedule remove petnames
    """
    from ddptrain.schedule.entries import Entries
    from ddptrain.schedule.install import uninstall

    entry = uninstall(name, Entries())
    write([f"removed the schedule {name} from {entry.target}"])


@schedules.command(short_help="Report models whose retraining is late.")
def check(
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only problems: for cron, which mails output.")
    ] = False,
    json: opt.JsonOption = False,
) -> int:
    """Report models without a successful retraining for longer than their schedule allows, and notify users once.

    Exit code 0: none; 4: at least one is late, or could not be checked.

    Examples:
        ddptrain schedule check
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
        say(f"{line}")
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
    from ddptrain.schedule.entries import slot_text

    about = dataclasses.asdict(finding)
    del about["entry"], about["warnings"]
    return {
        **dataclasses.asdict(finding.entry),
        **about,
        "succeeded": slot_text(finding.succeeded) if finding.succeeded else None,
        "next": slot_text(finding.entry.schedule.next(datetime.now(UTC))),
    }


@notifications.command("test", short_help="Send a test message to every target.")
def send_test(
    config: opt.Config,
    overrides: Annotated[list[str] | None, opt.set_option("notify.heartbeat=null")] = None,
    json: opt.JsonOption = False,
) -> int:
    """Send a test message to every URL of notify.urls, and a /log to the heartbeat.

    Exits with 0 if all of them were delivered, else with 4.

    Examples:
        ddptrain notify test nightly.yaml
    """
    from ddptrain.config.load import load_config
    from ddptrain.host_identity import this_host
    from ddptrain.notify.heartbeat import Heartbeat
    from ddptrain.notify.sender import Delivery, Message, code, send
    from ddptrain.optional_packages import require

    resolved = opt.checked(partial(load_config, config), overrides or [], {})
    settings = resolved.config.notify
    if not settings.urls and not settings.heartbeat:
        raise UsageError(f"{config} has neither notify.urls nor notify.heartbeat: there is nothing to test")
    if settings.urls:
        require("apprise", "notify", "leave out notify.urls")
    body = f"ddptrain can send messages from {code(this_host().name)}. The configuration is {code(str(resolved.path))}."
    message = Message("Test message of ddptrain", body)
    deliveries = send(message, settings.urls, retries=0, secrets=resolved.secrets)
    if settings.heartbeat:
        heartbeat = Heartbeat(settings.heartbeat, secrets=resolved.secrets)
        heartbeat.log(message.body)
        deliveries.append(Delivery(heartbeat.target, "; ".join(heartbeat.problems)))
    data = [{"target": each.target, "delivered": each.delivered, "problem": each.problem} for each in deliveries]
    print_result(data, (f"{each.target}: {each.problem or 'delivered'}" for each in deliveries), as_json=json)
    failed = sum(not each.delivered for each in deliveries)
    if failed and not json:
        say(f"{failed} of {len(deliveries)} messages were not delivered")
    return ExitCode.CLUSTER if failed else ExitCode.SUCCEEDED
