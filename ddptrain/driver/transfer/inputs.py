"""A run's inputs, which a function of the workload prepares before the ranks start, in a process of its own.

The process may use threads and libraries that must not be in the driver, has the run's own environment, and can be
killed at any time. It is `python -m` of this module, gets a request on stdin, and ends when stdin is closed, that is,
when the driver has ended. It writes JSON lines to stdout: a text of the function, or an object for its error. Its exit
code is 0 if the function has returned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.errors import ClusterError, DdptrainError, ExitCode, UsageError

if TYPE_CHECKING:
    from ddptrain.driver.ranks import RankPlace
    from ddptrain.driver.transfer.starting_weights import FetchedWeights
    from ddptrain.driver.workers import Workers

CONTENTS = "contents.json"  # names and hashes of the files; a worker that sees the same file sees the same folder
_END_S = 5.0


class RunInputs:
    """The inputs/ folder of a run. There is none if the workload prepares nothing, or writes no file."""

    def __init__(self, target: str, folder: Path, weights: FetchedWeights | None = None) -> None:
        """`weights` are put into the folder before the function is called."""
        self._target, self._folder, self._weights = target, folder, weights
        self._process: subprocess.Popen[str] | None = None
        self._files: tuple[str, ...] = ()

    def begin(self, params: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """Start preparing, in the background. Raises ResultsError; UsageError if the weights have changed."""
        from ddptrain.results.secure_files import make_folder  # the process does not need it

        if self._weights is not None:
            self._weights.put(self._folder)
        if not self._target:
            return
        make_folder(self._folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
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
        with suppress(BrokenPipeError):  # the process has died: wait() reports it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until everything is prepared; pass the texts of the workload's function to `tell`.

        Raises the error of the function: UsageError, ClusterError or another DdptrainError; RuntimeError for a bug.
        """
        from ddptrain.protocol.news import describe_status
        from ddptrain.protocol.rank_spec import FILE as WEIGHTS

        wanted = self._folder
        if self._process is None:
            wanted = self._folder / WEIGHTS  # the function of an earlier part of the run may have left a folder
        else:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                message = json.loads(line)
                if not isinstance(message, str):
                    raise _error(str(message["message"]), int(message["exit_code"]))
                tell(message)
            if status := self._process.wait():
                raise ClusterError(f"the process that prepares the run's inputs has ended: {describe_status(status)}")
            self.close()
        if not self._files and wanted.exists():
            self._write_contents()

    def _write_contents(self) -> None:
        from ddptrain.file_ops import hash_file
        from ddptrain.results.errors import results_errors
        from ddptrain.results.secure_files import write_file

        with results_errors(self._folder):
            files = sorted(path for path in self._folder.iterdir() if path.is_file() and path.name != CONTENTS)
            listed = {
                path.name: {"size_bytes": path.stat().st_size, "sha256": hash_file(path)[1]}
                for path in files
                if not path.name.startswith(".")
            }
        self._files = (*listed, CONTENTS)
        write_file(self._folder / CONTENTS, (json.dumps({"files": listed}, indent=2) + "\n").encode())

    def place(self, workers: Workers, places: Sequence[RankPlace]) -> list[str]:
        """Return the folder of the inputs on each place's worker: this one, or a copy; "" if there are no inputs.

        Raises ClusterError.
        """
        if not self._files:
            return [""] * len(places)
        return workers.place(places, self._folder, self._files, CONTENTS, "the inputs")

    def close(self) -> None:
        """Kill the process if it still runs, and remove the folder if it is empty."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe and pipe.close()
        with suppress(OSError):
            self._folder.rmdir()


def _error(message: str, exit_code: int) -> Exception:
    """Return the error of the process, as an exception of the same kind."""
    if exit_code == ExitCode.INTERNAL:
        return RuntimeError(message)
    kinds: dict[int, type[DdptrainError]] = {ExitCode.USAGE: UsageError, ExitCode.CLUSTER: ClusterError}
    error = kinds.get(exit_code, DdptrainError)(message)
    error.exit_code = exit_code
    return error


# --- the process ---


def main() -> None:
    """Call the workload's function with the parameters, the folder to fill, and a function for messages."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the messages
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def send(message: object) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    def fail(message: str, exit_code: int) -> None:
        send({"message": message, "exit_code": int(exit_code)})

    try:
        module, _, attribute = str(request["target"]).partition(":")
        getattr(import_module(module), attribute)(request["params"], Path(request["folder"]), send)
    except DdptrainError as error:
        fail(str(error), error.exit_code)
    except OSError as error:  # the run directory cannot be written
        fail(f"the run's inputs can't be prepared: {error}", ExitCode.CLUSTER)
    except Exception:  # a bug in the workload's function: the driver reports the traceback
        fail(traceback.format_exc(), ExitCode.INTERNAL)
    os._exit(0)  # threads of a library may still wait for a store


def _end_with_stdin() -> None:
    while sys.stdin.read(4096):
        pass
    os._exit(1)  # the driver has ended


if __name__ == "__main__":
    main()
