"""One start of `ddptrain retrain`: what its stages share, and the record that says how far they are."""

from __future__ import annotations

import json
import queue
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.run_config import ScriptWorkload
from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.config.wording import shorten
from ddptrain.driver.control.signals import Signals
from ddptrain.errors import Interrupted, UsageError
from ddptrain.file_ops import sha256
from ddptrain.log import Log
from ddptrain.model_registry.reference import CHAMPION
from ddptrain.model_registry.registry import ModelRegistry, user_name
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords, RetrainStatus, Stage
from ddptrain.notify.heartbeat import Heartbeat
from ddptrain.reports.destinations import Reporting
from ddptrain.results.layout import new_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import is_number
from ddptrain.results.run_record import as_json_data, utc_now
from ddptrain.results.runs import NeededFiles, open_runs_dir
from ddptrain.retrain.fingerprint import DataListing
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.sanitize import sanitized

_log = Log(__name__)
_METRICS_BYTES = 1 << 20


@dataclass(slots=True)
class StageOutput:
    """The output of one start. Messages of stages that were done by an earlier start are not shown again.

    stages: the object of each stage so far, for the last object of `--output json`.
    """

    as_json: bool
    stages: list[dict[str, Any]] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    def stage(self, name: str, text: str, **details: object) -> None:
        """Show that a stage is complete, with its result, and its duration since the end of the previous stage."""
        now_s = time.monotonic()
        fields = {"stage": name, "message": text, "duration_s": round(now_s - self._began_s, 3), **details}
        self._began_s = now_s
        self.stages.append(fields)
        _log.info("stage complete", stage=name, message=text)
        if self.as_json:
            self._write({"event": "retrain_stage", "time_s": round(time.time(), 3), **fields})
        else:
            self._say(f"{name}: {text}")

    def notice(self, text: str, level: str = "info") -> None:
        """Show a message."""
        _log.info("notice", message=text)
        if self.as_json:
            self._write({"event": "notice", "time_s": round(time.time(), 3), "level": level, "message": text})
        else:
            self._say(text)

    def end(self, summary: str, last_event: Mapping[str, Any]) -> None:
        """Show the end of the retraining: the summary on stdout, or the last JSON object, with all stages."""
        if self.as_json:
            self._write({"event": "retrain_finished", **last_event, "stages": self.stages})
        else:
            with suppress(OSError, ValueError):
                print(sanitized(summary), flush=True)

    def _say(self, text: str) -> None:
        lines = "".join(f"ddptrain: {sanitized(line)}\n" for line in text.splitlines())
        with suppress(OSError, ValueError, AttributeError):  # AttributeError: stderr was closed at the start
            print(lines, end="", file=sys.stderr, flush=True)

    def _write(self, fields: Mapping[str, Any]) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more: the retraining continues
            print(json.dumps(as_json_data(fields), allow_nan=False), flush=True)


@dataclass(frozen=True, slots=True)
class RetrainOptions:
    """The options of the command line besides the configuration.

    slot: the scheduled time as resolve_slot (schedule/entries.py) returns it, or "". promote_anyway: the reason to
    promote a version that the gate rejects, or "".
    """

    force: bool = False
    slot: str = ""
    dry_run: bool = False
    output: str = "auto"
    promote_anyway: str = ""
    full_traceback: bool = False
    all_ranks: bool = False
    reporting: Reporting | None = None


