"""What every test gets: a guard against what tests leave behind, and the command as a real process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import pytest

LEAK_GRACE_S = 30.0
# Reasons for which a test may be skipped where every server is installed (DDPTRAIN_STRICT_SKIPS).
ALLOWED_SKIPS = re.compile(
    r"no NVIDIA GPU|root may read everything|transformers is not installed|Seattle names are not at"
)
# What takes a second where nothing else runs: a machine with other work may take this long for it.
PATIENCE_S = 100.0
# In the environment of every process that a test starts, and of those that these start: it is known by this
# even after its parent has died.
MARK = "DDPTRAIN_TESTS"

# They serve the whole interpreter, and end with it.
_LASTING_THREADS = ("Dask-Offload", "asyncio_", "pytest_timeout")
_LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_FREE_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # torch sets its own


def pytest_configure() -> None:
    os.environ[MARK] = uuid.uuid4().hex


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell why a test had to run once more: what then passes must not go unseen."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed at first, run once more: {report.nodeid} ({report.when})")
        terminalreporter.line(report.longreprtext)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With DDPTRAIN_STRICT_SKIPS set, a test that is skipped for any other reason than those allowed fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("DDPTRAIN_STRICT_SKIPS") or reporter is None:
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", ())}
    if forbidden := sorted(reason for reason in reasons if not ALLOWED_SKIPS.search(reason)):
        reporter.write_line("")
        reporter.section("these tests must not be skipped here")
        reporter.write_line("\n".join(forbidden))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@cache
def _why_no_gpu() -> str:
    """Why tests marked gpu can't run; empty where they can."""
    if not shutil.which("nvidia-smi"):
        return "no NVIDIA GPU: nvidia-smi is not installed"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    if listed.returncode or "GPU " not in listed.stdout:
        return f"no NVIDIA GPU: nvidia-smi -L says {(listed.stdout + listed.stderr).strip()!r}"
    return ""


# --- the guard ---


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fails a test that leaves processes or threads running, or the environment changed."""
    processes, threads, environment = set(_our_processes()), set(threading.enumerate()), dict(os.environ)
    yield
    left = [
        *_changed_variables(environment),
        *_left_threads(threads),
        *_left_processes(processes),
    ]
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _changed_variables(before: Mapping[str, str]) -> list[str]:
    """What differs in os.environ, which is put back."""
    names = sorted({*before, *os.environ} - {*_FREE_VARIABLES})
    changed = [name for name in names if before.get(name) != os.environ.get(name)]
    told = [f"environment: {name}={os.environ.get(name)!r}, was {before.get(name)!r}" for name in changed]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return told


def _left_threads(before: set[threading.Thread]) -> list[str]:
    """Threads that would keep the interpreter from ending, after a grace."""

    def left() -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread not in before and not thread.daemon and not thread.name.startswith(_LASTING_THREADS)
        ]

    deadline = time.monotonic() + LEAK_GRACE_S
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    return [f"thread: {thread.name}" for thread in left()]


def _left_processes(before: set[psutil.Process]) -> list[str]:
    """Processes that outlive the test, after a grace; they are killed."""
    deadline = time.monotonic() + LEAK_GRACE_S
    left = _our_processes().keys() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _our_processes().keys() - before
    running = _our_processes()
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return [f"process: {process.pid} {running.get(process, '')}" for process in left]


def _our_processes() -> dict[psutil.Process, str]:
    """Every live process that this pytest is the origin of, with its command line."""
    pids = psutil.pids()
    if _seen.pids != pids:  # most tests start nothing, and to look into every process takes a while
        _seen.ours = _look_for_our_processes()
        _seen.pids = pids
    return {process: command for process, command in _seen.ours.items() if _is_live(process)}


@dataclass(slots=True)
class _Seen:
    """What the last look at all processes has found."""

    pids: list[int] = field(default_factory=list)
    ours: dict[psutil.Process, str] = field(default_factory=dict)


_seen = _Seen()


def _is_live(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _look_for_our_processes() -> dict[psutil.Process, str]:
    found = {}
    myself = psutil.Process()
    descendants = set(myself.children(recursive=True))
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = process in descendants or process.environ().get(MARK) == os.environ[MARK]
            command = " ".join(process.cmdline()) if ours and process != myself else ""
            if command and not any(lasting in command for lasting in _LASTING_PROCESSES):
                found[process] = command
    return found


# --- the command ---


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended, and all that it said."""

    rc: int
    stdout: str
    stderr: str


