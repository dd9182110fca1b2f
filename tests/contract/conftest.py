"""The installed command as a user starts it: a new process, real ranks, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import INSTALLED, Cli, Finished, Running

__all__ = ["INSTALLED", "Project", "events", "lines", "pids_of"]


@dataclass(slots=True)
class Project:
    """A folder with a user's files; its runs are in `runs/`, the state of its clusters below it.

    `project("train", "work.yaml")` runs the command to its end, `project.start(...)` returns while it runs.
    """

    folder: Path
    cli: Cli

    def write(self, name: str, text: str) -> Path:
        """Write a file; the text is dedented."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def function(self, code: str, /, **config: Any) -> str:
        """Write work.py with `code`, which defines `train(ctx, ...)`, and a configuration for it; returns its name."""
        self.write("work.py", code)
        self.write("work.yaml", json.dumps({"name": "work", "workload": "work:train", **config}))
        return "work.yaml"

    def start(
        self,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | int | None = None,
    ) -> Running:
        """Start the command, in a session of its own, with an empty stdin, or with a text or descriptor."""
        return self.cli.start(*args, env=env, cwd=cwd, stdin=stdin)

    def __call__(
        self,
        *args: str | Path,
        rc: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 100.0,
        stdin: str | int | None = None,
    ) -> Finished:
        """Run the command to its end; fails the test, with its output, if it does not exit with `rc`."""
        done = self.start(*args, env=env, cwd=cwd, stdin=stdin).finish(timeout_s)
        if rc is not None and done.rc != rc:
            pytest.fail(f"{' '.join(map(str, args))}: exit code {done.rc}, not {rc}\n{done.stdout}\n{done.stderr}")
        return done

    def record(self, run: str = "latest") -> dict[str, Any]:
        """What `results show --json` says of a run."""
        found: dict[str, Any] = json.loads(self("results", "show", run, "--json", rc=0).stdout)
        return found

    def run_directories(self) -> list[Path]:
        """The directories of all runs, the oldest first."""
        return sorted(path.parent for path in self.folder.glob("runs/*/run.json"))


def events(stdout: str) -> list[dict[str, Any]]:
    """What `--output json` printed."""
    return [json.loads(line) for line in stdout.splitlines()]


def lines(path: Path) -> list[dict[str, Any]]:
    """A JSON lines file, such as events.jsonl or metrics.jsonl of a run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    cli = Cli(tmp_path)
    yield Project(tmp_path, cli)
    for running in cli.started:
        if running.popen.poll() is None:
            running.kill_group()


def pids_of(mark: str) -> list[int]:
    """The processes whose command line contains `mark`."""
    listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    found = (line.split(None, 1) for line in listed.splitlines())
    return [int(pid) for pid, command in found if mark in command and int(pid) != os.getpid()]
