"""`make recordings`: records a training whose rank 1 is killed, and writes docs/images/restart.svg.

Two terminals are recorded, one above the other: the training, and the shell that kills the rank. What they show is
what the commands print; only names of folders are replaced, and pauses are shortened.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyte

from tests.docs.terminal_svg import Frame, Row, Span, animated_svg, shortened

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "images" / "restart.svg"
MAX_BYTES = 1_500_000
COLUMNS, LINES = 112, 26
COMMAND = ("train", "petnames", "--set", "failure.max_restarts=1", "--set", "params.epochs=12")
KILL_AFTER_EPOCH = 5
SHOWN_FOLDER, SHOWN_ROOT = b"/home/me", b"/opt/ddptrain"
_FRAME_S, _LONGEST_S, _TYPE_S, _LIMIT_S = 0.2, 1.2, 0.03, 300.0


def row_of(cells: dict[int, pyte.screens.Char], columns: int) -> Row:
    """A row of pyte's screen as spans of equal style, without blanks at its end."""
    spans: list[Span] = []
    for column in range(columns):
        cell = cells[column]
        if cell.data == "":  # the second half of a wide character
            continue
        last = spans[-1] if spans else None
        if last and (last.colour, last.bold) == (cell.fg, cell.bold) and last.column + len(last.text) == column:
            spans[-1] = Span(last.column, last.text + cell.data, last.colour, last.bold)
        else:
            spans.append(Span(column, cell.data, cell.fg, cell.bold))
    while spans and not spans[-1].text.strip():
        spans.pop()
    if spans:
        last = spans[-1]
        spans[-1] = Span(last.column, last.text.rstrip(), last.colour, last.bold)
    return tuple(span for span in spans if span.text.strip())


class Pane:
    """A terminal of some lines, with the program that runs in it."""

    def __init__(self, lines: int) -> None:
        self._screen = pyte.Screen(COLUMNS, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._lines = lines
        self.prompt()

    def prompt(self) -> None:
        self.feed(b"\x1b[32m$\x1b[39m ")

    def feed(self, data: bytes) -> None:
        self._stream.feed(data)

    def rows(self) -> tuple[Row, ...]:
        return tuple(row_of(self._screen.buffer[line], COLUMNS) for line in range(self._lines))

    def start(self, command: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
        """Start a program in a terminal of this size; return it, and the end from which its output is read."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self._lines, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "WANDB_MODE": "disabled"}
        process = subprocess.Popen(
            command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        return process, ours


class Film:
    """The frames so far: the upper pane, a line, the lower pane."""

    def __init__(self) -> None:
        self.upper, self.lower = Pane(LINES), Pane(2)
        self.frames: list[Frame] = []
        self._begun_s = time.monotonic()

    def shoot(self) -> None:
        rule: Row = (Span(0, "─" * COLUMNS, "black"),)
        rows = (*self.upper.rows(), rule, *self.lower.rows())
        self.frames.append(Frame(time.monotonic() - self._begun_s, rows))

    def type(self, pane: Pane, text: str) -> None:
        """Show the text as if somebody typed it."""
        for character in text:
            pane.feed(character.encode())
            self.shoot()
            time.sleep(_TYPE_S)
        pane.feed(b"\r\n")
        self.shoot()


def pid_to_kill(events: Iterable[dict[str, Any]], metrics: Iterable[dict[str, Any]]) -> int | None:
    """The process id of rank 1, once its run has logged enough epochs; else None."""
    pids = [event["pid"] for event in events if event.get("event") == "rank_started" and event["rank"] == 1]
    is_time = any((row.get("epoch") or 0) >= KILL_AFTER_EPOCH for row in metrics)
    return int(pids[-1]) if pids and is_time else None


def _rows(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; none if it is not there yet."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _pid_to_kill(folder: Path) -> int | None:
    for run in folder.glob("runs/*"):
        return pid_to_kill(_rows(run / "events.jsonl"), _rows(run / "metrics.jsonl"))
    return None


def record(folder: Path) -> list[Frame]:
    """Train in this folder and kill rank 1 once; return the frames. Raises RuntimeError if the run did not succeed."""
    film = Film()
    film.type(film.upper, " ".join(["ddptrain", *COMMAND]))
    program = str(Path(sys.executable).with_name("ddptrain"))
    process, output = film.upper.start([program, *COMMAND], folder)
    try:
        _watch(film, output, folder)
        code = process.wait(30)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        os.close(output)
    if code != 0:
        raise RuntimeError(f"the training ended with exit code {code}")
    film.upper.prompt()
    film.shoot()
    return film.frames


def _watch(film: Film, output: int, folder: Path) -> None:
    killed, shot_s, begun_s = False, 0.0, time.monotonic()
    while time.monotonic() - begun_s < _LIMIT_S:
        if select.select([output], [], [], 0.05)[0]:
            try:
                data = os.read(output, 1 << 16)
            except OSError:  # Linux reports so that the program has closed its terminal
                break
            if not data:
                break
            film.upper.feed(data.replace(bytes(folder), SHOWN_FOLDER).replace(bytes(ROOT), SHOWN_ROOT))
        if time.monotonic() - shot_s >= _FRAME_S:
            film.shoot()
            shot_s = time.monotonic()
        if not killed and (pid := _pid_to_kill(folder)):
            film.type(film.lower, f"kill -9 {pid}        # rank 1")
            os.kill(pid, signal.SIGKILL)
            film.lower.prompt()
            killed = True
    if not killed:
        raise RuntimeError("the training ended before its rank could be killed")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ddptrain-recording-") as folder:
        frames = shortened(record(Path(folder)), _LONGEST_S)
    text = animated_svg(frames, COLUMNS, "A training of two ranks goes on after kill -9 of one of them")
    size = len(text.encode())
    if size > MAX_BYTES:
        print(f"recordings: {size:,} bytes are more than {MAX_BYTES:,}; nothing was written", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"recordings: {TARGET.relative_to(ROOT)}: {len(frames)} frames, {size:,} bytes, {frames[-1].at_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
