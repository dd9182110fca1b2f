"""`ddptrain retrain`: the stages of one start, from the lock of the model to the clean-up.

Each stage is idempotent, and the record of the retraining (records.py) names the last one that is complete. So a start
after a kill or a failure continues with the next stage.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import counted
from ddptrain.driver.control.signals import signals_to
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
from ddptrain.model_registry.registry import user_name
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainStatus, Stage
from ddptrain.notify.run_messages import RunMessages
from ddptrain.notify.sender import missing_variables, send
from ddptrain.optional_packages import require
from ddptrain.results.layout import new_run_id
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.run_record import root_cause, utc_now
from ddptrain.results.runs import NeededFiles, open_runs_dir
from ddptrain.retrain import plan
from ddptrain.retrain.clean_up import clean_up
from ddptrain.retrain.fingerprint import DataListing, config_digest, difference, list_data, names_data
from ddptrain.retrain.messages import compose, events_to_report, known_states
from ddptrain.retrain.promotion import decide, outcome
from ddptrain.retrain.start import RetrainOptions, Start

if TYPE_CHECKING:
    from ddptrain.reports.facts import StageReport


_log = Log(__name__)
_LOOKED_AT = 50  # earlier retrainings
_PROGRESS_EVERY_S = 30.0
_ENDED: Mapping[str, str] = {
    RetrainStatus.RUNNING: "was killed",
    RetrainStatus.FAILED: "had failed",
    RetrainStatus.DEADLINE: "had reached its deadline",
}
_SIGNALLED = SIGNALLED | {ExitCode.PREEMPTED}
_TRAINED = (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)
_TO_BE_CONTINUED = (RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED)  # no failure: the next start continues


def retrain(resolved: ResolvedConfig, options: RetrainOptions) -> int:
    """Retrain the model of a configuration; return the exit code.

    Raises UsageError if the configuration has no section retrain, the registry cannot be opened, or what sends its
    messages is not installed; StoreError.
    """
    if resolved.config.notify.urls:
        require("apprise", "notify", "leave out notify.urls")
    return Retraining(Start.of(resolved, resolved.retrain, options)).run()


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
        return int(end.exit_code or 0)

    def _locked(self, stack: ExitStack) -> RetrainRecord:
        """Take the lock of the model for the rest of the start, and go through the stages."""
        start, settings = self.start, self.start.settings
        wait_s = 0.0 if settings.overlap == "skip" else settings.wait
        if not start.options.dry_run:
            try:
                with start.signals.interrupting():
                    stack.enter_context(start.owner.owned(wait_s, start.out.notice, self._stop_the_other))
            except RunLocked as error:
                if settings.overlap != "skip":
                    raise
                return self._skip(str(error))
        stack.enter_context(self.deadline)
        return self._stages()

    def _skip(self, reason: str) -> RetrainRecord:
        if not self.start.options.dry_run:
            self.start.records.add_skip(reason, self.start.options.slot)
        return self.start.ended(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, reason)

    def _stages(self) -> RetrainRecord:
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
                return would(start, f"continue retraining {choice.continued.number} with run {choice.continued.run_id}")
            start.resume(choice.continued.number)
        if not start.is_done(Stage.CHECK_DATA) and (end := check_data(start)):
            return end
        train_and_decide(start)
        return outcome(start)

    def _stop_the_other(self) -> None:
        """With `overlap: replace`, stop the run of the process that holds the model, as `ddptrain stop` does."""
        start = self.start
        if start.settings.overlap != "replace":
            return
        other = next(iter(start.records.newest(1)), None)
        if other is None or not other.is_running or not other.run_id:
            return
        try:
            target = find_target(start.resolved.config.results.dir, other.run_id)
            driver = target.look().record.driver

            def look() -> RunView:
                if (view := target.look()).record.driver != driver:
                    raise RunNotFound(f"run {view.run_id} was continued by {view.record.driver.description}")
                return view

            asked_by = f"{user_name()}@{socket.gethostname()}"
            stop_run(replace(target, look=look), now=False, by=asked_by, tell=start.out.notice)
        except DdptrainError as error:  # it has not begun, or this host does not see its folder
            _log.info("run not stopped", run=other.run_id, reason=error)

    def _lock_text(self, continued: RetrainRecord | None) -> str:
        model = f"model {self.start.settings.model} in {self.start.registry.where}"
        if continued is None:
            return model
        after = f"after the stage {continued.stage}" if continued.stage else "from its beginning"
        ended = _ENDED.get(continued.status, f"was {continued.status}")
        return f"{model}; continuing retraining {continued.number} {after} (it {ended})"

    def _abandon(self, record: RetrainRecord) -> None:
        text = f"retraining {record.number} is abandoned: workload, params, code or versions have changed since"
        self.start.out.notice(text)
        if not self.start.options.dry_run:
            adopted = self.start.records.adopt(record.number)
            ended = replace(adopted, status=RetrainStatus.ABANDONED, ended_at=utc_now(), reason=text)
            self.start.records.update(ended)

    def _failed(self, error: BaseException) -> RetrainRecord:
        """Return the end after an error of any stage."""
        _log.info("stage failed", error=error)
        owner, exit_code = self.start.owner, int(getattr(error, "exit_code", ExitCode.INTERNAL))
        if isinstance(error, Interrupted | RunPreempted | KeyboardInterrupt):
            if self.deadline.is_reached:
                text = f"the deadline of {self.deadline.seconds:g} s was reached; the next start continues"
                return self.start.ended(RetrainStatus.DEADLINE, ExitCode.DEADLINE, text)
            if owner.lost is not None:
                return self.start.ended(RetrainStatus.INTERRUPTED, ExitCode.LOCKED, one_line(owner.lost))
            code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_code
            return self.start.ended(RetrainStatus.INTERRUPTED, code, f"{one_line(error)}; the next start continues")
        if isinstance(error, DdptrainError):
            return self.start.ended(RetrainStatus.FAILED, exit_code, str(error))
        return self.start.ended(RetrainStatus.FAILED, ExitCode.INTERNAL, f"a bug in ddptrain: {error!r}")

    def _last_event(self, end: RetrainRecord, duration_s: float) -> dict[str, Any]:
        """Return the last object of `--output json`, without its stages."""
        names = ["model", "status", "exit_code", "reason"]
        if end.number:
            names += ["number", "run_id", "slot", "champion", "version", "scores", "gate", "difference", "starts"]
        return {**{name: getattr(end, name) for name in names}, "duration_s": round(duration_s, 3)}


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


def check_data(start: Start) -> RetrainRecord | None:
    """List the data, and begin the retraining. Returns an end if there is nothing to train.

    Raises:
        UsageError: a source does not exist, or the data look wrong and --force is not given.
        StoreError: a source cannot be listed.
    """
    champion = start.champion()
    before = _listing_before(start, champion)
    with start.signals.interrupting():
        listing = list_data(start.resolved)
    changes = difference(before, listing) if before is not None else []
    has_sources = names_data(start.resolved)
    is_seen = has_sources or is_built_in(start.resolved.config.workload)
    if problem := plan.data_problem(before, listing, has_sources=has_sources):
        if not start.options.force:
            raise UsageError(f"{problem}; nothing was trained. If the data are right, add --force")
        start.out.notice(f"{problem}; training anyway, because of --force", level="warning")
    text = _describe(start, listing, changes, known=before is not None, has_sources=has_sources)
    start.out.stage(Stage.CHECK_DATA, text, difference=changes, files=len(listing.files), size_bytes=listing.size_bytes)
    data = listing.digest
    is_new = start.record is None or not start.record.run_id
    same = plan.unchanged(start.earlier, champion, start.digest, data, start.settings)
    if same and is_seen and is_new and not start.options.force:
        return _unchanged(start, data, listing, same)
    if start.options.dry_run:
        return would(start, "train")
    start.begin(data, listing, champion)
    start.records.write_listing(start.began.number, listing.to_bytes())
    start.update(stage=Stage.CHECK_DATA, difference=tuple(changes))
    return None


def would(start: Start, what: str) -> RetrainRecord:
    """Return the end of a dry run."""
    return start.ended(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, f"dry run: it would {what}")


def _listing_before(start: Start, champion: int | None) -> DataListing | None:
    """Return the listing of the champion's training data, or else that of the last training whose listing is kept."""
    champions = [each.number for each in start.earlier if champion is not None and each.version == champion]
    for number in [*champions, *start.records.listed()]:
        if (listing := DataListing.from_bytes(start.records.listing(number))) is not None:
            return listing
    return None


