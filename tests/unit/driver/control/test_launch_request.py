"""The request of a program to its driver, read from stdin."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ddptrain.driver.control.detach import LaunchRequest, read_launch_request
from ddptrain.errors import UsageError


@pytest.fixture
def stdin() -> Iterator[int]:
    """The write end of a pipe that takes the place of descriptor 0."""
    kept = os.dup(0)
    read, write = os.pipe()
    os.dup2(read, 0)
    os.close(read)
    yield write
    os.dup2(kept, 0)
    os.close(kept)
    os.close(write)


def test_request_is_read_as_it_was_sent_and_stdin_stays_open(stdin: int) -> None:
    request = LaunchRequest({"workload": "m:f", "env": {"A": "b"}}, "/folder", ["params.x=1"], together=False)
    os.write(stdin, request.to_line())
    assert read_launch_request() == request


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"[1]\n", b'{"config": 1, "more": 2}\n'])
def test_anything_else_is_refused(stdin: int, line: bytes) -> None:
    os.write(stdin, line)
    with pytest.raises(UsageError, match=r"--ordered is for ddptrain\.launch"):
        read_launch_request()


def test_run_that_goes_together_with_its_program_is_sent_sigterm_when_that_ends(
    stdin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    sent: list[tuple[int, int]] = []

    def kill(pid: int, signum: int) -> None:
        sent.append((pid, signum))
        ended.set()

    monkeypatch.setattr(os, "kill", kill)
    writer = threading.Thread(target=os.write, args=(stdin, LaunchRequest(None, "/f", [], together=True).to_line()))
    writer.start()
    assert read_launch_request().together
    writer.join()
    (watching,) = [thread for thread in threading.enumerate() if thread.name == "ddptrain-program"]
    assert watching.daemon and sent == []
    os.write(stdin, b"noise")  # does not matter
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdin)  # closes the only write end of the pipe
    os.close(null)
    watching.join(60)
    assert ended.is_set() and sent == [(os.getpid(), signal.SIGTERM)]
