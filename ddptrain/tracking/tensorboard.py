"""The tracker for TensorBoard: event files below tracking/tensorboard. log() writes each event before it returns.

Events are created with tensorboard's protocol buffers: one event for all numbers of a call, and images as PNG without
encoding them again. torch.utils.tensorboard takes ten times as long, and adds another thread.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from ddptrain.tracking.protocol import Facts, Image, Item, Numbers, State, Table

FOLDER = "tensorboard"
FILE_VERSION = "brain.Event:2"  # of the file format
_MAX_ROWS = 100  # of a table, which TensorBoard shows as text
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # number of channels by the color type of a PNG


class TensorBoardTracker:
    """Writes an event file. In mode `process` each rank has its own folder, and is a separate run in TensorBoard."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._each_rank = options.get("mode") == "process"
        self._calls: Counter[str] = Counter()
        self._purge = False
        self._file: Any = None
        self._writer: Any = None

    def start(self, facts: Facts) -> None:
        """Create a new event file; the files of earlier attempts stay."""
        below = f"{FOLDER}/rank-{facts.rank}" if self._each_rank else FOLDER
        folder = facts.folder / below
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. Two files may be created in one millisecond.
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=FILE_VERSION))
        self._purge = facts.resumed
        self._resumed_from = facts.resumed_from
        if not facts.resumed:
            self._add(time.time(), 0, [text_value("config", _as_markdown(facts.config))])
        facts.found({"folder": f"tracking/{below}"})

    def log(self, item: Item) -> None:
        """Write numbers, an image, or a table as text."""
        match item:
            case Numbers(values=values):
                step = self._step(item.step, item.epoch, "")
                numbers = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
                self._purge_repeated(item)
                self._add(item.time_ns / 1e9, step, numbers)
            case Image():
                self._add(item.time_ns / 1e9, self._step(item.step, None, item.name), [_image(item)])
            case Table():
                text = text_value(item.name, _rows(item))
                self._add(item.time_ns / 1e9, self._step(item.step, None, item.name), [text])
            case _:
                pass

    def finish(self, state: State) -> None:
        """Close the file. The format has no field for the state of a run."""
        self._file.close()

    def _step(self, step: int | None, epoch: float | None, name: str) -> int:
        """Return the step; if there is none, the epoch; without both, the number of earlier calls without them."""
        if step is not None:
            return step
        if epoch is not None:
            return int(epoch)
        self._calls[name] += 1
        return self._calls[name] - 1

    def _add(self, time_s: float, step: int, values: list[Any]) -> None:
        self._write(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def _purge_repeated(self, item: Numbers) -> None:
        """Tell TensorBoard once to discard the steps of an earlier attempt that this attempt repeats."""
        if self._purge and item.step is not None:
            self._purge = False
            start = SessionLog(status=SessionLog.START)
            first = item.step if self._resumed_from is None else min(item.step, self._resumed_from + 1)
            self._write(Event(wall_time=item.time_ns / 1e9, step=first, session_log=start))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()


def _image(image: Image) -> Any:
    data = image.path.read_bytes()
    width, height, _, kind = struct.unpack(">IIBB", data[16:26])  # in the PNG header
    picture = Summary.Image(width=width, height=height, colorspace=_CHANNELS.get(kind, 3), encoded_image_string=data)
    return Summary.Value(tag=image.name, image=picture)


def text_value(tag: str, text: str) -> Any:
    """Return a text as a value that TensorBoard shows as Markdown."""
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "backslashreplace")])
    tensor.tensor_shape.dim.add(size=1)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)


def _as_markdown(config: Mapping[str, Any], depth: int = 0) -> str:
    """Return the configuration as nested Markdown lists."""
    lines = []
    for key, value in config.items():
        nested = isinstance(value, Mapping) and value
        lines.append(f"{'    ' * depth}* {key}:{'' if nested else f' {value}'}")
        if nested:
            lines.append(_as_markdown(value, depth + 1))
    return "\n".join(lines)


def _rows(table: Table) -> str:
    """Return the first rows of a table as Markdown."""
    lines = [_row(table.columns), _row(["---"] * len(table.columns))]
    lines += [_row(["(image)" if isinstance(cell, Image) else cell for cell in row]) for row in table.rows[:_MAX_ROWS]]
    if len(table.rows) > _MAX_ROWS:
        lines.append(f"\n{len(table.rows)} rows; the run directory has all of them")
    return "\n".join(lines)


def _row(cells: Any) -> str:
    texts = ["" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(texts)} |"
