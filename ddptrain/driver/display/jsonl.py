"""JSON lines: stdout has one JSON object a line and nothing else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddptrain.driver.display import output_api
from ddptrain.driver.display.log_tail import RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.protocol.events import Progress
from ddptrain.results.run_record import as_json_data

PROGRESS_EVERY_S = 1.0
_ENDED, _PARTIAL = "}", ', "partial": true}'


class JsonRenderer:
    """Writes all messages as JSON lines; the last line contains the result of the run. Ranks are never grouped."""

    redraw_every_s = 1.0

    def __init__(self, stdout: Stream, stderr: Stream, stage: str = "") -> None:
        """`stage`: the value of the field `stage` in each object; without it if ""."""
        self._stdout, self._stderr = stdout, stderr
        self._mark = {"stage": stage} if stage else {}
        self._progress: dict[int, Progress] = {}  # not yet written
        self._written_s: dict[int, float] = {}

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Write one object per line; "partial" marks a line without a newline (yet): a piece, or a redrawn bar."""
        encode = json.encoder.encode_basestring_ascii
        for rank in ranks:
            mark = "".join(f', "{name}": {encode(value)}' for name, value in self._mark.items())
            head = f'{{"event": "log"{mark}, "rank": {rank}, "time_s": {time.time():.3f}, "line": '
            rows = [f"{head}{encode(text)}{_ENDED if ended else _PARTIAL}\n" for text, ended in lines]
            self._stdout.write("".join(rows))

    def handle(self, message: output_api.Message) -> None:
        """Write the message as an object; progress at most once per second for each rank."""
        match message:
            case output_api.RedrawnLine(rank, text) if text:
                self.log([rank], [RankLine(text, ended=False)])
            case output_api.RankProgress(rank, event):
                self._progress[rank] = event
            case output_api.LogLine(text):
                self._stderr.write(f"{text}\n")
            case output_api.Closing(_, last_event):
                self._write_progress(math.inf)
                if last_event:
                    self._write(last_event)
            case output_api.RawEvent(fields):
                self._write(fields)
            case _:
                self._write_other(message)

    def refresh(self, now_s: float) -> None:
        """Write the progress of ranks whose last object is a second old."""
        if self._progress:
            self._write_progress(now_s)

    def _write_other(self, message: output_api.Message) -> None:
        now = round(time.time(), 3)
        match message:
            case output_api.RankMetrics(rank, event):
                self._write(
                    {"event": "metrics", "rank": rank, "time_s": event.time_ns / 1e9, "step": event.step}
                    | {"epoch": event.epoch, "values": dict(event.values)}
                )
            case output_api.RankStarted(rank, host, pid):
                self._write({"event": "rank_started", "rank": rank, "time_s": now, "host": host, "pid": pid})
            case output_api.RankEnded(rank, ok, _):
                self._write({"event": "rank_ended", "rank": rank, "time_s": now, "ok": ok})
            case output_api.DriverNotice(text, level):
                self._write({"event": "notice", "time_s": now, "level": level, "message": text})
            case output_api.DriverStatus(text) if text:
                self._write({"event": "status", "time_s": now, "message": text})
            case _:
                pass

    def _write_progress(self, now_s: float) -> None:
        for rank, event in list(self._progress.items()):
            if now_s - self._written_s.get(rank, -math.inf) >= PROGRESS_EVERY_S:
                del self._progress[rank]
                self._written_s[rank] = now_s
                fields = {"done": event.done, "total": event.total, "unit": event.unit}
                self._write({"event": "progress", "rank": rank, "time_s": event.time_ns / 1e9} | fields)

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._stdout.write(json.dumps(as_json_data({**fields, **self._mark})) + "\n")