def _describe(start: Start, listing: DataListing, changes: Sequence[str], *, known: bool, has_sources: bool) -> str:
    if not has_sources:
        built_in = is_built_in(start.resolved.config.workload)
        return "built-in data" if built_in else "data.sources is empty, so changes of the data cannot be seen"
    size = f"{counted(len(listing.files), listing.noun)}, {listing.size_bytes:,} bytes"
    if not known:
        return f"{size}; there is no earlier listing to compare with"
    return f"{size}; {', '.join(changes) or 'unchanged'}"


def _unchanged(start: Start, data: str, listing: DataListing, reason: str) -> RetrainRecord:
    """Record that there was nothing to do; consecutive records of this kind are merged into one."""
    if start.options.dry_run:
        return would(start, f"train nothing: {reason}")
    last = start.earlier[0]
    if (
        start.record is None
        and last.status == RetrainStatus.UNCHANGED
        and (last.config, last.data) == (start.digest, data)
    ):
        start.resume(last.number)
    else:
        start.begin(data, listing, start.champion(), with_run=False)
    return start.ended(RetrainStatus.UNCHANGED, ExitCode.SUCCEEDED, reason)


def train_and_decide(start: Start) -> None:
    """Go through the stages "train" to "promote", as far as they are not complete. Raises the errors of each.

    If the run that was trained has been deleted since, as by a clean-up of the disk, a new run is trained.
    """
    while not start.is_done(Stage.PROMOTE):
        trained_before = start.is_done(Stage.TRAIN)
        if not trained_before:
            train_run(start)
        try:
            decide(start)
            return
        except RunNotFound as error:
            if not trained_before:
                raise
            start.out.notice(f"{one_line(error)}; training again", level="warning")
            start.update(stage=Stage.CHECK_DATA, run_id=new_run_id(start.resolved.config.name))


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
        observers=[RunMessages(start.resolved, tells_end=False)] if start.resolved.config.notify.urls else [],
    )
    with _progress_to(start):
        code = train(start.resolved, options)
    if code != ExitCode.SUCCEEDED:
        raise _error(start, code)
    start.out.stage(Stage.TRAIN, f"run {start.began.run_id} has succeeded", run_id=start.began.run_id)
    start.update(stage=Stage.TRAIN)


