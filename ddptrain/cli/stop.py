"""`ddptrain stop RUN`: ends a run that another shell or host started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES, JsonOption
from ddptrain.cli.printing import print_result, say
from ddptrain.text_tables import clean_line

if TYPE_CHECKING:
    from ddptrain.results.lookup import RunView


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
    from ddptrain.driver.control.stop import find_target, is_active, stop_run

    target = find_target(PLACES.runs, run)
    was_active = is_active(target.look())
    ended = stop_run(target, now=now, by=_who(), tell=lambda text: say(f"ddptrain: {text}"))
    fields = {"run_id": ended.run_id, "status": str(ended.status), "exit_code": ended.record.exit_code}
    print_result(fields, [clean_line(_words(ended, was_active=was_active))], as_json=as_json, indent=None)


def _words(view: RunView, *, was_active: bool) -> str:
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