@dataclass(slots=True)
class Running:
    """A command under way, in a session and process group of its own; what it prints goes to files."""

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
        """Return once `text` stands in stdout or stderr; fails the test if command or time end first."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.popen.poll() is not None
            if text in self.stdout or text in self.stderr:
                return
            if ended or time.monotonic() > deadline:
                what = f"ended with {self.popen.returncode}" if ended else f"took over {timeout_s} s"
                pytest.fail(f"the command {what} without printing {text!r}\n{self._said()}")
            time.sleep(0.02)

    def finish(self, timeout_s: float = PATIENCE_S) -> Finished:
        """Wait until it ends; fails the test, with what was said, if it takes longer than `timeout_s`."""
        try:
            rc = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the command took over {timeout_s} s\n{self._said()}")
        return Finished(rc, self.stdout, self.stderr)

    def kill_group(self) -> None:
        """SIGKILL for the command and what stayed in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(PATIENCE_S)

    def _said(self) -> str:
        return f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"


@dataclass(slots=True)
class Cli:
    """Starts `python -m ddptrain` in a folder, with state kept below it."""

    folder: Path
    started: list[Running] = field(default_factory=list)

    def start(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "ddptrain"),
    ) -> Running:
        """The command, started; stdin is empty. `env` is added to this process's own environment."""
        said = self.folder / ".said"
        said.mkdir(exist_ok=True)
        stdout, stderr = (said / f"{len(self.started)}.{name}" for name in ("out", "err"))
        environment = {**os.environ, "XDG_STATE_HOME": str(self.folder / ".state"), **(env or {})}
        with stdout.open("wb") as out, stderr.open("wb") as err:
            popen = subprocess.Popen(
                [*program, *map(str, args)],
                cwd=cwd or self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(Running(popen, stdout, stderr))
        return self.started[-1]

    def __call__(
        self,
        *args: str | Path,
        timeout_s: float = PATIENCE_S,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "ddptrain"),
    ) -> Finished:
        """Run the command to its end."""
        return self.start(*args, cwd=cwd, env=env, program=program).finish(timeout_s)

    def look(self, *args: str, env: Mapping[str, str] | None = None) -> Finished:
        """`ddptrain cluster status` or `list`, again where a scheduler of a busy machine does not answer in time."""
        deadline = time.monotonic() + PATIENCE_S
        while "does not answer within" in (done := self("cluster", *args, env=env)).stdout:
            if time.monotonic() > deadline:
                break
        return done


@pytest.fixture
def run_cli(tmp_path: Path) -> Iterator[Cli]:
    """Runs `ddptrain` in tmp_path: `run_cli("schema")` to its end, `run_cli.start("train")` to be watched."""
    runner = Cli(tmp_path)
    yield runner
    for running in runner.started:
        # What outlives a command that has ended by itself is for leak_guard to tell.
        if running.popen.poll() is None:
            running.kill_group()


@pytest.fixture(scope="session")
def warm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that is up, with six slots: for runs of tests that are not about their cluster.

    A run on it takes a third of what one takes that starts its own. Its workers have the environment of pytest, not
    that of the command: what ranks are to see goes into the configuration's `env`.
    """
    cli = Cli(tmp_path_factory.mktemp("warm"))
    options = ("--name", "warm", "--ranks", "6", "--gpus", "0", "--idle-timeout", "3600", "--json")
    up = cli("cluster", "up", *options, timeout_s=100)
    assert up.rc == 0, up.stderr
    yield str(json.loads(up.stdout)["address"])
    down = cli("cluster", "down", "warm", "--now")
    assert down.rc == 0, down.stderr
