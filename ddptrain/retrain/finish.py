"""The stages "notify" and "clean up", the record of the end, and reports. None of them changes the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ddptrain.errors import DdptrainError, one_line
from ddptrain.log import Log
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainStatus, Stage
from ddptrain.notify.sender import send
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.run_record import utc_now
from ddptrain.results.run_store import NeededFiles
from ddptrain.retrain.clean_up import clean_up
from ddptrain.retrain.messages import compose, events_to_report, known_states
from ddptrain.retrain.start import Start

if TYPE_CHECKING:
    from ddptrain.reports.report import StageReport
    from ddptrain.results.lookup import RunView

_log = Log(__name__)
_LOOKED_AT = 50  # earlier retrainings
_TRAINED = (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)
_TO_BE_CONTINUED = (RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED)  # no failure: the next start continues


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
    from ddptrain.reports.report import RunReport

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
    from ddptrain.reports.report import StageReport

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
