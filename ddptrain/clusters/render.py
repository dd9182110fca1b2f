"""The text of `ddptrain cluster status`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ddptrain.clusters.status import State, View
from ddptrain.config.wording import counted
from ddptrain.text_tables import Section, clean, clean_line

HEADER = ("NAME", "STATE", "BACKEND", "SLOTS", "FREE", "STARTED (UTC)", "ADDRESS", "RUNS")

_ACCESS = {
    "tls": "whoever has its certificate: TLS",
    "tcp": "everyone who can reach it: no certificate",
}


def row(view: View) -> tuple[str, ...]:
    """Return the cells for HEADER; for a cluster that is not up, the reason instead of the address."""
    record, is_up = view.cluster, view.state == State.UP
    slots = (str(view.total("slots")), str(view.total("free"))) if is_up else ("-", "-")
    runs = ", ".join(run["run_id"] for run in view.runs)
    where = record.address if is_up else view.reason
    cells = (record.name, str(view.state), record.backend, *slots, _time(record.started_at), where, runs)
    return tuple(clean_line(cell) for cell in cells)


def sections(view: View) -> list[Section]:
    """Return all sections about one cluster: titles with names and values. Empty values and sections are left out."""
    record, is_up = view.cluster, view.state == State.UP
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
    return f"for {asked}, for {run['waited_s']:.0f} s"


def _time(text: str) -> str:
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return "-"
