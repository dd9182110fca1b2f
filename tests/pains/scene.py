"""A folder and a clean environment in which commands run, and the record of what they print."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
_MARK = "DDPTRAIN_PAINS"  # in the environment of every process of a scene
# Users' own settings of these would change what is shown.
_UNSET = ("MALLOC_", "OMP_", "MKL_", "TORCH", "GLOO_", "NCCL_", "DASK_", "PYTHON", "WANDB_", "DDPTRAIN_", "MASTER_")
_END_S = 90.0  # how long a command may take to end after a signal


class Command:
    """A command that runs. Its output goes into a file, so that nobody needs to read a pipe."""

    def __init__(self, scene: Scene, text: str) -> None:
        self.text = text
        self._scene = scene
        self._output = Path(tempfile.mkstemp(prefix="output-", dir=scene.hidden)[1])
        with self._output.open("wb") as output:
            self._popen = subprocess.Popen(
                ["bash", "--noprofile", "--norc", "-c", f"exec {text}" if scene.plain(text) else text],
                cwd=scene.folder,
                env=scene.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process of the command."""
        return self._popen.pid

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def until(self, pattern: str, timeout_s: float = 100.0) -> None:
        """Wait until a line of the output matches, or the command has ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self._popen.poll() is None and not re.search(pattern, self.output) and time.monotonic() < deadline:
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process of the command alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def finish(self, timeout_s: float = _END_S) -> None:
        """Wait for the end, and record output and exit code. One that takes longer is ended, and this is recorded."""
        try:
            self._popen.wait(timeout_s)
            end = f"(exit code {_shell_code(self._popen.returncode)})"
        except subprocess.TimeoutExpired:
            end = f"(nothing more for {timeout_s:g} s: stopped)"
        self._scene.record(f"$ {self.text}", *self.output.splitlines(), end)


class Scene:
    """Runs commands and records them as a transcript."""

    def __init__(self, folder: Path, hidden: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.hidden = hidden
        self.env = dict(env)
        self.lines: list[str] = []

    @staticmethod
    def plain(text: str) -> bool:
        """Whether a shell command is one program, whose process id the command then has."""
        return not re.search(r"[;&|<>()]|^\w+=", text)

    def record(self, *lines: str) -> None:
        """Append lines to the transcript."""
        self.lines += lines

    def start(self, text: str) -> Command:
        """Start a shell command."""
        return Command(self, text)

    def run(self, text: str, timeout_s: float = 150.0, after: str = "") -> None:
        """Run a shell command to its end, and record it. The time limit counts from a line that matches `after`."""
        command = self.start(text)
        if after:
            command.until(after, 100.0)
        command.finish(timeout_s)

    def write(self, name: str, text: str) -> None:
        """Write a file of the scene."""
        (self.folder / name).write_text(text, encoding="utf-8")

    @staticmethod
    def free_port() -> int:
        """A TCP port that nobody listens on."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    def ranks(self) -> list[psutil.Process]:
        """The live rank processes of the scene."""
        return [process for process in self._processes() if "RANK" in _environment(process)]

    def wait_for(self, name: str, timeout_s: float = 20.0) -> None:
        """Wait until a file exists."""
        deadline = time.monotonic() + timeout_s
        while not (self.folder / name).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    @staticmethod
    def kill_tree(command: Command) -> None:
        """Kill a command and all of its descendants, as if their host had lost power."""
        process = psutil.Process(command.pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                each.kill()

    def end_processes(self) -> None:
        """Kill everything that the scene has started."""
        for _ in range(5):
            left = self._processes()
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            if not left:
                return
            psutil.wait_procs(left, timeout=2)

    def _processes(self) -> list[psutil.Process]:
        mark = self.env[_MARK]
        return [process for process in psutil.process_iter() if _environment(process).get(_MARK) == mark]


@contextmanager
def open_scene(files: Mapping[str, str]) -> Iterator[Scene]:
    """A scene in a temporary folder with these files. At the end its processes and the folder are gone."""
    with tempfile.TemporaryDirectory(prefix="ddptrain-pains-", dir="/tmp", ignore_cleanup_errors=True) as name:
        home, hidden = Path(name) / "me", Path(name) / "hidden"
        for made in (home, hidden, hidden / "tmp"):
            made.mkdir()
        env = {key: value for key, value in os.environ.items() if not key.startswith(_UNSET)}
        env |= {
            _MARK: name, "HOME": str(home), "TMPDIR": str(hidden / "tmp"), "NO_COLOR": "1", "CI": "",
            "PATH": f"{BIN}{os.pathsep}{env['PATH']}", "XDG_STATE_HOME": str(hidden / "state"),
            "XDG_CACHE_HOME": str(hidden / "cache"), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        scene = Scene(home, hidden, env)
        for file, text in files.items():
            scene.write(file, text)
        try:
            yield scene
        finally:
            scene.end_processes()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ()) if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
