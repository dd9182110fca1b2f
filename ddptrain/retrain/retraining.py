"""`ddptrain retrain`: one start, from the lock of the model to the clean-up.

    lock ─ check data ─ train ─ evaluate ─ gate ─ promote ─ notify ─ clean up

Each stage is idempotent, and the record of the retraining names the last one that is complete. So a start after a kill
or a failure continues with the next stage.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import counted
from ddptrain.driver.control.signals import Signals, signals_to
from ddptrain.driver.control.stop import find_target, stop_run
from ddptrain.errors import (
    SIGNALLED,
    DdptrainError,
    ExitCode,
    Interrupted,
    RunLocked,
    RunNotFound,
    RunPreempted,
    UsageError,
    one_line,
)
from ddptrain.log import Log
from ddptrain.model_registry.add_run import add_run
from ddptrain.model_registry.records import RegistryDamaged
from ddptrain.model_registry.reference import CHAMPION
from ddptrain.model_registry.registry import ModelRegistry, open_version, user_name
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords, RetrainStatus, Stage
from ddptrain.notify.heartbeat import Heartbeat
from ddptrain.notify.run_messages import RunMessages
from ddptrain.notify.sender import missing_variables, send
from ddptrain.optional_packages import require
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.layout import BEST, new_run_id
from ddptrain.results.run import MODEL, Run
from ddptrain.results.run_record import root_cause, utc_now
from ddptrain.results.runs import open_runs_dir
from ddptrain.retrain import decisions
from ddptrain.retrain.clean_up import clean_up
from ddptrain.retrain.fingerprint import config_digest, difference, look_at_data, names_data
from ddptrain.retrain.messages import compose, events_to_report, known_states
from ddptrain.retrain.start import ModelLock, RetrainOptions, StageOutput

if TYPE_CHECKING:
    from ddptrain.reports.facts import StageReport
    from ddptrain.retrain.evaluation import Evaluation


_log = Log(__name__)
_LOOKED_AT = 50  # earlier retrainings
_ENDED: Mapping[str, str] = {
    RetrainStatus.RUNNING: "was killed",
    RetrainStatus.FAILED: "had failed",
    RetrainStatus.DEADLINE: "had reached its deadline",
}
_SIGNALLED = SIGNALLED | {ExitCode.PREEMPTED}
_TRAINED = (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)
_TO_BE_CONTINUED = (RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED)  # no failure: the next start continues
_LAST_EVENT = ("number", "run_id", "slot", "champion", "version", "scores", "gate", "difference", "starts")


def retrain(resolved: ResolvedConfig, options: RetrainOptions) -> int:
    """Retrain the model of a configuration; return the exit code.

    Raises UsageError if the configuration has no section retrain, the registry cannot be opened, or what sends its
    messages is not installed; StoreError.
    """
    if resolved.config.notify.urls:
        require("apprise", "notify", "leave out notify.urls")
    return Retraining(resolved, options).run()


class Retraining:
    """One start of the command. record: what is written; its number is 0 until the retraining has begun.

    earlier: the retrainings before it, newest first. digest: of the configuration.
    """

    def __init__(self, resolved: ResolvedConfig, options: RetrainOptions) -> None:
        """Open the registry. Raises UsageError, StoreError."""
        config = resolved.config
        self.resolved, self.settings, self.options = resolved, resolved.retrain, options
        self.model = self.settings.model
        self.registry = ModelRegistry.open(config.models.dir)
        self.records = RetrainRecords(self.registry.folder, self.model)
        self.lock = ModelLock(self.registry.folder, self.model)
        self.heartbeat = Heartbeat(config.notify.heartbeat, secrets=resolved.secrets)
        self.out = StageOutput(options.output == "json")
        self.signals = Signals(queue.SimpleQueue())
        self.earlier: list[RetrainRecord] = []
        self.out_of_time = False
        about = {"slot": options.slot, "forced": options.force, "user": user_name(), "host": socket.gethostname()}
        self.record = RetrainRecord(0, self.model, utc_now(), **about)  # type: ignore[arg-type]

    def run(self) -> int:
        """Go through the stages; record and show the end. Exceptions that are bugs are raised after that."""
        began_s = time.monotonic()
        with ExitStack() as stack:
            self.signals = stack.enter_context(signals_to(queue.SimpleQueue()))
            bug: BaseException | None = None
            try:
                end = self._lock_and_work(stack)
            except BaseException as error:
                end = self._failed(error)
                bug = None if isinstance(error, DdptrainError | KeyboardInterrupt) else error
            duration_s = time.monotonic() - began_s
            if end.status != RetrainStatus.SKIPPED and not self.options.dry_run:
                self._conclude(end, duration_s)
            names = ("model", "status", "exit_code", "reason", *(_LAST_EVENT if end.number else ()))
            last_event = {**{name: getattr(end, name) for name in names}, "duration_s": round(duration_s, 3)}
            self.out.end(f"retrain {self.model} {end.status}: {end.reason}", last_event)
            self._write_reports(end)
        if bug is not None:
            raise bug
        return int(end.exit_code or 0)

    def _lock_and_work(self, stack: ExitStack) -> RetrainRecord:
        """Take the lock of the model for the rest of the start, and go through the stages."""
        settings = self.settings
        if not self.options.dry_run:
            wait_s = 0.0 if settings.overlap == "skip" else settings.wait
            try:
                with self.signals.interrupting():
                    stack.enter_context(self.lock.held(wait_s, self.out.notice, self._stop_the_other))
            except RunLocked as error:
                if settings.overlap != "skip":
                    raise
                return self._ended(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, str(error))
        if settings.deadline is not None:
            timer = threading.Timer(settings.deadline, self._reach_deadline)
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        if end := self._choose() or (None if self._is_done(Stage.CHECK_DATA) else self._check_data()):
            return end
        if not self._is_done(Stage.TRAIN):
            self._train()
        if not self._is_done(Stage.PROMOTE):
            runs = open_runs_dir(self.resolved.config.results.dir)
            view = runs.find(self.record.run_id).fetch(*MODEL)
            view.checkpoint(BEST)  # so that one of a store is here
            if not self._is_done(Stage.EVALUATE):
                self._evaluate(view)
            if not self._is_done(Stage.GATE):
                self._judge()
            self._promote(view)
        return self._outcome()

    def _stop_the_other(self) -> None:
        """With `overlap: replace`, stop the run of the process that holds the model, as `ddptrain stop` does."""
        if self.settings.overlap != "replace":
            return
        other = next((each for each in self.records.newest(_LOOKED_AT) if each.is_running and each.run_id), None)
        if other is None:
            return
        try:
            target = find_target(self.resolved.config.results.dir, other.run_id)
            driver = target.look().record.driver

            def look() -> Run:
                if (view := target.look()).record.driver != driver:
                    raise RunNotFound(f"run {view.run_id} was continued by {view.record.driver.description}")
                return view

            asked_by = f"{user_name()}@{socket.gethostname()}"
            stop_run(replace(target, look=look), now=False, by=asked_by, tell=self.out.notice)
        except DdptrainError as error:  # it has not begun, or this host does not see its folder
            _log.info("run not stopped", run=other.run_id, reason=error)

    def _reach_deadline(self) -> None:
        self.out_of_time = True
        _log.info("deadline reached", seconds=self.settings.deadline)
        os.kill(os.getpid(), signal.SIGTERM)

    def _failed(self, error: BaseException) -> RetrainRecord:
        """Return the end after an error of any stage."""
        _log.info("stage failed", error=error)
        exit_code = int(getattr(error, "exit_code", ExitCode.INTERNAL))
        if isinstance(error, Interrupted | RunPreempted | KeyboardInterrupt):
            if self.out_of_time:
                text = f"the deadline of {self.settings.deadline:g} s was reached; the next start continues"
                return self._ended(RetrainStatus.DEADLINE, ExitCode.DEADLINE, text)
            if self.lock.lost is not None:
                return self._ended(RetrainStatus.INTERRUPTED, ExitCode.LOCKED, one_line(self.lock.lost))
            code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_code
            return self._ended(RetrainStatus.INTERRUPTED, code, f"{one_line(error)}; the next start continues")
        if isinstance(error, DdptrainError):
            return self._ended(RetrainStatus.FAILED, exit_code, str(error))
        return self._ended(RetrainStatus.FAILED, ExitCode.INTERNAL, f"a bug in ddptrain: {error!r}")

    # --- the record ---

    def _is_done(self, stage: Stage) -> bool:
        """Return whether this stage is complete, in this start or in an earlier one."""
        order = list(Stage)
        return order.index(self.record.stage) >= order.index(stage)

    def _ended(self, status: RetrainStatus, exit_code: int, reason: str) -> RetrainRecord:
        """Return the record with this end; it is not written."""
        return replace(self.record, status=status, exit_code=int(exit_code), reason=reason)

    def _would(self, what: str) -> RetrainRecord:
        """Return the end of a dry run."""
        return self._ended(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, f"dry run: it would {what}")

    def _write(self, record: RetrainRecord) -> None:
        """Write the record, under a new number if it has none."""
        if record.number:
            self.records.update(record)
        else:
            record = self.records.create(record)
        self.record = record

    def _update(self, **changes: Any) -> None:
        """Write changes to the record. Raises RunLocked if another process owns the model now, Interrupted."""
        self.lock.assure()
        self._write(replace(self.record, **changes))
        if self.signals.taken:
            raise Interrupted(self.signals.taken[0])

    def _expected_champions(self, earlier: RetrainRecord) -> set[int | None]:
        """Return the champion of the record, and the present one if a killed start of it had already promoted it."""
        now = self._champion()
        is_own = now is not None and self.registry.version(self.model, now).run_id == earlier.run_id
        return {earlier.champion, now if is_own else earlier.champion}

    def _continue(self, number: int) -> None:
        """Continue an earlier retraining: its record is now of this start.

        It trains again if its run has been deleted since, and evaluates again if another process has changed the
        champion.
        """
        earlier, own = self.records.read(number), self.record
        self.record = earlier
        changes: dict[str, Any] = {}
        if self._is_done(Stage.TRAIN) and not self._is_done(Stage.PROMOTE):
            if open_runs_dir(self.resolved.config.results.dir).get(earlier.run_id) is None:
                self.out.warn(f"run {earlier.run_id} has been deleted; training again")
                changes = {"stage": Stage.CHECK_DATA, "run_id": new_run_id(self.resolved.config.name)}
            elif self._is_done(Stage.EVALUATE) and self._champion() not in self._expected_champions(earlier):
                self.out.warn("the champion has changed; evaluating again")
                changes = {"stage": Stage.TRAIN}
        self._update(
            **changes,
            status=RetrainStatus.RUNNING,
            starts=earlier.starts + 1,
            started_at=utc_now(),
            slot=max(own.slot, earlier.slot),
            host=own.host,
            user=own.user,
            ended_at=None,
            exit_code=None,
            reason="",
        )

    def _champion(self) -> int | None:
        """Return the version that is the champion now. Raises StoreError."""
        return self.registry.state(self.model).version_of(CHAMPION)

    # --- lock, check data ---

    def _choose(self) -> RetrainRecord | None:
        """Continue an earlier retraining or begin a new one; return the end if the scheduled time is done."""
        options, out = self.options, self.out
        self.record = replace(self.record, config=config_digest(self.resolved))
        self.earlier = self.records.newest(_LOOKED_AT)
        choice = decisions.choose(self.earlier, self.record.config, options.slot, force=options.force)
        if choice.skip:
            return self._ended(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, choice.skip)
        if (old := choice.abandoned) is not None:
            text = f"retraining {old.number} is abandoned: workload, params, code or versions have changed since"
            out.notice(text)
            if not options.dry_run:
                self.records.update(replace(old, status=RetrainStatus.ABANDONED, ended_at=utc_now(), reason=text))
        if not options.dry_run:
            self.heartbeat.begin()
            for problem in missing_variables(self.resolved.config.notify.urls):
                out.warn(f"notify.urls: {problem}")
        where = f"model {self.model} in {self.registry.where}"
        if (last := choice.continued) is not None:
            after = f"after the stage {last.stage}" if last.stage else "from its beginning"
            ended = _ENDED.get(last.status, f"was {last.status}")
            where += f"; continuing retraining {last.number} {after} (it {ended})"
        out.stage(Stage.LOCK, where, continued=last is not None)
        if last is not None and options.dry_run:
            return self._would(f"continue retraining {last.number} with run {last.run_id}")
        if last is not None:
            self._continue(last.number)
        return None

    def _check_data(self) -> RetrainRecord | None:
        """List the data, and begin the retraining. Returns an end if there is nothing to train.

        Raises:
            UsageError: a source does not exist, or the data look wrong and --force is not given.
            StoreError: a source cannot be listed.
        """
        champion, force = self._champion(), self.options.force
        trained = [each for each in self.earlier if each.n_files and each.status in _TRAINED]
        before = next((each for each in trained if each.version == champion), next(iter(trained), None))
        with self.signals.interrupting():
            found = look_at_data(self.resolved)
        changes = difference(before, found) if before is not None else []
        has_sources, built_in = names_data(self.resolved), is_built_in(self.resolved.config.workload)
        if problem := decisions.data_problem(before, found, has_sources=has_sources):
            if not force:
                raise UsageError(f"{problem}; nothing was trained. If the data are right, add --force")
            self.out.warn(f"{problem}; training anyway, because of --force")
        if has_sources:
            changed = ", ".join(changes) or "unchanged" if before else "there is no earlier listing to compare with"
            text = f"{counted(found.n_files, found.noun)}, {found.size_bytes:,} bytes; {changed}"
        else:
            text = "built-in data" if built_in else "data.sources is empty, so changes of the data cannot be seen"
        size: dict[str, Any] = {"n_files": found.n_files, "size_bytes": found.size_bytes}
        self.out.stage(Stage.CHECK_DATA, text, difference=changes, files=found.n_files, size_bytes=found.size_bytes)
        self.record = replace(self.record, champion=champion, data=found.digest, classes=found.classes, **size)
        same = decisions.unchanged(self.earlier, champion, self.record.config, found.digest, self.settings)
        if same and (has_sources or built_in) and not self.record.run_id and not force:
            return self._unchanged(same)
        if self.options.dry_run:
            return self._would("train")
        self.record = replace(self.record, run_id=self.record.run_id or new_run_id(self.resolved.config.name))
        self._update(stage=Stage.CHECK_DATA, difference=tuple(changes))
        return None

    def _unchanged(self, reason: str) -> RetrainRecord:
        """Return the end if there is nothing to do; consecutive records of this kind are merged into one."""
        if self.options.dry_run:
            return self._would(f"train nothing: {reason}")
        last, own = self.earlier[0], self.record
        same = (last.status, last.config, last.data) == (RetrainStatus.UNCHANGED, own.config, own.data)
        if same and not own.number:
            self._continue(last.number)
        else:
            self._update()
        return self._ended(RetrainStatus.UNCHANGED, ExitCode.SUCCEEDED, reason)

    # --- train ---

    def _train(self) -> None:
        """Train, or resume the run of this retraining; a run that has succeeded is not trained again.

        Raises:
            RunPreempted: a signal has ended the run; it has saved if it had begun to train.
            DdptrainError: the run has failed; with the exit code of the run.
        """
        from ddptrain.driver.run import LaunchOptions, train

        run_id, options = self.record.run_id, self.options
        messages = [RunMessages(self.resolved, tells_end=False)] if self.resolved.config.notify.urls else []
        launch = LaunchOptions(
            run_id=run_id,
            output=options.output,
            resume="auto",
            full_traceback=options.full_traceback,
            all_ranks=options.all_ranks,
            observers=messages,
        )
        if code := train(self.resolved, launch):
            reason = f"exit code {code}"
            with suppress(DdptrainError):  # the run may not have begun, or its store cannot be read
                failure = open_runs_dir(self.resolved.config.results.dir).find(run_id).record.failure
                reason = root_cause(failure) or ("stopped by a signal" if code in _SIGNALLED else reason)
            error = (RunPreempted if code in _SIGNALLED else DdptrainError)(f"{reason} (run {run_id})")
            if code not in _SIGNALLED:
                error.exit_code = code
            raise error
        self.out.stage(Stage.TRAIN, f"run {run_id} has succeeded", run_id=run_id)
        self._update(stage=Stage.TRAIN)

    # --- evaluate, gate, promote ---

    def _evaluate(self, view: Run) -> None:
        """Score the candidate and the champion.

        With an evaluation function both are scored on the same held-out data, by the ranks. Otherwise the metrics are
        those of their checkpoints. A champion that is damaged has no scores.
        """
        from ddptrain.retrain.evaluation import Evaluation, EvaluationTarget, evaluate

        config, champion = self.resolved.config, self._champion()
        version, notes = None, []
        targets = [EvaluationTarget("candidate", view.root)]
        if champion is not None:
            try:
                version = self.registry.version(self.model, champion)
                targets.append(EvaluationTarget("champion", open_version(self.registry, version)))
            except (RegistryDamaged, UsageError) as error:
                version = None
                notes.append(f"the champion cannot be evaluated: {one_line(error)}")
                self.out.warn(notes[0])
        if is_built_in(config.workload) or config.evaluate:
            found = evaluate(self.resolved, targets, output=self.options.output)
            found = replace(found, notes=(*notes, *found.notes))
        else:
            scores: dict[str, Mapping[str, float]] = {"candidate": verify(view.checkpoint(BEST)).metrics}
            if version is not None:
                scores["champion"] = version.evaluation or version.metrics
                notes.append("metrics of the trainings, as there is no evaluate function")
            found = Evaluation(scores, notes=tuple(notes))
        results: dict[str, Any] = {"scores": found.scores, "notes": found.notes, "held_out": found.held_out}
        self.out.stage(Stage.EVALUATE, scores_text(found), **results)
        self._update(stage=Stage.EVALUATE, champion=champion, **results)

    def _judge(self) -> None:
        record = self.record
        why_none = "; ".join(record.notes) if record.champion is not None else ""
        scores = record.scores
        outcomes = decisions.judge(self.settings.gate, scores.get("candidate", {}), scores.get("champion"), why_none)
        passed = decisions.passed(outcomes)
        reasons = "; ".join(outcome.reason for outcome in outcomes) or "there are no conditions"
        text = f"{'passed' if passed else 'rejected'}: {reasons}"
        self.out.stage(Stage.GATE, text, passed=passed, conditions=outcomes)
        self._update(stage=Stage.GATE, gate=outcomes)

    def _promote(self, view: Run) -> None:
        """Add the candidate as a version, also if it was rejected; make it the champion if it has passed.

        Raises UsageError if another process has changed the champion: then the next start evaluates again.
        """
        record, registry = self.record, self.registry
        known = {"data": record.data, "held_out": record.held_out, "config": record.config}
        evaluation = record.scores.get("candidate", {})
        version = add_run(registry, self.model, view, BEST, evaluation=evaluation, **known).version
        if decisions.passed(record.gate):
            reason = f"retraining {record.number}" + (f" for {record.slot}" if record.slot else "")
            registry.promote(self.model, version, reason, expected=record.champion)
            text = f"version {version} is the champion"
        else:
            registry.reject(self.model, version, "; ".join(rule.reason for rule in record.gate if not rule.passed))
            text = f"version {version} is kept; "
            text += f"version {record.champion} stays the champion" if record.champion else "no champion"
        self.out.stage(Stage.PROMOTE, text, version=version)
        self._update(stage=Stage.PROMOTE, version=version)

    def _outcome(self) -> RetrainRecord:
        """Return the end of a retraining whose stage "promote" is complete."""
        record = self.record
        passed = decisions.passed(record.gate)
        reasons = "; ".join(rule.reason for rule in record.gate if passed or not rule.passed)
        if passed:
            reason = f"version {record.version} is the champion ({reasons})"
            return self._ended(RetrainStatus.PROMOTED, ExitCode.SUCCEEDED, reason)
        champion = f"version {record.champion} stays the champion" if record.champion else "there is no champion"
        reason = f"version {record.version} was rejected, {champion}: {reasons}"
        return self._ended(RetrainStatus.REJECTED, ExitCode.REJECTED, reason)

    # --- notify, clean up ---

    def _conclude(self, end: RetrainRecord, duration_s: float) -> None:
        """Record the end, notify the users, clean up, and send the last heartbeat. Problems are shown as warnings.

        After a training the record stays open until the users are notified: the next start does it if this one is
        killed. Users are notified also if nothing can be recorded, as on a full disk.
        """
        if self.lock.lost is not None:  # the record and the model are another process's now
            self.out.warn("the end of this start is not recorded: another process has taken over")
        else:
            end = self._record_end(end, duration_s)
        text = f"{end.status}: {end.reason}"
        continues = end.status in _TO_BE_CONTINUED
        for problem in self.heartbeat.log(text) if continues else self.heartbeat.end(end.exit_code, text):
            self.out.warn(problem)

    def _record_end(self, end: RetrainRecord, duration_s: float) -> RetrainRecord:
        is_notified = self._is_done(Stage.NOTIFY)
        trained = end.status in _TRAINED
        try:
            if not trained:
                self._write(replace(end, ended_at=utc_now()))
                end = self.record
            if not is_notified:
                is_notified = True
                end = replace(end, told=(*end.told, *self._notify(end, duration_s)))
                open_ = replace(end, status=RetrainStatus.RUNNING, exit_code=None, reason="", stage=Stage.NOTIFY)
                self._write(open_ if trained else end)
            if trained:
                self._clean_up()
                self._write(replace(end, stage=Stage.CLEAN_UP, ended_at=utc_now()))
            elif end.status == RetrainStatus.FAILED and self.lock.is_held:
                self._clean_up()  # otherwise a model that fails each night would fill the disk
        except DdptrainError as error:
            self.out.warn(f"the end of the retraining is not recorded: {one_line(error)}")
            if not is_notified:
                self._notify(end, duration_s)
        return end

    def _notify(self, end: RetrainRecord, duration_s: float) -> Sequence[str]:
        """Send a message if the state of the model has changed; return the events of the message."""
        settings = self.resolved.config.notify
        if not settings.urls:
            return ()
        earlier = self.earlier
        with suppress(DdptrainError):  # a registry that cannot be read: better one message too many
            earlier = earlier or [each for each in self.records.newest(_LOOKED_AT) if each.number != end.number]
        events = events_to_report(settings.on, end.status, known_states(settings.on, earlier))
        if not events:
            return ()
        if not self._is_done(Stage.EVALUATE):
            with suppress(DdptrainError):
                end = replace(end, champion=self._champion())
        message = compose(events[0], end, self.resolved, duration_s)
        deliveries = send(message, settings.urls, secrets=self.resolved.secrets)
        for warning in filter(None, (delivery.warning for delivery in deliveries)):
            self.out.warn(warning)
        delivered = [delivery.target for delivery in deliveries if delivery.delivered]
        text = f"notified {', '.join(delivered) or 'nobody'}: {', '.join(events)}"
        self.out.stage(Stage.NOTIFY, text, events=events)
        return events if delivered else ()

    def _clean_up(self) -> None:
        """Delete old versions, runs, records and listings; a problem is only a warning."""
        config, settings = self.resolved.config, self.settings
        try:
            done = clean_up(self.registry, settings.model, settings.keep, config.results.dir, config.name)
            self.records.remove_older(done.kept)
        except DdptrainError as error:
            self.out.warn(f"the clean-up has failed: {one_line(error)}")
            return
        for problem in done.runs.problems:
            self.out.warn(problem)
        self.out.stage(Stage.CLEAN_UP, done.summary, **done.as_dict())

    # --- reports for CI ---

    def _write_reports(self, end: RetrainRecord) -> None:
        """Write the reports that the user or a CI service wants. Raises nothing."""
        reporting = self.options.reporting
        if reporting is None or not reporting.destinations.are_wanted:
            return
        from ddptrain.reports.facts import RunReport

        view: Run | None = None
        try:
            if end.run_id:
                runs = open_runs_dir(self.resolved.config.results.dir)
                view = runs.find(end.run_id)
        except (DdptrainError, OSError) as error:  # the report has the reason of the end all the same
            _log.warning("run cannot be reported", run=end.run_id, error=error)
        name, secrets, exit_code = self.resolved.config.name, self.resolved.secrets, end.exit_code or 0
        about: dict[str, Any] = {"view": view, "retraining": end, "stages": self._stages(end), "secrets": secrets}
        reporting.ended(RunReport(name, end.status, exit_code, end.reason, **about))

    def _stages(self, end: RetrainRecord) -> list[StageReport]:
        """Return all stages: those of this start, those of an earlier one, and those that were not reached."""
        from ddptrain.reports.facts import StageReport

        shown = {each["stage"]: each for each in self.out.stages}
        may_fail, stages = end.status == RetrainStatus.FAILED, []
        for stage in list(Stage)[1:]:
            if (item := shown.get(stage)) is not None:
                status = "failed" if item.get("passed") is False else "done"
                stages.append(StageReport(stage, status, item["duration_s"], item["message"]))
            elif stage in (Stage.NOTIFY, Stage.CLEAN_UP):
                stages.append(StageReport(stage, "skipped"))
            elif self._is_done(stage):
                stages.append(StageReport(stage, "done", detail="by an earlier start"))
            else:
                stages.append(StageReport(stage, "failed" if may_fail else "skipped"))
                may_fail = False
        return stages


def scores_text(evaluation: Evaluation) -> str:
    """Return the scores in one line, as "val/loss 2.31 (champion 2.35)"."""
    champion = evaluation.scores.get("champion", {})
    parts = []
    for name, value in sorted(evaluation.scores["candidate"].items()):
        beside = f" (champion {champion[name]:.4g})" if name in champion else ""
        parts.append(f"{name} {value:.4g}{beside}")
    return "; ".join([", ".join(parts) or "no metrics", *evaluation.notes])
