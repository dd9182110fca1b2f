"""Decides from the records of earlier retrainings what `ddptrain retrain` does: skip, continue, or begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.config.wording import shorten
from ddptrain.errors import ExitCode
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainStatus, Stage
from ddptrain.retrain.fingerprint import DataListing, missing_classes

# After these exit codes of the training, the next start continues it: the cause may have passed by then.
_CONTINUED_AFTER = frozenset({ExitCode.CLUSTER, ExitCode.HANG, ExitCode.LOCKED})
_MOST_STARTS = 10  # of a retraining that fails again and again
_TRAINED = frozenset({Stage.TRAIN, Stage.EVALUATE, Stage.GATE, Stage.PROMOTE, Stage.NOTIFY, Stage.CLEAN_UP})
_MOST_NAMED = 5
_LEAST_SHARE = 0.5  # of the data of the champion; with fewer nothing is trained


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do: skip (with the reason), continue a retraining, or begin a new one (both are empty).

    abandoned: a retraining that ends without a result, because the configuration has changed.
    """

    skip: str = ""
    continued: RetrainRecord | None = None
    abandoned: RetrainRecord | None = None


def choose(newest: Sequence[RetrainRecord], config: str, slot: str, *, force: bool) -> Choice:
    """Choose between skipping, continuing and beginning.

    newest: earlier retrainings, newest first. config: the digest of the configuration. slot: the scheduled time, or "".
    force begins a new retraining, unless one with the same configuration was interrupted.
    """
    newest = [record for record in newest if _had_model(record)]
    last = to_continue(newest)
    if last is not None:
        if last.config == config:
            return Choice(continued=last)
        return Choice(abandoned=last)
    last_slot = max((record.slot for record in newest if record.slot), default="")
    if slot and last_slot >= slot and not force:
        record = next(record for record in newest if record.slot == last_slot)
        return Choice(
            skip=f"the scheduled time {slot} is done: retraining {record.number} of {last_slot} {record.status}"
        )
    return Choice()


def to_continue(newest: Iterable[RetrainRecord]) -> RetrainRecord | None:
    """Return the retraining that the next start continues, None if there is none."""
    last = next((record for record in newest if _had_model(record) and record.status != RetrainStatus.ABANDONED), None)
    return last if last is not None and is_resumable(last) else None


def _had_model(record: RetrainRecord) -> bool:
    """Return whether the start got the lock of the model; one that waited for it in vain did nothing."""
    return bool(record.config or record.run_id)


def is_resumable(record: RetrainRecord) -> bool:
    """Return whether the next start continues a retraining: it was killed, interrupted, or failed for a passing cause.

    A training that has failed by its own code begins anew.
    """
    if record.status in (RetrainStatus.RUNNING, RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED):
        return True
    if record.status != RetrainStatus.FAILED or record.starts >= _MOST_STARTS:
        return False
    return record.stage in _TRAINED or record.exit_code in _CONTINUED_AFTER


def unchanged(
    newest: Sequence[RetrainRecord],
    champion: int | None,
    config: str,
    data: str,
    settings: RetrainConfig,
) -> str:
    """Return why no training is needed, or "" if it is needed.

    Compares with the last training, and with that of the champion. A version that was rolled back is not made again
    from the same data; a rejected one only if there is another champion since.

    champion: its version. data: the digest of the training data.
    """
    trained = [each for each in newest if each.status in (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)]
    if settings.if_unchanged == "train" or not trained:
        return ""
    for record in trained:
        if (record.config, record.data) != (config, data) or not (record is trained[0] or record.version == champion):
            continue
        same = f"data, params and code are those of version {record.version}"
        if record.version == champion:
            return f"{same}, the champion"
        if record.status == RetrainStatus.PROMOTED:
            return f"{same}, which is not the champion any more"
        if record.champion == champion:
            return f"{same}, which the gate has rejected"
    return ""


def data_problem(old: DataListing | None, new: DataListing, *, has_sources: bool) -> str:
    """Return why the training data look wrong, or "".

    old: the data of the champion, None if they are not known.
    """
    if not new.files:
        return "there are no training data" if has_sources else ""
    if old is None or not old.files:
        return ""
    many = len(old.files) > 1
    before, now = (len(old.files), len(new.files)) if many else (old.size_bytes, new.size_bytes)
    if now < before * _LEAST_SHARE:
        noun = f"{new.noun}s" if many else "bytes"
        return f"the training data have shrunk from {before:,} to {now:,} {noun}, to less than half"
    if new.noun == "image" and (gone := missing_classes(old, new)):
        named = ", ".join(shorten(name) for name in gone[:_MOST_NAMED])
        return (
            f"class {named} has no images any more" if len(gone) == 1 else f"classes have no images any more: {named}"
        )
    return ""
