"""How a run ended, why, where to look, and which command comes next: the text of `ddptrain explain RUN`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ddptrain.errors import ExitCode
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import RunStatus, root_cause

_RESUMABLE = (RunStatus.FAILED, RunStatus.PREEMPTED, RunStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """The explanation of a run's end. look: commands and files to look at. next: the next commands, or a sentence."""

    run_id: str
    status: str
    exit_code: int | None
    end: str
    root_cause: str
    look: tuple[str, ...]
    next: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON data."""
        return asdict(self)

    def as_text(self) -> list[str]:
        """Return it as lines for people."""
        lines = [f"run {self.run_id} {self.end}"]
        if self.root_cause:
            lines += ["", "root cause:", f"  {self.root_cause}"]
        lines += ["", "where to look:", *(f"  {line}" for line in self.look)]
        lines += ["", "what to do next:", *(f"  {line}" for line in self.next)]
        return lines


def explain_run(view: RunView, runs_dir: str) -> RunExplanation:
    """Explain the end of a run; `runs_dir` is the --runs-dir of the commands that are named ("": the default)."""
    code = None if view.is_running else view.record.exit_code  # the end of a killed driver is not recorded
    return RunExplanation(
        view.run_id,
        view.shown_status,
        code,
        _end(view, code),
        root_cause(view.record.failure),
        tuple(_look(view, runs_dir)),
        tuple(_next(view, runs_dir)),
    )


def _end(view: RunView, code: int | None) -> str:
    if view.problem:
        return f"is not readable: {view.problem}"
    if view.is_running:
        return f"is {view.shown_status} in {view.record.driver.description}"
    if code is None:
        return f"is {view.status}; its driver recorded no exit code"
    return f"{view.status_text} (exit code {code})"


def _look(view: RunView, runs_dir: str) -> Iterator[str]:
    failure, layout = view.record.failure, view.layout
    yield f"ddptrain results show {view.run_id}{runs_dir}"
    if failure is not None and failure.rank is not None:
        yield f"ddptrain results logs {view.run_id} --rank {failure.rank}{runs_dir}"
    elif layout.logs():
        yield f"ddptrain results logs {view.run_id}{runs_dir}"
    if view.record.exit_code == ExitCode.HANG:
        yield f"{layout.where}/artifacts/stacks/ (the stacks of all ranks)"
    if view.status in (RunStatus.FAILED, RunStatus.CANCELLED) and view.record.exit_code is not None:
        yield f"ddptrain explain {view.record.exit_code} (likely causes, and what to do)"
    if not view.is_running:
        yield f"{layout.shown_path(layout.decision_log)} (what ddptrain decided, and why)"


def _next(view: RunView, runs_dir: str) -> Iterator[str]:
    if view.problem:
        yield "restore run.json from a backup, or delete the directory when its logs and checkpoints are not needed"
    elif view.is_running:
        yield f"ddptrain watch {view.run_id}{runs_dir}"
        yield f"ddptrain stop {view.run_id}{runs_dir}"
    elif view.status == RunStatus.SUCCEEDED:
        yield f"ddptrain results compare {view.run_id}{runs_dir}"
    elif view.status in _RESUMABLE and view.record.checkpoints:
        if view.record.exit_code == ExitCode.TRAINING_FAILED:
            yield "fix the root cause"
        yield f"the same command again, with --resume {view.run_id} (continues from {view.record.checkpoints[0]})"
    elif view.status in _RESUMABLE:
        yield "fix the root cause, and start the run again: it has no checkpoint to continue from"
    else:
        yield f"look at the host {view.record.driver.host or 'of its driver'}, and at this command again later"
