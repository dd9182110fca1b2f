"""A run's inputs, which a function of the workload prepares before the ranks start, in a process of its own.

The process may use threads and libraries that must not be in the driver, and has the run's own environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ddptrain.errors import ClusterError

if TYPE_CHECKING:
    from ddptrain.driver.ranks import RankPlace
    from ddptrain.driver.transfer.starting_weights import FetchedWeights
    from ddptrain.driver.workers import Workers
    from ddptrain.isolated import Isolated

CONTENTS = "contents.json"  # names and hashes of the files; a worker that sees the same file sees the same folder


class RunInputs:
    """The inputs/ folder of a run. There is none if the workload prepares nothing, or writes no file."""

    def __init__(
        self,
        target: str,
        folder: Path,
        weights: FetchedWeights | None = None,
        given: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """`weights` and the files `given`, by name, are put into the folder before the function is called."""
        self._target, self._folder, self._weights, self._given = target, folder, weights, given
        self._process: Isolated | None = None
        self._files: tuple[str, ...] = ()

    def begin(self, params: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """Start preparing, in the background. Raises ResultsError; UsageError if the weights have changed."""
        from ddptrain.isolated import Isolated
        from ddptrain.results.secure_files import make_folder, write_file  # the process does not need them

        if self._weights is not None:
            self._weights.put(self._folder)
        if self._target or self._given:
            make_folder(self._folder)
        for name, data in self._given.items():
            write_file(self._folder / name, data)
        if self._target:
            request = {"target": self._target, "params": dict(params), "folder": str(self._folder)}
            self._process = Isolated(f"{__name__}:prepare", request, environ)

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until everything is prepared; pass the texts of the workload's function to `tell`.

        Raises the error of the function: UsageError, ClusterError or another DdptrainError; RuntimeError for a bug.
        """
        from ddptrain.protocol.rank_spec import FILE as WEIGHTS

        wanted = self._folder
        if self._process is None and not self._given:
            wanted = self._folder / WEIGHTS  # the function of an earlier part of the run may have left a folder
        elif self._process is not None:
            for text in self._process.answers():
                tell(text)
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
        if self._process is not None:
            self._process.close()
            self._process = None
            with suppress(OSError):
                self._folder.rmdir()


def prepare(request: Mapping[str, Any], send: Callable[[object], None]) -> None:
    """In the process: call the workload's function with its parameters, the folder to fill, and `send` for texts.

    Raises ClusterError if the folder can't be written, and what the function raises.
    """
    module, _, attribute = str(request["target"]).partition(":")
    try:
        getattr(import_module(module), attribute)(request["params"], Path(request["folder"]), send)
    except OSError as error:
        raise ClusterError(f"the run's inputs can't be prepared: {error}") from error