@contextmanager
def _progress_to(start: Start) -> Iterator[None]:
    """Send the progress of the training to the heartbeat server during the block."""
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
    """Return the error of a run that ended with this exit code, with the root cause that run.json names."""
    reason = ""
    with suppress(DdptrainError):  # the run may not have begun, or its store cannot be read
        failure = open_runs_dir(start.resolved.config.results.dir).find(start.began.run_id).record.failure
        reason = root_cause(failure)
    run = f"(run {start.began.run_id})"
    if code in _SIGNALLED:
        return RunPreempted(f"{reason or 'stopped by a signal'} {run}")
    error = DdptrainError(f"{reason or f'exit code {code}'} {run}")
    error.exit_code = code
    return error


def conclude(start: Start, end: RetrainRecord, duration_s: float) -> None:
    """Record the end, notify the users, and clean up. Problems are shown as warnings.

    After a training the record stays open until the users are notified: the next start does it if this one is killed.
    Users are notified also if nothing can be recorded, as on a full disk.
    """
    is_notified = start.is_done(Stage.NOTIFY)
    try:
        if end.status not in _TRAINED:
            end = start.write(replace(end, ended_at=utc_now()))
        if not is_notified:
            is_notified = True
            end = replace(end, told=(*end.told, *_notify(start, end, duration_s)))
            still_open = replace(end, status=RetrainStatus.RUNNING, exit_code=None, reason="", stage=Stage.NOTIFY)
            start.write(still_open if end.status in _TRAINED else end)
        if end.status in _TRAINED:
            _clean_up(start)
            start.write(replace(end, stage=Stage.CLEAN_UP, ended_at=utc_now()))
        elif end.status == RetrainStatus.FAILED and start.owner.holds_lock:
            _clean_up(start)  # otherwise a model that fails each night would fill the disk
    except DdptrainError as error:
        start.out.notice(f"the end of the retraining is not recorded: {one_line(error)}", level="warning")
        if not is_notified:
            _notify(start, end, duration_s)
    text = f"{end.status}: {end.reason}"
    problems = start.heartbeat.log(text) if end.status in _TO_BE_CONTINUED else start.heartbeat.end(end.exit_code, text)
    for problem in problems:
        start.out.notice(problem, level="warning")


