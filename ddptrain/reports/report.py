"""What a report contains: a run, or the error that prevented it; of a retraining also the comparison of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from ddptrain.errors import SIGNALLED, ConfigError, DdptrainError, ExitCode, Problem, one_line
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import root_cause

_NOT_WRONG = SIGNALLED | {ExitCode.REJECTED, ExitCode.DEADLINE, ExitCode.PREEMPTED}


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of a retraining: status is done, skipped or failed; `detail` is one line."""

    name: str
    status: str
    duration_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The content of all reports.

    name: the same for each run of a configuration, as "petnames"; CI services compare test cases by it.
    status: succeeded, failed, promoted, rejected, ... reason: why it ended so, in one line; "" for the reasons of the
    gate, or the run's failure.
    view: the run; None if none was started. problems: of the configuration.
    retraining: its record, with the new version, the scores and the gate; stages: what was done.
    secrets: texts that are left out of the ranks' last lines.
    """

    name: str
    status: str
    exit_code: int
    reason: str = ""
    view: RunView | None = None
    problems: tuple[Problem, ...] = ()
    retraining: RetrainRecord | None = None
    stages: Sequence[StageReport] = ()
    secrets: Sequence[str] = field(default=(), repr=False)

    @classmethod
    def of_run(cls, view: RunView, secrets: Sequence[str] = ()) -> Self:
        """Return the report of a run that has ended."""
        record = view.record
        exit_code = ExitCode.INTERNAL if record.exit_code is None else record.exit_code
        return cls(record.name or view.run_id, str(view.status), exit_code, view=view, secrets=secrets)

    @classmethod
    def of_error(cls, name: str, error: DdptrainError) -> Self:
        """Return the report of an error before a run began."""
        problems = error.problems if isinstance(error, ConfigError) else ()
        what = f"the configuration has {len(problems)} problems" if len(problems) > 1 else one_line(error)
        return cls(name, "failed", error.exit_code, what, problems=problems)

    @property
    def model(self) -> str:
        """The model that was retrained, or ""."""
        return self.retraining.model if self.retraining else ""

    @property
    def version(self) -> int | None:
        """The version that a retraining has made."""
        return self.retraining.version if self.retraining else None

    @property
    def gate(self) -> Sequence[GateOutcome]:
        """The conditions of the gate."""
        return self.retraining.gate if self.retraining else ()

    @property
    def level(self) -> str:
        """The level of its annotation: error, warning (it ended early or was rejected), or "" if all is well."""
        if self.exit_code == ExitCode.SUCCEEDED:
            return ""
        return "warning" if self.exit_code in _NOT_WRONG else "error"

    @property
    def cause(self) -> str:
        """Why it did not succeed, in one line; "" if it did and no reason was given."""
        refused = [each.reason for each in self.gate if not each.passed]
        failure = self.view.record.failure if self.view is not None else None
        if self.reason or refused:
            return self.reason or "; ".join(refused)
        return root_cause(failure) or (self.view.problem if self.view is not None else "")
