"""The text for `ddptrain cluster status` and `ddptrain cluster status`."""

from __future__ import annotations

from datetime import datetime

from ddptrain.clusters.record import Part
from ddptrain.clusters.status import ClusterRun, State, View, WorkerView
from ddptrain.config.wording import counted
from ddptrain.text_tables import Section, clean, clean_line

HEADER = ("NAME", "STATE", "BACKEND", "SLOTS", "FREE", "STARTED (UTC)", "ADDRESS", "RUNS")

_ACCESS = {
    "tls": "whoever has its certificate: TLS",
    "tcp": "everyone who can reach it: no certificate",
}


def row(view: View) -> tuple[str, ...]:
    """Return the cells for HEADER; for a cluster that is not up, the reason instead of the address."""
    record = view.cluster
    is_up = view.state == State.UP
    slots = (str(view.slots), str(view.free)) if is_up else ("-", "-")
    runs = ", ".join(run.run_id for run in view.runs)
    where = record.address if is_up else view.reason
    cells = (view.name, str(view.state), record.backend, *slots, _time(record.started_at), where, runs)
    return tuple(clean_line(cell) for cell in cells)


def sections(view: View) -> list[Section]:
    """Return all sections about one cluster: titles with names and values. Empty values and sections are left out."""
    record = view.cluster
    idle_s = record.config.idle_timeout_s
    about = [
        ("state", f"{view.state}: {view.reason}" if view.reason else str(view.state)),
        ("backend", record.backend),
        ("address", record.address),
        ("access", _ACCESS.get(record.address.partition("://")[0], "")),
        ("started", f"{_time(record.started_at)} UTC{f' on {record.host.name}' if record.host.name else ''}"),
        ("ends", f"after {idle_s:g} s without a run" if idle_s else ""),
        ("slots", _slots(view) if view.workers else ""),
        ("missing", _missing(view)),
        ("use", f"ddptrain train CONFIG --cluster {view.name}" if view.state == State.UP else ""),
        ("logs", f"ddptrain cluster logs {view.name}"),
    ]
    parts = [
        (f"cluster {view.name}", about),
        ("workers", [(worker.host, _worker(worker)) for worker in view.workers]),
        ("runs", [(run.run_id, f"{counted(run.slots, 'slot')} on {', '.join(run.hosts)}") for run in view.runs]),
        ("waiting", [(f"{place}. {run.run_id}", _waits(run)) for place, run in enumerate(view.waiting, 1)]),
        ("parts", [(part.name, _part(part)) for part in record.parts]),
    ]
    filled = ((title, [(clean(name), clean(value)) for name, value in lines if value]) for title, lines in parts)
    return [(title, lines) for title, lines in filled if lines]


def _slots(view: View) -> str:
    gpus = counted(view.gpus, "GPU") if view.gpus else "no GPU"
    return f"{view.slots} on {counted(len(view.hosts), 'host')}, {view.free} free, {gpus}"


def _missing(view: View) -> str:
    """Return the number of lost workers, and what replaces them."""
    lost = view.cluster.workers - len(view.workers)
    if view.state != State.UP or lost <= 0:
        return ""
    return f"{counted(lost, 'worker')}; ddptrain cluster down {view.name} and up again start a complete one"


def _worker(worker: WorkerView) -> str:
    warm = {None: "", True: ", warm", False: ", not warm yet"}[worker.warm]
    gpus = f", {counted(worker.gpus, 'GPU')}" if worker.gpus else ""
    name = f", {worker.name}" if worker.name not in (worker.host, worker.address) else ""
    return f"{counted(worker.slots, 'slot')}, {worker.free} free{gpus}{warm}{name}"


def _waits(run: ClusterRun) -> str:
    asked = counted(run.asked, "slot") if run.asked is not None else "all slots"
    return f"for {asked}, for {run.waited_s:.0f} s"


def _part(part: Part) -> str:
    return f"process {part.process.pid}" if part.process else part.id or "not started"


def _time(text: str) -> str:
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return "-"
