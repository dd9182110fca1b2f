"""The stages "notify" and "clean up", and the record of the end. None of them changes the exit code."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ddptrain.errors import DdptrainError, one_line
from ddptrain.log import Log
from ddptrain.notify.messages import RetrainReport, compose, events_to_tell
from ddptrain.notify.sender import send
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.run_record import utc_now
from ddptrain.results.run_store import NeededFiles
from ddptrain.retrain.cleanup.clean_up import clean_up
from ddptrain.retrain.records import RetrainRecord, RetrainStatus, Stage
from ddptrain.retrain.start import End, Start

if TYPE_CHECKING:
    from ddptrain.reports.report import StageReport
    from ddptrain.results.lookup import RunView

_log = Log(__name__)
_LOOKED_AT = 50  # earlier retrainings
_SUCCESSES = [status for status in RetrainStatus if status.is_success]
_TRAINED = (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)
_TOLD_ONCE = (RetrainStatus.FAILED, RetrainStatus.REJECTED)
_TO_BE_CONTINUED = (RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED)  # no failure: the next start continues


def conclude(start: Start, end: End, duration_s: float) -> None:
    """Record the end, notify the users, and clean up. Problems are shown as warnings.

    After a training the record stays open until the users are notified: the next start does it if this one is killed.
    Users are notified also if nothing can be recorded, as on a full disk.
    """
    record = start.record or start.new_record()
    is_told = False
    try:
        if end.status not in _TRAINED:
            record = _write(start, _ended(record, end))
        if not start.is_done(Stage.NOTIFY):
            is_told = True
            notified = _notify(start, record, end, duration_s)
            record = _write(start, replace(record, told=(*record.told, *notified)))
        if end.status in _TRAINED:
            record = _write(start, replace(record, stage=Stage.NOTIFY))
            _clean_up(start)
            _write(start, _ended(replace(record, stage=Stage.CLEAN_UP), end))
        elif end.status == RetrainStatus.FAILED and start.owner.holds_lock:
            _clean_up(start)  # otherwise a model that fails each night would fill the disk
    except DdptrainError as error:
        start.out.notice(f"the end of the retraining is not recorded: {one_line(error)}", level="warning")
        if not (is_told or start.is_done(Stage.NOTIFY)):
            _notify(start, record, end, duration_s)
    text = f"{end.status}: {end.reason}"
    problems = start.heartbeat.log(text) if end.status in _TO_BE_CONTINUED else start.heartbeat.end(end.exit_code, text)
    for problem in problems:
        start.out.notice(problem, level="warning")


def _ended(record: RetrainRecord, end: End) -> RetrainRecord:
    return replace(record, status=end.status, exit_code=int(end.exit_code), reason=end.reason, ended_at=utc_now())


def _write(start: Start, record: RetrainRecord) -> RetrainRecord:
    if record.number:
        start.records.update(record)
    else:
        record = start.records.create(record)
    start.record = record
    return record


def _notify(start: Start, record: RetrainRecord, end: End, duration_s: float) -> Sequence[str]:
    """Send a message if the state of the model has changed; return the events of the message."""
    settings = start.resolved.config.notify
    events = events_to_tell(settings.on, end.status, _earlier_states(start, record)) if settings.urls else ()
    if not events:
        return ()
    report = _report(start, record, end, events[0], duration_s)
    deliveries = send(compose(report), settings.urls, timeout_s=settings.timeout_s, secrets=start.resolved.secrets)
    for warning in filter(None, (delivery.warning for delivery in deliveries)):
        start.out.notice(warning, level="warning")
    delivered = [delivery.target for delivery in deliveries if delivery.delivered]
    start.out.stage(Stage.NOTIFY, f"notified {', '.join(delivered) or 'nobody'}: {', '.join(events)}", events=events)
    return events if delivered else ()


def _earlier_states(start: Start, record: RetrainRecord) -> list[str]:
    """Return the statuses before this one, oldest first, and "late" where users were told so.

    A retraining that is continued counts as what it was before this start. A failure whose message nobody got is left
    out, so that it is told again. A registry that cannot be read tells nothing: better one message too many.
    """
    on = start.resolved.config.notify.on
    states: list[str] = []
    earlier, late_told = start.earlier, ""
    with suppress(DdptrainError):
        if not earlier:  # none were read by a start that did not get the model
            earlier = [each for each in start.records.newest(_LOOKED_AT) if each.number != record.number]
        late_told = start.records.late_told()
    for earlier_record in reversed(earlier):
        states += [event for event in earlier_record.told if event in _TOLD_ONCE]
        if (
            earlier_record.status not in _TOLD_ONCE
            or earlier_record.status not in on
            or earlier_record.status in earlier_record.told
        ):
            states.append(earlier_record.status)
    succeeded = [earlier_record.ended_at or "" for earlier_record in earlier if earlier_record.status in _SUCCESSES]
    return [*states, *(["late"] if late_told > max(succeeded, default="") else [])]


def _report(start: Start, record: RetrainRecord, end: End, event: str, duration_s: float) -> RetrainReport:
    config = start.resolved.config
    return RetrainReport(
        event=event,
        model=start.settings.model,
        status=end.status,
        reason=end.reason,
        scores=record.scores,
        gate=[outcome.reason for outcome in record.gate],
        difference=record.difference,
        version=record.version,
        champion=record.champion if start.is_done(Stage.EVALUATE) else _champion(start),
        run_id=record.run_id,
        duration_s=duration_s,
        exit_code=int(end.exit_code),
        host=socket.gethostname(),
        folder=os.getcwd(),
        config=str(start.resolved.path),
        runs_dir=config.results.dir,
        models_dir=config.models.dir,
    )


def _champion(start: Start) -> int | None:
    """Return the champion of a model that was not evaluated; None also if the registry cannot be read."""
    with suppress(DdptrainError):
        return start.champion()
    return None


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


def report_end(start: Start, end: End) -> None:
    """Write the reports that the user or a CI service wants. Raises nothing."""
    reporting = start.options.reporting
    if reporting is None or not reporting.destinations.are_wanted:
        return
    from ddptrain.reports.report import RunReport

    record = start.record or start.new_record()
    report = RunReport(
        name=start.resolved.config.name,
        status=end.status,
        exit_code=int(end.exit_code),
        reason=end.reason,
        view=_run_to_report(start, record.run_id),
        model=start.settings.model,
        version=record.version,
        champion=record.champion,
        scores=record.scores,
        gate=record.gate,
        stages=_stages(start, end),
        difference=record.difference,
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


def _stages(start: Start, end: End) -> list[StageReport]:
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
