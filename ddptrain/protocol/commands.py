"""Commands from the driver to a running rank: one word on each line of a pipe from the rank server.

A thread reads them, because the main thread can be inside a collective operation for minutes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from ddptrain.protocol.rank_spec import STACKS_SIGNAL


class Command(StrEnum):
    """The commands to a rank."""

    PREEMPT = "preempt"  # finish the step, save, and end; a script that does not save in ctx.checkpoint gets SIGTERM
    INTERRUPT = "interrupt"  # the same, but a script gets SIGINT
    HANG_UP = "hang-up"  # the same with SIGHUP
    QUIT = "quit"  # the same with SIGQUIT
    USER_1 = "user-1"  # call the handler of SIGUSR1
    STACKS = "stacks"  # report the stacks of all threads
    STOP = "stop"  # end: the worker group is being stopped; SIGTERM follows
    INPUT = "input"  # a line for the debugger, as JSON text after the word; "" is the end of the input
    BREAK = "break"  # SIGINT to the main thread, which opens the debugger
    NOTICED = "noticed"  # from this process's own handler of SIGTERM; not accepted from the pipe


# Other signals to the driver than SIGTERM that a script gets as they are.
OF_SIGNALS: dict[int, Command] = {
    signal.SIGINT: Command.INTERRUPT,
    signal.SIGHUP: Command.HANG_UP,
    signal.SIGQUIT: Command.QUIT,
}
# Signals to the driver that end nothing: their handlers in the ranks are called.
FORWARDED: dict[int, Command] = {signal.SIGUSR1: Command.USER_1}
_FROM_DRIVER = frozenset(Command) - {Command.NOTICED}
_MAX_LINE_BYTES = 1 << 16
MAX_INPUT = 4_000  # characters of a line for the debugger
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)  # of the thread itself
_FOR_MAIN_THREAD = signal.valid_signals() - {*_CRASHES, signal.SIGTERM, STACKS_SIGNAL}


class CommandError(ValueError):
    """The text is not a command that a rank accepts from the driver."""


def decode(text: str) -> tuple[Command, str | None]:
    """Return the command in a line without its newline, and the input of INPUT. Raises CommandError for other texts."""
    word, blank, given = text.partition(" ")
    try:
        command = Command(word)
        data = json.loads(given) if command is Command.INPUT else None
        if not isinstance(data, str) if command is Command.INPUT else blank:
            raise ValueError
    except (ValueError, RecursionError):
        raise CommandError(f"unknown command {text[:40]!r}") from None
    if command not in _FROM_DRIVER:
        raise CommandError(f"{command} is not accepted from outside")
    return command, data


class CommandReader:
    """Reads commands from `fd` and calls their handlers in a thread, which ends when `fd` or its other end is closed.

    Lines that are not commands are ignored.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._own_read_fd, self._own_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._handlers: dict[Command, Callable[..., None]] = {}

    def on(self, command: Command, handle: Callable[..., None]) -> None:
        """Call `handle` in the thread for each `command`, for INPUT with the text. Must be called before listen()."""
        self._handlers[command] = handle

    def post(self, command: Command) -> None:
        """Send a command to this process itself; safe in a signal handler. Raises OSError if the pipe is closed."""
        os.write(self._own_write_fd, f"{command}\n".encode())

    def listen(self) -> None:
        """Start the thread. Commands that arrived earlier are handled first."""
        threading.Thread(target=self._run, name="ddptrain-commands", daemon=True).start()

    def _run(self) -> None:
        # Signals are for the main thread: it may wait for one that it has blocked, and this thread would take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_MAIN_THREAD)
        self._read()

    def _read(self) -> None:
        partial = {self._fd: b"", self._own_read_fd: b""}
        poll = select.poll()  # select.select() accepts no descriptor above 1023
        for fd in partial:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                try:
                    data = os.read(fd, 4096)
                except OSError:  # the user's code has closed all descriptors
                    return
                if not data:
                    return
                *lines, rest = (partial[fd] + data).split(b"\n")
                partial[fd] = rest[:_MAX_LINE_BYTES]
                for line in lines:
                    self._handle(line.decode("ascii", "replace"), is_own=fd == self._own_read_fd)

    def _handle(self, text: str, *, is_own: bool) -> None:
        with suppress(CommandError):
            command, data = (Command(text), None) if is_own else decode(text)
            if (handle := self._handlers.get(command)) is not None:
                handle(*(() if data is None else (data,)))
