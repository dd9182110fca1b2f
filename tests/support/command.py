"""The command `ddptrain` as a process that a test starts, watches and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# The limit for what takes about a second on an idle machine. It only ends a test that would wait for ever.
PATIENCE_S = 100.0
# The program that pip installs, beside the interpreter of the tests. Another version can be named.
INSTALLED = (os.environ.get("DDPTRAIN_COMMAND", str(Path(sys.executable).with_name("ddptrain"))),)


def wait_until(holds: Callable[[], Any], what: str | Callable[[], str] = "it", timeout_s: float = PATIENCE_S) -> Any:
    """Return what the condition says once it is true; fails the test if it takes too long."""
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline  # before the check: the machine may have been suspended since the last one
        if found := holds():
            return found
        assert not late, f"not within {timeout_s} s: {what() if callable(what) else what}"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Finished:
    """The exit code of a command, and all that it printed."""

    rc: int
    stdout: str
    stderr: str


@dataclass(slots=True)
class Running:
    """A command that runs, in a session and process group of its own; what it prints goes to files."""

    popen: subprocess.Popen[bytes]
    stdout_path: Path
    stderr_path: Path

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self.stdout_path.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """What it has printed to stderr so far."""
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Return once stdout or stderr contains `text`; fails the test if the command or the time ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.popen.poll() is not None
            if text in self.stdout or text in self.stderr:
                return
            if ended or time.monotonic() > deadline:
                what = f"ended with {self.popen.returncode}" if ended else f"took over {timeout_s} s"
                pytest.fail(f"the command {what} without printing {text!r}\n{self._output()}")
            time.sleep(0.02)

    def finish(self, timeout_s: float = PATIENCE_S) -> Finished:
        """Wait until it ends; fails the test, with its output, if it takes longer than `timeout_s`."""
        try:
            rc = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the command took over {timeout_s} s\n{self._output()}")
        return Finished(rc, self.stdout, self.stderr)

    def kill_group(self) -> None:
        """Send SIGKILL to the command and to what stayed in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(PATIENCE_S)

    def _output(self) -> str:
        return f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"


@dataclass(slots=True)
class Cli:
    """Starts the installed command, as users do, in a folder, with its state below this folder."""

    folder: Path
    started: list[Running] = field(default_factory=list)

    def start(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] | None = None,
        stdin: str | int | None = None,
    ) -> Running:
        """Start the command. `env` is added to the environment of this process.

        stdin: a text in a pipe, or a descriptor, such as one of a terminal; by default it is empty.
        """
        output = self.folder / ".said"
        output.mkdir(exist_ok=True)
        stdout, stderr = (output / f"{len(self.started)}.{name}" for name in ("out", "err"))
        with stdout.open("wb") as out, stderr.open("wb") as err:
            given = subprocess.PIPE if isinstance(stdin, str) else subprocess.DEVNULL if stdin is None else stdin
            popen = subprocess.Popen(
                [*(program or INSTALLED), *map(str, args)],
                cwd=cwd or self.folder,
                env={**os.environ, "XDG_STATE_HOME": str(self.folder / ".state"), **(env or {})},
                stdin=given,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        if isinstance(stdin, str) and popen.stdin is not None:
            popen.stdin.write(stdin.encode())
            popen.stdin.close()
        self.started.append(Running(popen, stdout, stderr))
        return self.started[-1]

    def __call__(
        self,
        *args: str | Path,
        timeout_s: float = PATIENCE_S,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] | None = None,
    ) -> Finished:
        """Run the command to its end."""
        return self.start(*args, cwd=cwd, env=env, program=program).finish(timeout_s)

    def program(self, code: str) -> tuple[str, str]:
        """A `program` that is a script with this code, in the folder."""
        path = self.folder / "command.py"
        path.write_text(code)
        return (sys.executable, str(path))

    def look(self, *args: str, env: Mapping[str, str] | None = None) -> Finished:
        """`ddptrain cluster status`, repeated while a scheduler on a busy machine does not answer in time."""
        deadline = time.monotonic() + PATIENCE_S
        while "does not answer within" in (done := self("cluster", *args, env=env)).stdout:
            if time.monotonic() > deadline:
                break
        return done
