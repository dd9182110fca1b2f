"""Commands reach their handlers; other lines are counted, and only this process may post what its signals say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.protocol import commands
from ddptrain.protocol.commands import Command, CommandError, CommandReader


@pytest.fixture
def pipe() -> Iterator[tuple[CommandReader, int]]:
    read_fd, write_fd = os.pipe()
    reader = CommandReader(read_fd)
    with ExitStack() as stack:
        for fd in (read_fd, reader._own_read_fd, reader._own_write_fd):
            stack.callback(os.close, fd)
        yield reader, write_fd


def test_commands_are_handled_in_order_and_other_lines_are_counted(pipe: tuple[CommandReader, int]) -> None:
    reader, write_fd = pipe
    heard: list[Command] = []
    for command in Command:
        reader.on(command, lambda command=command: heard.append(command))  # type: ignore[misc]
    os.write(write_fd, b"stacks\ndance\n\xff\npreempt\nnoticed\nstop\nstop")
    os.close(write_fd)
    reader._read()
    assert heard == [Command.STACKS, Command.PREEMPT, Command.STOP]
    assert reader.rejected == 3  # among them "noticed", which comes from outside


def test_command_without_a_handler_is_passed_over(pipe: tuple[CommandReader, int]) -> None:
    reader, write_fd = pipe
    os.write(write_fd, b"stacks\n")
    os.close(write_fd)
    reader._read()
    assert reader.rejected == 0


def test_process_can_post_a_command_to_itself(pipe: tuple[CommandReader, int]) -> None:
    reader, write_fd = pipe
    reader.on(Command.NOTICED, lambda: os.close(write_fd))  # ends the loop
    reader.post(Command.NOTICED)
    reader._read()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)


@given(st.text())
def test_any_text_is_a_command_or_refused(text: str) -> None:
    try:
        assert commands.decode(text) == text
    except CommandError:
        assert text not in ("preempt", "stacks", "stop")
