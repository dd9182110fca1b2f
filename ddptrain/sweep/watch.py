"""`ddptrain watch SWEEP`: shows a sweep of another process, as `ddptrain sweep` shows it, from its files."""

from __future__ import annotations

import time
from pathlib import Path

from ddptrain.driver.display import Display, open_display
from ddptrain.errors import ExitCode
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.run_store import NeededFiles
from ddptrain.sweep import output
from ddptrain.sweep.listing import seen
from ddptrain.sweep.records import SweepRecord, TrialRecord, TrialState
from ddptrain.sweep.stop import SweepTarget

_LOOK_EVERY_S = 0.5
_BROKEN_PIPE = 128 + 13


def watch_sweep(target: SweepTarget, where: str, mode: str) -> int:
    """Show a sweep until it has ended, and then its end; return its exit code. 130: Ctrl-C has ended the watching.

    where: its folder or URL. mode: as `open_display` takes it. Raises UsageError if sweep.json can't be read.
    """
    runs, running = open_runs_dir(where), list[output.RunningTrial]()
    record = seen(target.read(), target)

    def look(trial: TrialRecord) -> output.RunningTrial:
        view = runs.find_exact(trial.run_ids[-1], NeededFiles.NOTHING) if trial.run_ids else None
        progress = view.record.progress if view is not None else None
        return output.RunningTrial(trial, progress.done if progress else None, progress.total if progress else None)

    rows = output.TrialRows(lambda: record, lambda: running)
    with open_display(mode, Path(where), "", rows=rows, elapsed_s=record.duration_s or 0.0) as display:
        display.notice(f"sweep {target.name} in {where}: {output.ended_words(record)} ended")
        known: dict[int, TrialState] = {trial.number: trial.state for trial in record.trials}
        try:
            while record.status == "running" and not display.broken:
                running[:] = [look(trial) for trial in record.trials if trial.state is TrialState.RUNNING]
                time.sleep(max(_LOOK_EVERY_S, target.look_every_s))
                record = seen(target.read(), target)
                for trial in record.trials:
                    _show_change(display, trial, known.get(trial.number), record)
                    known[trial.number] = trial.state
        except KeyboardInterrupt:
            display.notice(f"sweep {target.name} goes on; ddptrain stop {target.name} would end it")
            return ExitCode.INTERRUPTED
        if record.status == "running":
            return _BROKEN_PIPE
        running.clear()
        display.close({}, output.summary_lines(record, where), output.last_event(record, where))
    return ExitCode.CLUSTER if record.exit_code is None else record.exit_code


def _show_change(display: Display, trial: TrialRecord, before: TrialState | None, record: SweepRecord) -> None:
    if before is None:
        display.event(output.trial_event("trial_started", trial))
    if trial.state is before or not trial.state.is_final:
        return
    display.event(output.trial_event("trial_ended", trial))
    text, level = output.ended_notice(trial, record)
    display.notice(text, level=level)
