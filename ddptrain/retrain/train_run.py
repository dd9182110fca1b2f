"""The stage "train": an ordinary run with a fixed id, which a later start resumes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddptrain.errors import DdptrainError, ExitCode, RunPreempted, one_line
from ddptrain.results.lookup import load_run
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.retrain.cleanup.clean_up import policy_of
from ddptrain.retrain.cleanup.disk_space import check_space
from ddptrain.retrain.records import Stage
from ddptrain.retrain.start import Start

_PROGRESS_EVERY_S = 30.0
_SIGHUP_CODE = 129
_SIGNALLED = frozenset({ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED, _SIGHUP_CODE})


def train_run(start: Start) -> None:
    """Train, or resume the run of this retraining; a run that has succeeded is not trained again.

    Raises:
        ClusterError: there is not enough disk space.
        RunPreempted: a signal has ended the run; it has saved if it had begun to train.
        DdptrainError: the run has failed; with the exit code of the run.
    """
    from ddptrain.driver.run import LaunchOptions, train

    config, settings = start.resolved.config, start.settings
    kept = policy_of(settings.keep, config.name)
    check_space(config.results.dir, config.name, config.models.dir, settings.model, kept, start.began.run_id)
    options = LaunchOptions(
        run_id=start.began.run_id,
        output=start.options.output,
        resume="auto",
        full_traceback=start.options.full_traceback,
        all_ranks=start.options.all_ranks,
    )
    with _progress_to(start):
        code = train(start.resolved, options)
    if code != ExitCode.SUCCEEDED:
        raise _error(start, code)
    start.out.stage(Stage.TRAIN, f"run {start.began.run_id} has succeeded", run_id=start.began.run_id)
    start.update(stage=Stage.TRAIN)


@contextmanager
def _progress_to(start: Start) -> Iterator[None]:
    """Tell the heartbeat how the training goes, until the block ends."""
    over = threading.Event()
    folder = open_runs_dir(start.resolved.config.results.dir).folder / start.began.run_id

    def watch() -> None:
        reported = ""
        while not over.wait(_PROGRESS_EVERY_S):
            metrics = sorted(load_run(folder).record.last_metrics.items())
            text = ", ".join(f"{name} {value:.4g}" for name, value in metrics if value is not None)
            if text and text != reported:
                reported = text
                start.heartbeat.progress(f"run {start.began.run_id}: {text}")

    thread = threading.Thread(target=watch, name="ddptrain-progress", daemon=True)
    if start.resolved.config.notify.heartbeat:
        thread.start()
    try:
        yield
    finally:
        over.set()


def _error(start: Start, code: int) -> DdptrainError:
    """The error of a run that ended with this exit code, with the root cause that run.json names."""
    reason = ""
    with suppress(DdptrainError):  # the run may not have begun, or its store is gone
        failure = open_runs_dir(start.resolved.config.results.dir).find(start.began.run_id).record.failure
        reason = ": ".join(part for part in (failure.type, one_line(failure.message)) if part) if failure else ""
    run = f"(run {start.began.run_id})"
    if code in _SIGNALLED:
        return RunPreempted(f"{reason or 'stopped by a signal'} {run}")
    error = DdptrainError(f"{reason or f'exit code {code}'} {run}")
    error.exit_code = code
    return error
