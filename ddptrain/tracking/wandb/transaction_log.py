"""Reads and rewrites wandb's transaction log, a file with everything that a run has logged.

The format is LevelDB's log format: blocks of 32 KiB. Each record is written in pieces: crc32 (of type and data),
length, type, data. A piece is a whole record, or the first, a middle or the last piece of one. A record is a protobuf
message `Record` of wandb.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.tracking.wandb.internals import parse_record

_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK_BYTES = 32 * 1024
_PIECE = struct.Struct("<IHB")  # crc32, length, type
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(log: Path) -> Iterator[bytes]:
    """Yield the records of a log, up to the first damaged one. Raises OSError, or ValueError if it is not a log."""
    with log.open("rb") as file:
        if file.read(len(_HEADER)) != _HEADER:
            raise ValueError(f"{log} is not a transaction log of wandb")
        record = b""
        while piece := _read_piece(file):
            kind, data = piece
            record = data if kind in (_WHOLE, _FIRST) else record + data
            if kind in (_WHOLE, _LAST):
                yield record


def _read_piece(file: BinaryIO) -> tuple[int, bytes] | None:
    left = _BLOCK_BYTES - file.tell() % _BLOCK_BYTES
    if left < _PIECE.size:
        file.seek(left, 1)
    head = file.read(_PIECE.size)
    if len(head) < _PIECE.size:
        return None
    crc, length, kind = _PIECE.unpack(head)
    data = file.read(length)
    if len(data) < length or crc != _crc(kind, data) or not _WHOLE <= kind <= _LAST:
        return None
    return kind, data


def _crc(kind: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(bytes([kind])))


def write(log: Path, contents: Iterable[bytes]) -> None:
    """Write a log with these records. Raises OSError."""
    with log.open("wb") as file:
        file.write(_HEADER)
        for record in contents:
            _write_record(file, record)


def _write_record(file: BinaryIO, record: bytes) -> None:
    rest, is_first = memoryview(record), True
    while True:
        left = _BLOCK_BYTES - file.tell() % _BLOCK_BYTES
        if left < _PIECE.size:
            file.write(bytes(left))
            left = _BLOCK_BYTES
        data, rest = rest[: left - _PIECE.size], rest[left - _PIECE.size :]
        is_last = not rest
        kind = _WHOLE if is_first and is_last else _FIRST if is_first else _LAST if is_last else _MIDDLE
        file.write(_PIECE.pack(_crc(kind, data), len(data), kind))
        file.write(data)
        if is_last:
            return
        is_first = False


def is_empty(log: Path) -> bool:
    """Return whether there is nothing to send, because the process was killed before it wrote the record of the run."""
    try:
        return not any(parse_record(data).HasField("run") for data in records(log))
    except ValueError:
        return True


@dataclass(frozen=True, slots=True)
class LoggedFile:
    """A file of an artifact; without it the artifact cannot be sent. `md5` is "" if it is unknown.

    is_list: the file is wandb's list of the artifact's files, which wandb writes if there are many.
    """

    path: str
    artifact_type: str
    md5: str
    is_list: bool = False


def staged_files(log: Path) -> list[LoggedFile]:
    """Return the files of all artifacts in a log. Raises OSError, ValueError."""
    return [file for data in records(log) for file, _ in _staged(parse_record(data))]


def _staged(record: Any) -> Iterator[tuple[LoggedFile, Any]]:
    """Yield the files of an artifact's record, each with its entry in the record's list."""
    if listed := record.artifact.manifest.manifest_file_path:
        yield LoggedFile(listed, "", "", is_list=True), None
    for entry in record.artifact.manifest.contents:
        if entry.local_path:
            md5 = "" if entry.extra else entry.digest  # `extra` names another algorithm
            yield LoggedFile(entry.local_path, record.artifact.type, md5), entry


@dataclass(frozen=True, slots=True)
class SeparateRun:
    """The separate W&B run that a rank's log of a shared run is sent to."""

    id: str
    name: str
    group: str


def rewrite(
    log: Path,
    new: Path,
    locate: Callable[[LoggedFile], Path | None],
    exit_code: int | None = None,
    separate: SeparateRun | None = None,
) -> None:
    """Write a copy of a log, with the paths that `locate` returns for staged files.

    Artifacts are left out if `locate` returns None for one of their files. `exit_code` and `separate` replace the
    values in the log. Raises OSError, ValueError.
    """

    def changed(data: bytes) -> bytes | None:
        record = parse_record(data)
        if record.HasField("exit") and exit_code is not None:
            record.exit.exit_code = exit_code
        elif record.HasField("run") and separate is not None:
            record.run.run_id, record.run.display_name = separate.id, separate.name
            record.run.run_group = record.run.run_group or separate.group
        elif record.HasField("artifact"):
            for file, entry in _staged(record):
                path = locate(file)
                if path is None:
                    return None
                entry.local_path = str(path)
            if separate is not None:
                record.artifact.run_id = separate.id
        else:
            return data
        return bytes(record.SerializeToString())

    write(new, (record for data in records(log) if (record := changed(data)) is not None))