@dataclass(slots=True)
class Start:
    """The parts of a start. record: None until the retraining has begun. earlier: retrainings, newest first."""

    resolved: ResolvedConfig
    settings: RetrainConfig
    options: RetrainOptions
    registry: ModelRegistry
    records: RetrainRecords
    owner: ModelOwner
    out: StageOutput
    heartbeat: Heartbeat
    signals: Signals = field(default_factory=lambda: Signals(queue.SimpleQueue()))
    record: RetrainRecord | None = None
    earlier: list[RetrainRecord] = field(default_factory=list)
    digest: str = ""  # of the configuration

    @classmethod
    def of(cls, resolved: ResolvedConfig, settings: RetrainConfig, options: RetrainOptions) -> Start:
        """Open the registry. Raises UsageError, StoreError."""
        registry = ModelRegistry.open(resolved.config.models.dir)
        records = RetrainRecords(registry.folder, settings.model)
        owner = ModelOwner(registry.folder, settings.model)
        notify = resolved.config.notify
        heartbeat = Heartbeat(notify.heartbeat, secrets=resolved.secrets)
        out = StageOutput(options.output == "json")
        return cls(resolved, settings, options, registry, records, owner, out, heartbeat)

    @property
    def began(self) -> RetrainRecord:
        """The record of the retraining, which has begun."""
        assert self.record is not None
        return self.record

    def is_done(self, stage: Stage) -> bool:
        """Return whether this stage is complete, in this start or in an earlier one."""
        order = list(Stage)
        return self.record is not None and order.index(Stage(self.record.stage)) >= order.index(stage)

    def champion(self) -> int | None:
        """Return the version that is the champion now. Raises StoreError."""
        return self.registry.state(self.settings.model).version_of(CHAMPION)

    def begin(self, data: str, listing: DataListing, champion: int | None, *, with_run: bool = True) -> None:
        """Write the record of a new retraining, or the data of one that was not checked to the end.

        with_run: whether it will train.
        """
        outputs = output_states(self.resolved.config.script)
        about: dict[str, Any] = {
            "outputs": outputs,
            "data": data,
            "n_files": len(listing.files),
            "size_bytes": listing.size_bytes,
        }
        run_id = new_run_id(self.resolved.config.name) if with_run else ""
        if self.record is not None:  # it has no run if it ended before its data were checked
            self.update(run_id=self.record.run_id or run_id, champion=champion, **about)
            return
        self.record = self.records.create(replace(self.new_record(), champion=champion, run_id=run_id, **about))
        self.raise_if_signalled()

    def new_record(self) -> RetrainRecord:
        """Return a record of this start, without a number."""
        return RetrainRecord(
            number=0,
            model=self.settings.model,
            started_at=utc_now(),
            config=self.digest,
            slot=self.options.slot,
            forced=self.options.force,
            user=user_name(),
            host=socket.gethostname(),
        )

    def ended(self, status: RetrainStatus, exit_code: int, reason: str) -> RetrainRecord:
        """Return the record with this end; it is not written."""
        return replace(self.record or self.new_record(), status=status, exit_code=int(exit_code), reason=reason)

    def write(self, record: RetrainRecord) -> RetrainRecord:
        """Write the record at the end, under a new number if it has none."""
        if record.number:
            self.records.update(record)
        else:
            record = self.records.create(record)
        self.record = record
        return record

    def resume(self, number: int) -> None:
        """Continue an earlier retraining. Its record is now of this start; the time of the earlier one is a skip."""
        record = self.records.adopt(number)
        self.record = record
        if record.slot not in ("", self.options.slot):
            self.records.add_skip(f"retraining {number} was continued by a later start", record.slot)
        self.update(
            status=RetrainStatus.RUNNING,
            starts=record.starts + 1,
            started_at=utc_now(),
            slot=max(self.options.slot, record.slot),
            host=socket.gethostname(),
            user=user_name(),
            ended_at=None,
            exit_code=None,
            reason="",
        )

    def update(self, **changes: Any) -> None:
        """Write changes to the record. Raises RunLocked if another process owns the model now, Interrupted."""
        self.owner.assure()
        changed = replace(self.began, **changes)
        self.records.update(changed)
        self.record = changed
        self.raise_if_signalled()

    def raise_if_signalled(self) -> None:
        """Raise Interrupted if a signal has arrived meanwhile."""
        if self.signals.taken:
            raise Interrupted(self.signals.taken[0])

    def view(self) -> RunView:
        """Return the run of this retraining, with its model. Raises RunNotFound, StoreError."""
        return open_runs_dir(self.resolved.config.results.dir).find(self.began.run_id, NeededFiles.MODEL)


def output_states(script: ScriptWorkload | None) -> dict[str, str]:
    """Return the states of the outputs that a script declares, to see after the run whether it has written them."""
    if script is None:
        return {}
    outputs = {"workload.checkpoint": script.checkpoint, "workload.metrics": script.metrics}
    return {field: output_state(path) for field, path in outputs.items() if path is not None}


def output_state(path: str) -> str:
    """Return a digest of the times, sizes and inodes of a file, or of the files in a folder; "" if there are none."""
    place = Path(path).expanduser()
    states = []
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        with suppress(OSError):
            status = file.stat()
            states.append(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return sha256("\n".join(states).encode()).hexdigest() if states else ""


def read_metrics(path: Path) -> dict[str, float]:
    """Read the metrics that a script has written: a JSON object of names and numbers, also NaN. Raises UsageError."""
    try:
        with path.open("rb") as file:
            raw: Any = json.loads(file.read(_METRICS_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{path} is not JSON ({shorten(str(error))}); write an object such as {{"val/loss": 2.1}}'
        ) from None
    numbers = isinstance(raw, dict) and all(map(is_number, raw.values()))
    if not numbers:
        raise UsageError(f'{path} must have names and numbers, such as {{"val/loss": 2.1}}, not {shorten(repr(raw))}')
    return {str(name): float(value) for name, value in raw.items()}
