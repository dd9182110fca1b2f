"""Prepares a workload's inputs once for all ranks, in a separate process: for example the list of images."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.errors import ClusterError, DdptrainError, ExitCode, UsageError
from ddptrain.file_ops import hash_file
from ddptrain.protocol.starting_weights import FILE as WEIGHTS
from ddptrain.protocol.worker_notices import describe_status
from ddptrain.results.errors import results_errors
from ddptrain.results.secure_files import make_folder, write_file

if TYPE_CHECKING:
    from ddptrain.driver.ranks import RankPlace
    from ddptrain.driver.transfer.starting_weights import FetchedWeights
    from ddptrain.driver.workers import Workers

CONTENTS = "contents.json"  # names and hashes of the files; a worker that sees the same file sees the same folder
_END_S = 5.0


class RunInputs:
    """The inputs/ folder of a run. There is none if the workload prepares nothing, or writes no file.

    The process may use threads and libraries that must not be in the driver, has the run's own environment, and can be
    killed at any time.
    """

    def __init__(self, target: str, folder: Path, weights: FetchedWeights | None = None) -> None:
        """`weights` are put into the folder before the function is called."""
        self._target = target
        self._folder = folder
        self._weights = weights
        self._process: subprocess.Popen[str] | None = None
        self._files: tuple[str, ...] = ()

    def begin(self, params: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """Start preparing, in the background. Raises ResultsError; UsageError if the weights have changed."""
        if self._weights is not None:
            self._weights.put(self._folder)
        if not self._target:
            return
        make_folder(self._folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ddptrain.driver.transfer.inputs_process"],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the driver only
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdin is not None
        request = {"target": self._target, "params": dict(params), "folder": str(self._folder)}
        with contextlib.suppress(BrokenPipeError):  # the process has died: wait() reports it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until everything is prepared; pass the lines of the workload's function to `tell`.

        Raises the error of the function: UsageError, ClusterError or another DdptrainError; RuntimeError for a bug.
        """
        if self._process is None:
            if not self._files and (self._folder / WEIGHTS).exists():
                self._write_contents()
            return
        assert self._process.stdout is not None
        done = False
        for line in self._process.stdout:
            message = json.loads(line)
            if "tell" in message:
                tell(str(message["tell"]))
            elif "failed" in message:
                raise _error(message["failed"])
            else:
                done = True
        status = self._process.wait()
        if not done:
            raise ClusterError(f"the process that prepares the run's inputs has ended: {describe_status(status)}")
        self.close()
        if self._folder.exists():
            self._write_contents()

    def _write_contents(self) -> None:
        with results_errors(self._folder):
            files = sorted(path for path in self._folder.iterdir() if path.is_file() and path.name != CONTENTS)
            listed = {
                path.name: {"size_bytes": path.stat().st_size, "sha256": hash_file(path)[1]}
                for path in files
                if not path.name.startswith(".")
            }
        self._files = (*listed, CONTENTS)
        write_file(self._folder / CONTENTS, (json.dumps({"files": listed}, indent=2) + "\n").encode())

    def place(self, worker_group: Workers, places: Sequence[RankPlace]) -> list[str]:
        """Return the folder of the inputs on each place's worker: this one, or a copy; "" if there are no inputs.

        Raises ClusterError.
        """
        if not self._files:
            return [""] * len(places)
        return worker_group.place(places, self._folder, self._files, CONTENTS, "the inputs")

    def close(self) -> None:
        """Kill the process if it still runs, and remove the folder if it is empty."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _error(failed: Mapping[str, object]) -> Exception:
    """Return the error of the process, as an exception of the same kind."""
    message, exit_code = str(failed["message"]), int(str(failed["exit_code"]))
    if exit_code == ExitCode.INTERNAL:
        return RuntimeError(message)
    kinds: dict[int, type[DdptrainError]] = {ExitCode.USAGE: UsageError, ExitCode.CLUSTER: ClusterError}
    error = kinds.get(exit_code, DdptrainError)(message)
    error.exit_code = exit_code
    return error
