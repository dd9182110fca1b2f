"""`ddptrain retrain`, `schedule` and `notify`: training that cron or systemd starts, and messages about it."""

from __future__ import annotations

import dataclasses
import json as json_
import os
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.printing import print_json, print_result, say, write
from ddptrain.cli.train import reporting_of
from ddptrain.errors import DdptrainError, ExitCode, UsageError, one_line
from ddptrain.text_tables import clean_table

schedules = typer.Typer(help="Retrain at given times: add, list, remove.", no_args_is_help=True)
notifications = typer.Typer(help="Notifications of runs and retrainings: try them.", no_args_is_help=True)

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
        chosen = RetrainOptions(
            force, resolve_slot(slot), dry_run, output.value, opt.wants_full_traceback(), all_ranks, reporting
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
    from ddptrain.schedule.entries import make_entry, parse_schedule

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
        for line in installing.install(entry):
            say(line)
        say(f"installed as {entry.name}; ddptrain schedule list shows it, schedule remove {entry.name} removes it")
    else:
        say(f"nothing is installed: add --install to install it with {target}")
    say(f"next time: {schedule.next(datetime.now(UTC)):{_MINUTE}} UTC")


@schedules.command("list", short_help="Show the schedules, with the last and the next time.")
def list_(json: opt.JsonOption = False) -> int:
    """Show the installed schedules, the last retraining of each model, and the next time.

    Examples:
        ddptrain schedule list
    """
    from ddptrain.schedule.entries import slot_text
    from ddptrain.schedule.install import installed

    entries, problems = installed()
    found: list[dict[str, Any]] = []
    rows = [("NAME", "MODEL", "WHEN", "WITH", "LAST", "NEXT")]
    for entry in entries:
        last, text = None, "-"
        try:
            last = entry.last()
        except DdptrainError as error:
            text = f"unknown: {one_line(error)}"
        zone = ZoneInfo(entry.schedule.zone)
        if last is not None:
            text = f"{datetime.fromisoformat(last.started_at).astimezone(zone):{_MINUTE}} {last.status}"
        following = entry.schedule.next(datetime.now(UTC))
        about = {"last": last and dataclasses.asdict(last), "next": slot_text(following)}
        found.append({**dataclasses.asdict(entry), **about})
        shown = f"{following.astimezone(zone):{_MINUTE}}"
        rows.append((entry.name, entry.model, entry.at, entry.target, text, shown))
    if json:
        print_json(found)
    elif found:
        write([clean_table(rows)])
    elif not problems:
        say("no schedules are installed; ddptrain schedule add CONFIG --at TIME --install adds one")
    for problem in problems:
        say(problem)
    return ExitCode.CLUSTER if problems else ExitCode.SUCCEEDED


@schedules.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]) -> None:
    """Remove an installed schedule from its scheduler. The model and its versions stay.

    Examples:
        ddptrain schedule remove petnames
    """
    from ddptrain.schedule.install import uninstall

    entry = uninstall(name)
    write([f"removed the schedule {name} from {entry.target}"])


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