def _notify(start: Start, end: RetrainRecord, duration_s: float) -> Sequence[str]:
    """Send a message if the state of the model has changed; return the events of the message."""
    settings = start.resolved.config.notify
    events = events_to_report(settings.on, end.status, _known_states(start, end)) if settings.urls else ()
    if not events:
        return ()
    if not start.is_done(Stage.EVALUATE):
        with suppress(DdptrainError):
            end = replace(end, champion=start.champion())
    message = compose(events[0], end, start.resolved, duration_s)
    deliveries = send(message, settings.urls, secrets=start.resolved.secrets)
    for warning in filter(None, (delivery.warning for delivery in deliveries)):
        start.out.notice(warning, level="warning")
    delivered = [delivery.target for delivery in deliveries if delivery.delivered]
    start.out.stage(Stage.NOTIFY, f"notified {', '.join(delivered) or 'nobody'}: {', '.join(events)}", events=events)
    return events if delivered else ()


def _known_states(start: Start, record: RetrainRecord) -> list[str]:
    """Return the states that users know. A registry that cannot be read has none: better one message too many."""
    earlier, late_told = start.earlier, ""
    with suppress(DdptrainError):
        if not earlier:  # none were read by a start that did not get the model
            earlier = [each for each in start.records.newest(_LOOKED_AT) if each.number != record.number]
        late_told = start.records.late_told()
    return known_states(start.resolved.config.notify.on, earlier, late_told)


def _clean_up(start: Start) -> None:
    """Delete old versions, runs, records and listings; a problem is only a warning."""
    config, settings = start.resolved.config, start.settings
    try:
        report = clean_up(start.registry, settings.model, settings.keep, config.results.dir, config.name)
        start.records.remove_older(report.versions.kept)
    except DdptrainError as error:
        start.out.notice(f"the clean-up has failed: {one_line(error)}", level="warning")
        return
    for problem in report.runs.problems:
        start.out.notice(problem, level="warning")
    start.out.stage(Stage.CLEAN_UP, report.summary, **report.as_dict())


# --- reports for CI ---


def report_end(start: Start, end: RetrainRecord) -> None:
    """Write the reports that the user or a CI service wants. Raises nothing."""
    reporting = start.options.reporting
    if reporting is None or not reporting.destinations.are_wanted:
        return
    from ddptrain.reports.facts import RunReport

    report = RunReport(
        name=start.resolved.config.name,
        status=end.status,
        exit_code=end.exit_code or 0,
        reason=end.reason,
        view=_run_to_report(start, end.run_id),
        retraining=end,
        stages=_stages(start, end),
        secrets=start.resolved.secrets,
    )
    reporting.ended(report)


def _run_to_report(start: Start, run_id: str) -> RunView | None:
    """Return the run with the files that a report shows, None if there is none or its store cannot be read."""
    runs_dir = start.resolved.config.results.dir
    try:
        if not run_id:
            return None
        view = open_runs_dir(runs_dir).find(run_id, NeededFiles.METRICS)
        return view if view.record.failure is None else open_runs_dir(runs_dir).find(run_id, NeededFiles.LOGS)
    except (DdptrainError, OSError) as error:  # the report has the reason of the end all the same
        _log.warning("run cannot be reported", run=run_id, error=error)
        return None


def _stages(start: Start, end: RetrainRecord) -> list[StageReport]:
    """Return all stages: those of this start, those of an earlier one, and those that were not reached."""
    from ddptrain.reports.facts import StageReport

    shown = {each["stage"]: each for each in start.out.stages}
    may_fail, stages = end.status == RetrainStatus.FAILED, []
    for stage in list(Stage)[1:]:
        if (item := shown.get(stage)) is not None:
            status = "failed" if item.get("passed") is False else "done"
            stages.append(StageReport(stage, status, item["duration_s"], item["message"]))
        elif stage in (Stage.NOTIFY, Stage.CLEAN_UP):
            stages.append(StageReport(stage, "skipped"))
        elif start.is_done(stage):
            stages.append(StageReport(stage, "done", detail="by an earlier start"))
        else:
            stages.append(StageReport(stage, "failed" if may_fail else "skipped"))
            may_fail = False
    return stages
