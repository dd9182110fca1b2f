"""`ddptrain watch RUN` and `ddptrain stop RUN`: a run that another shell or host has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.printing import print_result, say
from ddptrain.text_tables import clean_line

if TYPE_CHECKING:
    from ddptrain.results.run import Run


def watch(
    run: opt.Run,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Earlier lines to show of each rank.")] = 10,
    all_ranks: opt.AllRanksOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
) -> int:
    """Show a run or a sweep that another shell started, as train and sweep show it, until it has ended.

    The exit code is that of the run; 4 if its driver was killed. Ctrl-C ends only the watching, with exit code 130:
    the run goes on. Of a run that has ended it shows the end.

    Examples:
        ddptrain watch latest
        ddptrain watch s3://bucket/runs/petnames-20250101-120000-ab12
    """
    from ddptrain.driver.watch import WatchOptions
    from ddptrain.driver.watch import watch as show
    from ddptrain.results.sweep_record import find_sweep

    if (sweep := find_sweep(opt.PLACES.runs, run)) is not None:
        from ddptrain.sweep.watch import watch_sweep

        return watch_sweep(sweep, output.value)
    runs, name = opt.place_of(run)
    return show(runs, runs.find(name), WatchOptions(output.value, lines, all_ranks))


def stop(
    run: opt.Run,
    now: Annotated[bool, typer.Option("--now", help="Don't let the ranks finish their step and save.")] = False,
    as_json: opt.JsonOption = False,
) -> None:
    """End a run: its ranks finish their step and save, so that --resume can go on; wait until it has ended.

    It works in any shell, and on any host, that sees the run's directory; a run in an object store is stopped
    on its driver's host. RUN may be a sweep.

    Examples:
        ddptrain stop latest
        ddptrain stop latest --now
    """
    from ddptrain.driver.control.stop import find_target, stop_run

    target = find_target(opt.PLACES.runs, run)
    was_active = target.look().goes_on
    ended = stop_run(target, now=now, by=_who(), tell=say)
    fields = {"run_id": ended.run_id, "status": str(ended.status), "exit_code": ended.record.exit_code}
    print_result(fields, [clean_line(_words(ended, was_active=was_active))], as_json=as_json, indent=None)


def _words(view: Run, *, was_active: bool) -> str:
    """Return the end of the run in one line."""
    from ddptrain.results.run_record import SWEEP, RunStatus, root_cause

    record = view.record
    if record.kind == SWEEP:
        hint = "; continue with ddptrain sweep CONFIG --resume" if record.exit_code else ""
        state = "" if was_active else "is not running, it has ended: "
        return f"sweep {view.run_id} {state}{view.status} (exit code {record.exit_code}){hint}"
    code = "" if record.exit_code is None else f" (exit code {record.exit_code})"
    why = f": {cause}" if (cause := root_cause(record.failure)) else ""
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
