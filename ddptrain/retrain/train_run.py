"""The stage "train": an ordinary run with a fixed id, which a later start resumes."""

from __future__ import annotations

from contextlib import suppress

from ddptrain.errors import DdptrainError, ExitCode, RunPreempted, one_line
from ddptrain.retrain.records import Stage
from ddptrain.retrain.start import Start

_SIGHUP_CODE = 129
_SIGNALLED = frozenset({ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED, _SIGHUP_CODE})


def train_run(start: Start) -> None:
    """Train, or resume the run of this retraining; a run that has succeeded is not trained again.

    Raises:
        RunPreempted: a signal has ended the run; it has saved if it had begun to train.
        DdptrainError: the run has failed; with the exit code of the run.
    """
    from ddptrain.driver.run import LaunchOptions, train

    options = LaunchOptions(
        run_id=start.began.run_id,
        output=start.options.output,
        resume="auto",
        full_traceback=start.options.full_traceback,
        all_ranks=start.options.all_ranks,
    )
    code = train(start.resolved, options)
    if code != ExitCode.SUCCEEDED:
        raise _error(start, code)
    start.out.stage(Stage.TRAIN, f"run {start.began.run_id} has succeeded", run_id=start.began.run_id)
    start.update(stage=Stage.TRAIN)


def _error(start: Start, code: int) -> DdptrainError:
    """The error of a run that ended with this exit code, with the root cause that run.json names."""
    reason = ""
    with suppress(DdptrainError):  # the run may not have begun, or its store is gone
        failure = start.view().record.failure
        reason = ": ".join(part for part in (failure.type, one_line(failure.message)) if part) if failure else ""
    run = f"run {start.began.run_id}"
    if code in _SIGNALLED:
        return RunPreempted(f"{run} was stopped: {reason or 'by a signal'}")
    error = DdptrainError(f"{run} failed: {reason or f'exit code {code}'}")
    error.exit_code = code
    return error
