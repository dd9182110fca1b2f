"""`ddptrain cluster`: start, show and end clusters that keep running after the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import JsonOption, checked
from ddptrain.cli.printing import print_json, print_result, say, write
from ddptrain.config.wording import counted, nearest, shorten
from ddptrain.errors import DdptrainError, ExitCode, UsageError
from ddptrain.text_tables import Section, clean, clean_line, plain_sections, plain_table

if TYPE_CHECKING:
    from ddptrain.clusters.status import View

app = typer.Typer(name="cluster", help="Start a cluster that stays up; look at it, end it.", no_args_is_help=True)

_HEADER = ("NAME", "STATE", "BACKEND", "SLOTS", "FREE", "STARTED (UTC)", "ADDRESS", "RUNS")

_ACCESS = {
    "tls": "whoever has its certificate: TLS",
    "tcp": "everyone who can reach it: no certificate",
}

Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete.clusters, help="A cluster's name.")]


@app.command(short_help="Start a cluster, and wait until it is warm.")
def up(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            autocompletion=complete.configurations,
            help="YAML file whose cluster section is used, or an example's name.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name (cluster.name); by default the backend's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Where its workers come from (cluster.backend).")] = None,
    ranks: Annotated[int | None, typer.Option(help="Slots, one for each training process (cluster.ranks).")] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="auto|N", help="GPUs to use; 0 is the CPU (cluster.gpus).")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="A host, as ssh knows it (cluster.ssh.hosts); repeatable.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, as --set cluster.ssh.python=/opt/bin/python."),
    ] = None,
    idle_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End it after this time without a run.")
    ] = None,
    if_needed: Annotated[
        bool,
        typer.Option("--if-needed", help="Succeed if it is up with the same settings; wait for one that is starting."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Start a cluster that keeps running after this command, and wait until all its workers are warm.

    Examples:
        ddptrain cluster up --ranks 4
        ddptrain cluster up --backend ssh --name lab --host a --host b
    """
    from ddptrain.clusters import lifecycle
    from ddptrain.clusters.signals import interruptible
    from ddptrain.config.load import load_cluster

    options = {
        "--name": ("name", name),
        "--backend": ("backend", backend),
        "--ranks": ("ranks", ranks),
        "--gpus": ("gpus", gpus),
        "--host": ("ssh.hosts", host or None),
        "--idle-timeout": ("idle_timeout_s", idle_timeout),
    }
    loaded = checked(partial(load_cluster, config), overrides or [], _as_overrides(options))
    with interruptible():
        view = lifecycle.up(loaded, loaded.name or loaded.backend, say, if_needed=if_needed)
    _print_view(view, as_json=json)


@app.command(short_help="Show a cluster and who uses it; without a name list all.")
def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", autocompletion=complete.clusters, help="A cluster's name; by default all."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show a cluster: its hosts, which runs hold or wait for slots, its jobs and processes. Without a name: list all.

    Exit code 4 if the cluster can't be used.

    Examples:
        ddptrain cluster status
        ddptrain cluster status lab
    """
    from ddptrain.clusters import record
    from ddptrain.clusters import status as clusters_status

    if name is None:
        views = clusters_status.every()
        if json:
            print_json([view.as_dict() for view in views])
        elif views:
            write([plain_table([_HEADER, *(_row(view) for view in views)])])
        else:
            say("no clusters; ddptrain cluster up starts one")
        return
    view = clusters_status.at(record.find(name))
    _print_view(view, as_json=json)
    if view.state in (clusters_status.State.ENDED, clusters_status.State.ELSEWHERE):
        raise typer.Exit(ExitCode.CLUSTER)


@app.command(short_help="Print the last lines of its processes.")
def logs(
    name: Name,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of last lines of each process.")] = 50,
    source: Annotated[
        str | None, typer.Option(help="Only these logs: scheduler, worker, or the name of a host.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the last log lines of scheduler and workers, including those that have ended.

    The scheduler logs which runs got slots, a worker only warnings and errors; DDPTRAIN_LOG=debug in the environment
    of `cluster up` gives more.

    Examples:
        ddptrain cluster logs lab --lines 50
    """
    from ddptrain.clusters import lifecycle

    found = lifecycle.logs(name, lines, source)
    texts = {each: clean(text).rstrip() or "(no warnings and no errors)" for each, text in found.items()}
    blocks = (f"==> {each} <==\n{text}\n" for each, text in texts.items())
    print_result(found, blocks, as_json=json)


