"""The user's side of the debugger of a rank: lines of this command's terminal, or of a pipe, go to the rank on request.

    the rank asks for a line ─ the display shows its log up to there ─ a thread reads a line ─ the rank gets it

What the debugger prints comes as the rank's log. Ctrl-C opens the debugger.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import termios
import threading
from collections.abc import Mapping
from typing import Any

from ddptrain.driver.control.signals import Signals
from ddptrain.driver.inbox import Inbox, LineTyped
from ddptrain.errors import UsageError
from ddptrain.protocol.commands import MAX_INPUT
from ddptrain.protocol.rank_spec import Debug
from ddptrain.results.run import Run


def check_debug(debug: Debug | None, ranks: int | None) -> None:
    """Raise UsageError if the run does not have the rank that is to be debugged. ranks: None if not known yet."""
    if debug is not None and ranks is not None and debug.rank >= ranks:
        have = f"ranks 0 to {ranks - 1}" if ranks > 1 else "only rank 0"
        raise UsageError(f"--debug {debug.rank}: the run has {have}")


def check_input() -> None:
    """Raise UsageError if this command has nothing from which commands for the debugger can be read."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        mode = 0
    if not os.isatty(0) and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        raise UsageError(
            "--debug needs a terminal, or commands for the debugger in a pipe, and stdin is neither: run it in a "
            "terminal, or give --listen PORT to debug with an editor"
        )


class DebuggerTerminal:
    """Reads lines for the debugger in a thread, as a run observer. On a terminal they can be edited, with a history."""

    def __init__(self, rank: int, signals: Signals, inbox: Inbox) -> None:
        self.rank = rank
        self.reading = False  # from a request until the line was read
        self._signals, self._inbox = signals, inbox
        self._prompts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._typed_before = ""  # in the line that Ctrl-C has given up
        self._bytes = b""  # of a pipe, after the last line that was read
        self._mode = None
        if os.isatty(0) and os.isatty(1):
            import readline

            self._mode, self._buffer = termios.tcgetattr(0), readline.get_line_buffer
        threading.Thread(target=self._run, name="ddptrain-debugger", daemon=True).start()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Let Ctrl-C open the debugger from the beginning of the rank's work to its end."""
        if event["event"] in ("entered", "rank_ended") and event["rank"] == self.rank:
            self._signals.breaks = event["event"] == "entered"

    def on_end(self, run: Run) -> None:
        """Give the terminal back as it was."""
        self._signals.breaks = False
        if self._mode is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._mode)

    def ask(self, prompt: str) -> None:
        """Show the prompt, and read a line. While a line is read already, only show the prompt."""
        self._signals.breaks = True
        if self.reading:
            self._typed_before = self._buffer() if self._mode is not None else ""
            print(prompt, end="", flush=True)
        else:
            self.reading = True
            self._prompts.put(prompt)

    def _run(self) -> None:
        while True:
            line = self._read(self._prompts.get())
            if len(line) > MAX_INPUT:
                print(f"ddptrain: the line has {len(line)} characters, and was cut after {MAX_INPUT}", flush=True)
            line, self._typed_before, self.reading = line[:MAX_INPUT], "", False
            self._inbox.put(LineTyped(line))

    def _read(self, prompt: str) -> str:
        """Return a line with its newline, "" at the end of the input."""
        try:
            if self._mode is not None:
                return input(prompt).removeprefix(self._typed_before) + "\n"
            print(prompt, end="", flush=True)
            # Not sys.stdin: the interpreter cannot end while a thread waits in it.
            while b"\n" not in self._bytes and (data := os.read(0, 4096)):
                self._bytes += data
        except (EOFError, OSError, ValueError, RuntimeError):  # also a stdin that is closed
            return ""
        line, newline, self._bytes = self._bytes.partition(b"\n")
        return (line + newline).decode(errors="replace")
