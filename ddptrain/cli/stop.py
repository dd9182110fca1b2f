"""`ddptrain stop RUN`: ends a run that another shell or host started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_result, say
from ddptrain.errors import UsageError, one_line
from ddptrain.text_tables import clean_line

if TYPE_CHECKING:
    from ddptrain.driver.control.stop import StopTarget
    from ddptrain.results.lookup import RunView

_STORE_EVERY_S = 2.0


def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete.runs,
            help="A run's id, the start of one, latest, a directory, a URL, or a sweep.",
        ),
    ],
    now: Annotated[bool, typer.Option("--now", help="Don't let the ranks finish their step and save.")] = False,
    as_json: JsonOption = False,
) -> None:
    """End a run: its ranks finish their step and save, so that --resume can go on; wait until it has ended.

    It works in any shell, and on any host, that sees the run's directory; a run in an object store is stopped
    on its driver's host.
    """
    from ddptrain.driver.control.stop import is_active, stop_run

    if _stop_sweep(run, now=now, as_json=as_json):
        return
    target = _stop_target(run)
    was_active = is_active(target.look())
    ended = stop_run(target, now=now, by=_who(), tell=lambda text: say(f"ddptrain: {text}"))
    fields = {"run_id": ended.run_id, "status": str(ended.status), "exit_code": ended.record.exit_code}
    print_result(fields, [clean_line(_words(ended, was_active=was_active))], as_json=as_json, indent=None)


def _stop_sweep(name: str, *, now: bool, as_json: bool) -> bool:
    """Stop a sweep, if this is the name of one; return whether it is."""
    from ddptrain.sweep.stop import find_target, stop_sweep

    target = find_target(PLACES.runs, name)
    if target is None:
        return False
    record, was_running = stop_sweep(target, now=now, tell=lambda text: say(f"ddptrain: {text}"))
    fields = {"sweep_id": record.sweep_id, "status": record.status, "exit_code": record.exit_code}
    hint = "; continue with ddptrain sweep CONFIG --resume" if was_running and record.exit_code else ""
    ended = f"{'' if was_running else 'is not running, it has ended: '}{record.status} (exit code {record.exit_code})"
    print_result(fields, [f"sweep {target.name} {ended}{hint}"], as_json=as_json, indent=None)
    return True


def _stop_target(run: str) -> StopTarget:
    """Return the run to stop, and the folder where its driver looks for requests.

    Raises:
        RunNotFound: there is no such run.
        UsageError: run.json can't be read, or the folder exists only on the driver's host.
    """
    import socket

    from ddptrain.driver.control.stop import StopTarget, is_active
    from ddptrain.results.layout import RunLayout
    from ddptrain.results.lookup import load_run
    from ddptrain.results.remote.runs import StoreRuns, open_runs_dir, split_run
    from ddptrain.results.run_record import RunStatus

    place, name = split_run(run, PLACES.runs)
    runs = open_runs_dir(place)
    view = runs.find(name)
    run_id, driver = view.run_id, view.record.driver
    if view.status == RunStatus.UNREADABLE:
        raise UsageError(f"run {run_id} can't be stopped: {view.problem}")
    if view.layout.is_original or not isinstance(runs, StoreRuns):
        return StopTarget(view.layout, lambda: load_run(view.layout.root))
    if is_active(view) and driver.host != socket.gethostname():
        raise UsageError(
            f"run {run_id} can only be stopped on {driver.host}, where its driver is process {driver.pid}: "
            "it has no directory that other hosts see"
        )
    return StopTarget(RunLayout(runs.work / run_id), lambda: runs.find(run_id), look_every_s=_STORE_EVERY_S)


def _words(view: RunView, *, was_active: bool) -> str:
    """Return the end of the run in one line."""
    from ddptrain.results.run_record import RunStatus

    record = view.record
    code = "" if record.exit_code is None else f" (exit code {record.exit_code})"
    why = f": {one_line(record.failure.message)}" if record.failure and record.failure.message else ""
    can_go_on = view.status in (RunStatus.PREEMPTED, RunStatus.CANCELLED) and record.checkpoints
    saved = f"; continue with --resume {view.run_id}" if can_go_on else ""
    how = f"{view.status_text}{code}{why}{saved}"
    return f"run {view.run_id} {how}" if was_active else f"run {view.run_id} is not running, it has ended: {how}"


def _who() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
