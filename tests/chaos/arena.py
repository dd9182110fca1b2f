"""The environment of the cases of one thread: folders, commands, and a running cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import processes

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLED = Path(sys.executable).with_name("ddptrain")
SABOTEUR = Path(__file__).with_name("saboteur.py")
_STUB = Path(__file__).with_name("stub.py")
STARTING = threading.Lock()  # whoever holds it keeps commands from being started


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `at_ns` is the time of its end; code None means that it had to be killed."""

    code: int | None
    stdout: str
    stderr: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class ClusterUp:
    """A cluster started by `ddptrain cluster up`."""

    name: str
    worker: int
    scheduler: int
    scratch: Path

    def is_whole(self) -> bool:
        """Whether its processes are alive, including a rank server."""
        below = processes.descendants(self.worker)
        return processes.named("ddptrain-ranks", below) is not None and Path(f"/proc/{self.scheduler}").exists()


class Command:
    """A running command in its own session, which is killed after a time limit."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str | Path],
        environment: dict[str, str],
        timeout_s: float,
        output: str,
    ) -> None:
        self.out, self.err = folder / f"{output}.stdout", folder / f"{output}.stderr"
        with STARTING, self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                arguments,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.late = False
        self._timer = threading.Timer(timeout_s, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        self.late = True
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def wait(self) -> Ended:
        """Wait for its end."""
        code = self.popen.wait()
        at_ns = time.time_ns()
        self._timer.cancel()
        said = [path.read_text(errors="replace") for path in (self.out, self.err)]
        return Ended(None if self.late else code, said[0], said[1], at_ns)


class Arena:
    """A folder for cases, and running clusters, for one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._warm: ClusterUp | None = None
        self._clusters = 0

    def new_folder(self, name: str) -> Path:
        """A new folder with the stub."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copyfile(_STUB, folder / "stub.py")
        return folder

    def start(
        self,
        folder: Path,
        mark: str,
        *arguments: str | Path,
        timeout_s: float = 180,
        output: str = "command",
    ) -> Command:
        """Start a command in `folder`; its output is in files named `output`."""
        return Command(folder, arguments, self._environment(mark), timeout_s, output)

    def warm(self) -> ClusterUp:
        """The cluster that cases share. It is replaced if a case has damaged it."""
        if self._warm is not None and not self._warm.is_whole():
            self.down(self._warm)
            self._warm = None
        if self._warm is None:
            self._warm = self.up()
        return self._warm

    def up(self) -> ClusterUp:
        """A new cluster with two slots."""
        self._clusters += 1
        name = f"chaos-{self._clusters}"
        settings = ["--ranks", "2", "--gpus", "0", "--json"]
        ended = self._cluster("up", "--name", name, *settings)
        if ended.code != 0:
            raise RuntimeError(f"no cluster came up:\n{ended.stdout}{ended.stderr}")
        parts: dict[str, Any] = {part["role"]: part for part in json.loads(ended.stdout)["parts"]}
        scratch = Path(parts["worker"]["log"]).parent / "scratch"
        return ClusterUp(name, parts["worker"]["pid"], parts["scheduler"]["pid"], scratch)

    def down(self, cluster: ClusterUp) -> None:
        """Stop a cluster, or what is left of it."""
        self._cluster("down", cluster.name, "--now")
        processes.kill([cluster.worker, cluster.scheduler, *processes.descendants(cluster.worker)])

    def close(self) -> None:
        """Stop all clusters."""
        if self._warm is not None:
            self.down(self._warm)
            self._warm = None

    def _cluster(self, *arguments: str) -> Ended:
        folder = self.folder / "cluster"
        folder.mkdir(exist_ok=True)
        return self.start(folder, "cluster", INSTALLED, "cluster", *arguments).wait()

    def _environment(self, mark: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        ours = {processes.MARK: mark, "XDG_STATE_HOME": str(self.folder / ".state"), "PYTHONPATH": path}
        return {**os.environ, **ours}
