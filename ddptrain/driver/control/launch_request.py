"""The request of ddptrain.launch to its driver: one line of JSON on stdin."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.errors import UsageError

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The arguments of a launch, which are not in the command line because they may contain secrets.

    config: the configuration, as if a file in `folder` contained it; None if the command line names a file.
    overrides: texts as for --set. together: the run ends when the program ends.
    """

    config: Mapping[str, Any] | None
    folder: str
    overrides: Sequence[str]
    together: bool

    def to_line(self) -> bytes:
        """Return the line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def read_launch_request() -> LaunchRequest:
    """Read the request of the program that started this process. Raises UsageError if there is none."""
    try:
        request = LaunchRequest(**json.loads(_line()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--ordered is for ddptrain.launch, which sends a request on stdin: {error}") from error
    if request.together:
        threading.Thread(target=_end_with_program, name="ddptrain-program", daemon=True).start()
    return request


def _line() -> bytes:
    """Read the first line of stdin without sys.stdin, whose lock a blocked thread would hold at exit."""
    line = b""
    while not line.endswith(b"\n") and (block := os.read(0, _BLOCK_BYTES)):
        line += block
    return line


def _end_with_program() -> None:
    while os.read(0, _BLOCK_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
