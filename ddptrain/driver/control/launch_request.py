"""What a program that launches a run tells its driver: one line of JSON in the standard input."""

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
class Order:
    """A launch. `config` is the configuration itself, as if it stood in `folder`; None where a file is named.

    `overrides` are texts as --set takes them. The order is no argument of the command: it may hold secrets. With
    `together` the run ends when the program does.
    """

    config: Mapping[str, Any] | None
    folder: str
    overrides: Sequence[str]
    together: bool

    def to_line(self) -> bytes:
        """The order as it goes over."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def take_order() -> Order:
    """The order of the program that has started this process. Raises UsageError where there is none."""
    try:
        order = Order(**json.loads(_line()))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--ordered is for ddptrain.launch, which tells more in the standard input: {error}"
        ) from error
    if order.together:
        threading.Thread(target=_end_with_program, name="ddptrain-program", daemon=True).start()
    return order


def _line() -> bytes:
    """The first line of the standard input, which is read without a buffer: its lock would outlive a thread."""
    line = b""
    while not line.endswith(b"\n") and (block := os.read(0, _BLOCK_BYTES)):
        line += block
    return line


def _end_with_program() -> None:
    while os.read(0, _BLOCK_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
