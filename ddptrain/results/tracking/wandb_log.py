"""wandb's transaction log, the file of a run with all that was logged: read, and written again with other paths.

The format is LevelDB's log: blocks of 32 KiB, each record in pieces of crc32 (of type and data), length and type. A
piece is whole, or the first, a middle or the last one of a record, which is a protobuf `Record` of wandb's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")  # crc32, length, type
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(log: Path) -> Iterator[bytes]:
    """Every record of a log; ends where it is torn, as by a killed process. Raises OSError; ValueError for no log."""
    with log.open("rb") as file:
        if file.read(len(_HEADER)) != _HEADER:
            raise ValueError(f"{log} is no transaction log of wandb")
        whole = b""
        while piece := _next_piece(file):
            kind, data = piece
            whole = data if kind in (_WHOLE, _FIRST) else whole + data
            if kind in (_WHOLE, _LAST):
                yield whole


def _next_piece(file: BinaryIO) -> tuple[int, bytes] | None:
    left = _BLOCK - file.tell() % _BLOCK
    if left < _PIECE.size:
        file.seek(left, 1)
    head = file.read(_PIECE.size)
    if len(head) < _PIECE.size:
        return None
    crc, length, kind = _PIECE.unpack(head)
    data = file.read(length)
    if len(data) < length or crc != zlib.crc32(data, zlib.crc32(bytes([kind]))) or not _WHOLE <= kind <= _LAST:
        return None
    return kind, data


def write(log: Path, those: Iterator[bytes]) -> None:
    """Write a log of these records."""
    with log.open("wb") as file:
        file.write(_HEADER)
        for record in those:
            _write_record(file, record)


def _write_record(file: BinaryIO, record: bytes) -> None:
    view, is_first = memoryview(record), True
    while True:
        left = _BLOCK - file.tell() % _BLOCK
        if left < _PIECE.size:
            file.write(bytes(left))
            left = _BLOCK
        data, view = view[: left - _PIECE.size], view[left - _PIECE.size :]
        is_last = not view
        kind = _WHOLE if is_first and is_last else _FIRST if is_first else _LAST if is_last else _MIDDLE
        file.write(_PIECE.pack(zlib.crc32(data, zlib.crc32(bytes([kind]))), len(data), kind))
        file.write(data)
        if is_last:
            return
        is_first = False


def _parsed(data: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2

    return wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]  # made by protobuf when imported


def is_empty(log: Path) -> bool:
    """Whether the process was killed before it had said which run this is: there is nothing that could be sent."""
    try:
        return not any(_parsed(data).HasField("run") for data in records(log))
    except ValueError:
        return True


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file of an artifact, as the log names it; without it the artifact is lost. `md5` is "" where it isn't known.

    `is_list` says that it is wandb's list of the artifact's files, which stands beside the log where they are many.
    """

    path: str
    artifact_type: str
    md5: str
    is_list: bool = False


def staged_files(log: Path) -> list[StagedFile]:
    """The files that a log's artifacts are made of."""
    return [file for data in records(log) for file, _ in _staged(_parsed(data))]


def _staged(record: Any) -> Iterator[tuple[StagedFile, Any]]:
    """The files of an artifact's record, each with its entry there."""
    if listed := record.artifact.manifest.manifest_file_path:
        yield StagedFile(listed, "", "", is_list=True), None
    for entry in record.artifact.manifest.contents:
        if entry.local_path:
            md5 = "" if entry.extra else entry.digest  # another algorithm is named there
            yield StagedFile(entry.local_path, record.artifact.type, md5), entry


Found = Callable[[StagedFile], Path | None]


@dataclass(frozen=True, slots=True)
class OwnRun:
    """The run that a log becomes, of which it was a share."""

    id: str
    name: str
    group: str


def rewritten(log: Path, new: Path, found: Found, exit_code: int | None = None, own: OwnRun | None = None) -> None:
    """Write the log to `new`, with the paths of staged files as they are `found`, less artifacts that lack one.

    `exit_code` and `own` take the place of the log's.
    """

    def changed(data: bytes) -> bytes | None:
        record = _parsed(data)
        if record.HasField("exit") and exit_code is not None:
            record.exit.exit_code = exit_code
        elif record.HasField("run") and own is not None:
            record.run.run_id, record.run.display_name = own.id, own.name
            record.run.run_group = record.run.run_group or own.group
        elif record.HasField("artifact"):
            for file, entry in _staged(record):
                path = found(file)
                if path is None:
                    return None
                entry.local_path = str(path)
            if own is not None:
                record.artifact.run_id = own.id
        else:
            return data
        return bytes(record.SerializeToString())

    write(new, (made for data in records(log) if (made := changed(data)) is not None))