@app.command()
def down(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", autocompletion=complete.clusters, help="A cluster's name."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="End every cluster of this user.")] = False,
    now: Annotated[bool, typer.Option("--now", help="End it even if runs use it; these runs fail.")] = False,
    json: JsonOption = False,
) -> None:
    """End a cluster with all its jobs and processes. The exit code is also 0 if there is no such cluster.

    Examples:
        ddptrain cluster down lab
    """
    from ddptrain.clusters import lifecycle, record
    from ddptrain.clusters.signals import interruptible

    if (name is None) != all_:
        raise UsageError("name one cluster, or --all")
    failed: dict[str, DdptrainError] = {}
    ended: list[str] = []
    names = [name] if name is not None else [each.name for each in record.every()]
    with interruptible():
        for each in names:
            try:
                lifecycle.down(each, say, now=now)
                ended.append(each)
            except record.ClusterNotFound:
                near = nearest(each, [other.name for other in record.every()])
                hint = f" (did you mean {near}?)" if near else ""
                say(f'there is no cluster "{shorten(each)}", so there is nothing to end{hint}')
            except DdptrainError as error:
                failed[each] = error
    data = {"ended": ended, "failed": {each: str(error) for each, error in failed.items()}}
    print_result(data, (f"cluster {each} is down" for each in ended), as_json=json)
    if not names:
        say("no clusters")
    first, *others = failed.values() or [None]
    for other in others:
        say(f"error: {other}")
    if first is not None:
        raise first


def _as_overrides(options: Mapping[str, tuple[str, object]]) -> dict[str, str]:
    """Convert options with their fields and values: `--set` text -> the option as it was typed."""
    typed = {}
    for option, (field, value) in options.items():
        if value is not None:
            # In YAML the text of `--gpus 2` is a number.
            text = value if field == "gpus" else json.dumps(value)
            values = value if isinstance(value, list) else [value]
            typed[f"cluster.{field}={text}"] = " ".join(f"{option} {each}" for each in values)
    return typed


def _print_view(view: View, *, as_json: bool) -> None:
    print_result(view.as_dict(), [plain_sections(_sections(view))], as_json=as_json)


def _row(view: View) -> tuple[str, ...]:
    """Return the cells for _HEADER; for a cluster that is not up, the reason instead of the address."""
    record, is_up = view.cluster, view.state == "up"
    slots = (str(view.total("slots")), str(view.total("free"))) if is_up else ("-", "-")
    runs = ", ".join(run["run_id"] for run in view.runs)
    where = record.address if is_up else view.reason
    cells = (record.name, str(view.state), record.backend, *slots, _time(record.started_at), where, runs)
    return tuple(clean_line(cell) for cell in cells)


def _sections(view: View) -> list[Section]:
    """Return all sections about one cluster: titles with names and values. Empty values and sections are left out."""
    record, is_up = view.cluster, view.state == "up"
    idle_s, gpus = record.config.idle_timeout_s, view.total("gpus")
    room = f"{view.total('slots')} on {counted(len(view.hosts), 'host')}, {view.total('free')} free"
    lost = record.workers - len(view.workers) if is_up else 0
    again = f"ddptrain cluster down {record.name} and up again start a complete one"
    about = [
        ("state", f"{view.state}: {view.reason}" if view.reason else str(view.state)),
        ("backend", record.backend),
        ("address", record.address),
        ("access", _ACCESS.get(record.address.partition("://")[0], "")),
        ("started", f"{_time(record.started_at)} UTC{f' on {record.host.name}' if record.host.name else ''}"),
        ("ends", f"after {idle_s:g} s without a run" if idle_s else ""),
        ("slots", f"{room}, {counted(gpus, 'GPU') if gpus else 'no GPU'}" if view.workers else ""),
        ("missing", f"{counted(lost, 'worker')}; {again}" if lost > 0 else ""),
        ("use", f"ddptrain train CONFIG --cluster {record.name}" if is_up else ""),
        ("logs", f"ddptrain cluster logs {record.name}"),
    ]
    parts = [
        (f"cluster {record.name}", about),
        ("workers", [(worker["host"], _worker(worker)) for worker in view.workers]),
        (
            "runs",
            [(run["run_id"], f"{counted(run['slots'], 'slot')} on {', '.join(run['hosts'])}") for run in view.runs],
        ),
        ("waiting", [(f"{run['place']}. {run['run_id']}", _waits(run)) for run in view.waiting]),
        ("parts", [(part.name, f"process {part.pid}" if part.pid else part.id) for part in record.parts]),
    ]
    filled = ((title, [(clean(name), clean(value)) for name, value in lines if value]) for title, lines in parts)
    return [(title, lines) for title, lines in filled if lines]


def _worker(worker: Mapping[str, Any]) -> str:
    warm = {None: "", True: ", warm", False: ", not warm yet"}[worker["warm"]]
    gpus = f", {counted(worker['gpus'], 'GPU')}" if worker["gpus"] else ""
    name = f", {worker['name']}" if worker["name"] not in (worker["host"], worker["address"]) else ""
    return f"{counted(worker['slots'], 'slot')}, {worker['free']} free{gpus}{warm}{name}"


def _waits(run: Mapping[str, Any]) -> str:
    asked = counted(run["asked"], "slot") if run["asked"] is not None else "all slots"
    priority = f", priority {run['priority']}" if run["priority"] else ""
    return f"for {asked}, for {run['waited_s']:.0f} s{priority}"


def _time(text: str) -> str:
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return "-"
