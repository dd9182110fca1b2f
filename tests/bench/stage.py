"""The environment of a benchmark: a temporary folder, a clean process environment, and commands that clean up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
DDPTRAIN = str(Path(sys.executable).with_name("ddptrain"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# Users' own settings of these would change what is compared.
_UNSET = ("MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "GLOO_", "DASK_", "PYTHON")
_TIMEOUT_S = 300.0


class BenchError(Exception):
    """A run without a result."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount of measurements."""

    steady_s: float = 2.0
    checkpoint_mb: int = 500
    large_checkpoint_mb: int = 3000
    checkpoints: int = 5
    large_checkpoints: int = 2
    images: int = 2_000
    images_peer: int = 200
    workers: int = 64
    ranks: int = 1_024
    events_s: float = 20.0


QUICK = Sizes(
    steady_s=0.3,
    checkpoint_mb=20,
    large_checkpoint_mb=60,
    checkpoints=1,
    large_checkpoints=1,
    images=300,
    images_peer=40,
    workers=16,
    ranks=64,
    events_s=4.0,
)


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended with 0. `cpu_s` includes the children for which it waited."""

    stdout: str
    stderr: str
    began_ns: int
    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Stage:
    """A folder for one benchmark, with the programs that ranks run."""

    folder: Path
    sizes: Sizes
    env: dict[str, str]
    command: str = DDPTRAIN  # that of another checkout in a comparison with it
    _count: int = field(default=0)

    @property
    def python(self) -> str:
        """The interpreter beside the command."""
        return str(Path(self.command).with_name("python"))

    @property
    def programs(self) -> Path:
        """The folder with the files of tests/bench/programs."""
        return self.folder / "programs"

    def new_folder(self, name: str) -> Path:
        """An empty folder for one run."""
        self._count += 1
        made = self.folder / f"{self._count:03d}-{name}"
        made.mkdir()
        return made

    @contextmanager
    def started(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command in its own session, in the programs' folder. It and its descendants end with the block."""
        popen = subprocess.Popen(
            [str(word) for word in command],
            cwd=self.programs,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            yield popen
        finally:
            if popen.poll() is None:
                _end(popen)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        complete: Callable[[], bool] = lambda: False,
        timeout_s: float = _TIMEOUT_S,
    ) -> Finished:
        """Run a command to its end.

        Raises:
            BenchError: it failed or took too long. One that fails when all is `complete` counts as done: torchrun's
                ranks were seen to abort in their teardown, when everything had been measured.
        """
        with tempfile.TemporaryFile(dir=self.folder) as out, tempfile.TemporaryFile(dir=self.folder) as err:
            began_ns, began = time.time_ns(), time.perf_counter()
            with self.started(command, env=env, stdout=out.fileno(), stderr=err.fileno()) as popen:
                cpu_s = _wait(popen, timeout_s)
            wall_s = time.perf_counter() - began
            out.seek(0)
            err.seek(0)
            said = (out.read().decode(errors="replace"), err.read().decode(errors="replace"))
        if popen.returncode and not complete():
            words = " ".join(str(word) for word in command)
            raise BenchError(f"{words} ended with {popen.returncode}: {''.join(said)[-2000:]}")
        return Finished(*said, began_ns, wall_s, cpu_s)

    def torchrun(self, program: str, ranks: int, *options: str, **params: object) -> list[str]:
        """The command that runs a program with torchrun."""
        places = ["--standalone", "--nproc-per-node", str(ranks), *options]
        return [TORCHRUN, *places, str(self.programs / f"{program}.py"), json.dumps(params)]

    def script(self, program: str, ranks: int, **params: object) -> list[str]:
        """The command that runs a program with ddptrain as a script, like torchrun."""
        return [
            self.command,
            "run",
            "--ranks",
            str(ranks),
            str(self.programs / f"{program}.py"),
            "--",
            json.dumps(params),
        ]

    def ddptrain(self, program: str, ranks: int, *options: str, **params: object) -> list[str]:
        """The command that runs a program with ddptrain as a function. Its run directory is `runs`/bench-<n>."""
        self._count += 1
        run_id = f"bench-{self._count:03d}"
        config = {"name": program, "workload": f"{program}:workload", "params": params, "cluster": {"ranks": ranks}}
        path = self.programs / f"{run_id}.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        return [self.command, "train", str(path), "--output", "plain", "--run-id", run_id, *options]


@contextmanager
def open_stage(sizes: Sizes, command: str = DDPTRAIN) -> Iterator[Stage]:
    """A stage in a temporary folder, which is deleted at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-") as name:
        folder = Path(name)
        shutil.copytree(Path(__file__).with_name("programs"), folder / "programs")
        (folder / "tmp").mkdir()
        env = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET)}
        env |= {"TMPDIR": str(folder / "tmp"), "XDG_STATE_HOME": str(folder / "state"), "NO_COLOR": "1"}
        yield Stage(folder, sizes, env, command)


def _wait(popen: subprocess.Popen[bytes], timeout_s: float) -> float:
    """Wait for the end of a command. Returns the CPU seconds of it and its children."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(popen.pid, os.WNOHANG)
        if pid:
            popen.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_utime + usage.ru_stime
        time.sleep(0.005)
    raise BenchError(f"{popen.args!r} took over {timeout_s:g} s")


def _end(popen: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, then SIGKILL to it and its descendants."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(popen.pid).children(recursive=True)
    popen.terminate()
    try:
        popen.wait(10)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    for process in family:
        with suppress(psutil.Error):
            process.kill()
