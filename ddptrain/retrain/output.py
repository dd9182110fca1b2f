"""Shows the stages of a retraining: a line for each on stderr, or JSON objects on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ddptrain import ci
from ddptrain.log import Log
from ddptrain.results.run_record import as_json_data
from ddptrain.sanitize import sanitized

_log = Log(__name__)


@dataclass(slots=True)
class StageOutput:
    """The output of one start. Messages of stages that were done by an earlier start are not shown again.

    stages: the object of each stage so far, for the last object of `--output json`.
    """

    as_json: bool
    stages: list[dict[str, Any]] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    def stage(self, name: str, text: str, **details: object) -> None:
        """Tell that a stage is complete, and what came out. The time counts from the end of the stage before."""
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
        """Show how the retraining has ended: the summary on stdout, or the last object with all stages."""
        if self.as_json:
            self._write({"event": "retrain_finished", **last_event, "stages": self.stages})
        else:
            with suppress(OSError, ValueError):
                print(ci.guard(os.environ)(sanitized(summary)), flush=True)

    def _say(self, text: str) -> None:
        lines = "".join(f"ddptrain: {sanitized(line)}\n" for line in text.splitlines())
        with suppress(OSError, ValueError, AttributeError):  # AttributeError: stderr was closed at the start
            print(ci.guard(os.environ)(lines), end="", file=sys.stderr, flush=True)

    def _write(self, fields: Mapping[str, Any]) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more: the retraining continues
            print(ci.json_guard(os.environ)(json.dumps(as_json_data(fields), allow_nan=False)), flush=True)
