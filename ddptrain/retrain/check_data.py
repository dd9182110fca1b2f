"""The stage "check data": compares the training data with those of the champion, and decides whether to train."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.wording import counted
from ddptrain.errors import ExitCode, UsageError
from ddptrain.retrain import plan
from ddptrain.retrain.fingerprint import DataListing, difference, list_data, names_data
from ddptrain.retrain.records import RetrainStatus, Stage
from ddptrain.retrain.start import End, Start


def check_data(start: Start) -> End | None:
    """List the data, and begin the retraining. Returns an end if there is nothing to train.

    Raises:
        UsageError: a source does not exist, or the data look wrong and --force is not given.
        StoreError: a source cannot be listed.
    """
    champion = start.champion()
    before = _listing_before(start, champion)
    with start.signals.interrupting():
        listing = list_data(start.resolved, before)
    changes = difference(before, listing) if before is not None else []
    has_sources = names_data(start.resolved)
    limit = start.resolved.config.data.max_shrink
    if problem := plan.data_problem(before, listing, limit, has_sources=has_sources):
        if not start.options.force:
            raise UsageError(f"{problem}; nothing was trained. If the data are right, add --force")
        start.out.notice(f"{problem}; training anyway, because of --force", level="warning")
    text = _describe(start, listing, changes, known=before is not None, has_sources=has_sources)
    start.out.stage(Stage.CHECK_DATA, text, difference=changes, files=len(listing.files), size_bytes=listing.size_bytes)
    data = listing.digest
    if not start.options.force and start.record is None:
        moment = datetime.now(UTC)
        if same := plan.unchanged(start.earlier, champion, start.digest, data, start.settings, moment):
            return _unchanged(start, data, listing, same)
    if start.options.dry_run:
        return would("train")
    start.begin(data, listing, champion)
    start.records.write_listing(start.began.number, listing.to_bytes())
    start.update(stage=Stage.CHECK_DATA, difference=tuple(changes))
    return None


def would(what: str) -> End:
    """Return the end of a dry run."""
    return End(RetrainStatus.SKIPPED, ExitCode.SUCCEEDED, f"dry run: it would {what}")


def _listing_before(start: Start, champion: int | None) -> DataListing | None:
    """Return the listing of the champion's training data, or else that of the last training whose listing is kept."""
    trained = [each for each in start.earlier if each.data and each.status != RetrainStatus.UNCHANGED]
    for record in sorted(trained, key=lambda each: champion is None or each.version != champion):
        if (found := DataListing.from_bytes(start.records.listing(record.number))) is not None:
            return found
    return None


def _describe(start: Start, listing: DataListing, changes: Sequence[str], *, known: bool, has_sources: bool) -> str:
    if not has_sources:
        built_in = is_built_in(start.resolved.config.workload)
        return "built-in data" if built_in else "data.sources names no data, so changes of data are not seen"
    size = f"{counted(len(listing.files), listing.noun)}, {listing.size_bytes:,} bytes"
    if not known:
        return f"{size}; there is no earlier listing to compare with"
    return f"{size}; {', '.join(changes) or 'unchanged'}"


def _unchanged(start: Start, data: str, listing: DataListing, reason: str) -> End:
    """Record that there was nothing to do; if this is so again and again, one record says it."""
    if start.options.dry_run:
        return would(f"train nothing: {reason}")
    last = start.earlier[0]
    if last.status == RetrainStatus.UNCHANGED and (last.config, last.data) == (start.digest, data):
        start.resume(last.number)
    else:
        start.begin(data, listing, start.champion(), with_run=False)
    return End(RetrainStatus.UNCHANGED, ExitCode.SUCCEEDED, reason)
