"""Commands reach their handlers; other lines are counted, and only this process may post what its signals say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.protocol import commands
from ddptrain.protocol.commands import CommandError, CommandReader


@pytest.fixture
def pipe() -> Iterator[tuple[CommandReader, int]]:
    read_fd, write_fd = os.pipe()
    reader = CommandReader(read_fd)
    with ExitStack() as stack:
        for fd in (read_fd, reader._own_read_fd, reader._own_write_fd):
            stack.callback(os.close, fd)
        yield reader, write_fd


@given(st.text())
def test_any_text_is_a_command_or_refused(text: str) -> None:
    try:
        assert commands.decode(text) == text
    except CommandError:
        assert text not in ("preempt", "stacks", "stop")
