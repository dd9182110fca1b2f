"""`ddptrain watch SWEEP`: shows a sweep of another process, as `ddptrain sweep` shows it, from its files."""

from __future__ import annotations

import time
from pathlib import Path

from ddptrain.driver.display import Display
from ddptrain.errors import ExitCode
from ddptrain.results.layout import valid_run_id
from ddptrain.results.runs import LocalRuns
from ddptrain.results.sweep_record import FoundSweep, SweepRecord, TrialRecord, TrialState, find_sweep
from ddptrain.sweep import output

_LOOK_EVERY_S, _STORE_EVERY_S = 0.5, 2.0
_BROKEN_PIPE = 128 + 13


def watch_sweep(sweep: FoundSweep, mode: str) -> int:
    """Show a sweep until it has ended, and then its end; return its exit code. 130: Ctrl-C has ended the watching.

    mode: as `Display` takes it. Raises UsageError if sweep.json can't be read.
    """
    runs, where, running = sweep.trials, sweep.where, list[output.RunningTrial]()
    record, every_s = sweep.record, _LOOK_EVERY_S if isinstance(sweep.trials, LocalRuns) else _STORE_EVERY_S

    def look(trial: TrialRecord) -> output.RunningTrial:
        known = bool(trial.run_ids) and valid_run_id(trial.run_ids[-1])
        view = runs.get(trial.run_ids[-1]) if known else None
        progress = view.record.progress if view is not None else None
        return output.RunningTrial(trial, progress.done if progress else None, progress.total if progress else None)

    def rows(status: str, elapsed_s: float, height: int) -> list[str]:
        return output.live_rows(record, running, status, elapsed_s, height)

    with Display(mode, Path(where), "", rows=rows, elapsed_s=record.duration_s or 0.0) as display:
        display.notice(f"sweep {record.sweep_id} in {where}: {output.ended_words(record)} ended")
        known: dict[int, TrialState] = {trial.number: trial.state for trial in record.trials}
        try:
            while record.status == "running" and not display.broken:
                running[:] = [look(trial) for trial in record.trials if trial.state is TrialState.RUNNING]
                time.sleep(every_s)
                if (found := find_sweep("", f"{where}/")) is None:
                    break
                record = found.record
                for trial in record.trials:
                    _show_change(display, trial, known.get(trial.number), record)
                    known[trial.number] = trial.state
        except KeyboardInterrupt:
            display.notice(f"sweep {record.sweep_id} goes on; ddptrain stop {record.sweep_id} would end it")
            return ExitCode.INTERRUPTED
        if record.status == "running":
            return _BROKEN_PIPE
        running.clear()
        display.close(output.summary_lines(record, where), output.last_event(record, where))
    return ExitCode.CLUSTER if record.exit_code is None else record.exit_code


def _show_change(display: Display, trial: TrialRecord, before: TrialState | None, record: SweepRecord) -> None:
    if before is None:
        display.on_event(output.trial_event("trial_started", trial))
    if trial.state is before or not trial.state.is_final:
        return
    display.on_event(output.trial_event("trial_ended", trial))
    text, level = output.ended_notice(trial, record)
    display.notice(text, level=level)
