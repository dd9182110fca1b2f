"""`ddptrain retrain`: the stages of one start, from the lock of the model to the clean-up.

Each stage is idempotent, and the record of the retraining (records.py) names the last one that is complete. So a start
after a kill or a failure continues with the next stage.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver.control.signals import signals_to
from ddptrain.errors import (
    DdptrainError,
    ExitCode,
    Interrupted,
    RunLocked,
    RunPreempted,
    UsageError,
    one_line,
)
from ddptrain.log import Log
from ddptrain.notify.sender import missing_variables
from ddptrain.results.run_record import utc_now
from ddptrain.retrain import plan
from ddptrain.retrain.check_data import check_data, would
from ddptrain.retrain.fingerprint import config_digest
from ddptrain.retrain.finish import conclude, report_end
from ddptrain.retrain.promotion import decide, outcome
from ddptrain.retrain.records import RetrainRecord, RetrainStatus, Stage
from ddptrain.retrain.start import End, RetrainOptions, Start
from ddptrain.retrain.train_run import train_run

_log = Log(__name__)
_LOOKED_AT = 50  # earlier retrainings


def retrain(resolved: ResolvedConfig, options: RetrainOptions) -> int:
    """Retrain the model of a configuration; return the exit code.

    Raises UsageError if the configuration has no section retrain, or the registry cannot be opened; StoreError.
    """
    settings = resolved.config.retrain
    if settings is None:
        example = f"retrain: {{model: {resolved.config.name}}}"
        raise UsageError(f"{resolved.path} has no section retrain, which names the model: add for example {example}")
    return Retraining(Start.of(resolved, settings, options)).run()


class Retraining:
    """One start of the command."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.deadline = Deadline(start.settings.deadline)

    def run(self) -> int:
        """Go through the stages; record and show the end. Exceptions that are bugs are raised after that."""
        began = datetime.now(UTC)
        with ExitStack() as stack:
            self.start.signals = stack.enter_context(signals_to(queue.SimpleQueue()))
            bug: BaseException | None = None
            try:
                end = self._locked(stack)
            except BaseException as error:
                end = self._failed(error)
                bug = None if isinstance(error, DdptrainError | KeyboardInterrupt) else error
            duration_s = (datetime.now(UTC) - began).total_seconds()
            if end.status != RetrainStatus.SKIPPED and not self.start.options.dry_run:
                conclude(self.start, end, duration_s)
            self.start.out.end(
                f"retrain {self.start.settings.model} {end.status}: {end.reason}", self._last_event(end, duration_s)
            )
            report_end(self.start, end)
        if bug is not None:
            raise bug
        return int(end.exit_code)

    def _locked(self, stack: ExitStack) -> End:
        """Take the lock of the model for the rest of the start, and go through the stages."""
        start, settings = self.start, self.start.settings
        if settings.overlap != "allow" and not start.options.dry_run:
            try:
                with start.signals.interrupting():
                    stack.enter_context(start.owner.owned(settings.overlap, settings.wait, start.out.notice))
            except RunLocked as error:
                if settings.overlap != "skip":
                    raise
                return self._skip(str(error))
        stack.enter_context(self.deadline)
        return self._stages()

    def _skip(self, reason: str) -> End:
        if not self.start.options.dry_run:
            self.start.records.add_skip(reason, self.start.options.slot)
        return End(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, reason)

    def _stages(self) -> End:
        start, options = self.start, self.start.options
        start.digest = config_digest(start.resolved)
        start.earlier = start.records.newest(_LOOKED_AT)
        choice = plan.choose(start.earlier, start.digest, options.slot, force=options.force)
        if choice.skip:
            return self._skip(choice.skip)
        if choice.abandoned is not None:
            self._abandon(choice.abandoned)
        if not options.dry_run:
            start.heartbeat.begin()
            for problem in missing_variables(start.resolved.config.notify.urls):
                start.out.notice(f"notify.urls: {problem}", level="warning")
        start.out.stage(Stage.LOCK, self._lock_text(choice.continued), continued=choice.continued is not None)
        if choice.continued is not None:
            if options.dry_run:
                return would(f"continue retraining {choice.continued.number} with run {choice.continued.run_id}")
            start.resume(choice.continued.number)
        if not start.is_done(Stage.CHECK_DATA) and (end := check_data(start)):
            return end
        if not start.is_done(Stage.TRAIN):
            train_run(start)
        if not start.is_done(Stage.PROMOTE):
            decide(start)
        return outcome(start)

    def _lock_text(self, continued: RetrainRecord | None) -> str:
        model = f"model {self.start.settings.model} in {self.start.registry.where}"
        if continued is None:
            return model
        after = f"after the stage {continued.stage}" if continued.stage else "from its beginning"
        ended = "killed" if continued.is_running else continued.status
        return f"{model}; continuing retraining {continued.number} {after} (it was {ended})"

    def _abandon(self, record: RetrainRecord) -> None:
        text = f"retraining {record.number} is given up: workload, params, code or versions have changed since"
        self.start.out.notice(text)
        if not self.start.options.dry_run:
            adopted = self.start.records.adopt(record.number)
            ended = replace(adopted, status=RetrainStatus.ABANDONED, ended_at=utc_now(), reason=text)
            self.start.records.update(ended)

    def _failed(self, error: BaseException) -> End:
        """The end after an error of any stage."""
        _log.info("stage failed", error=error)
        owner, exit_code = self.start.owner, int(getattr(error, "exit_code", ExitCode.INTERNAL))
        if isinstance(error, Interrupted | RunPreempted | KeyboardInterrupt):
            if self.deadline.is_reached:
                text = f"the deadline of {self.deadline.seconds:g} s was reached; the next start continues"
                return End(RetrainStatus.DEADLINE, ExitCode.DEADLINE, text)
            if owner.lost is not None:
                return End(RetrainStatus.INTERRUPTED, ExitCode.LOCKED, one_line(owner.lost))
            if owner.replaced_by:
                text = f"handed over to {owner.replaced_by}, which has overlap: replace"
                return End(RetrainStatus.INTERRUPTED, exit_code, text)
            code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_code
            return End(RetrainStatus.INTERRUPTED, code, f"{one_line(error)}; the next start continues")
        if isinstance(error, DdptrainError):
            return End(RetrainStatus.FAILED, exit_code, str(error))
        return End(RetrainStatus.FAILED, ExitCode.INTERNAL, f"a bug in ddptrain: {error!r}")

    def _last_event(self, end: End, duration_s: float) -> dict[str, Any]:
        """The last object of `--output json`, without its stages."""
        about: dict[str, Any] = {"model": self.start.settings.model, "status": str(end.status)}
        about |= {"exit_code": int(end.exit_code), "reason": end.reason, "duration_s": round(duration_s, 3)}
        if (record := self.start.record) is not None:
            names = ("number", "run_id", "slot", "champion", "version", "scores", "gate", "difference", "starts")
            about |= {name: getattr(record, name) for name in names}
        return about


class Deadline:
    """A time limit in seconds for the `with` block; at its end this process gets SIGTERM, so that it saves and ends.

    None is no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.is_reached = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if self.seconds is not None:
            self._timer = threading.Timer(self.seconds, self._reach)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _reach(self) -> None:
        self.is_reached = True
        _log.info("deadline reached", seconds=self.seconds)
        os.kill(os.getpid(), signal.SIGTERM)
