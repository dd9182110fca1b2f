"""What W&B has recorded of a run in an object store, in a folder of this machine for as long as it takes to send it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddptrain.protocol.wandb_parts import CHECKPOINT_TYPE, LINKS, STATE_FILES, Part
from ddptrain.results.errors import naming
from ddptrain.results.layout import RunLayout, step_of
from ddptrain.results.remote import restore
from ddptrain.results.remote.store import Store, is_plain
from ddptrain.results.tracking import wandb_log
from ddptrain.results.tracking.record import OF_NO_USE, RECORDED

_STAGED = f"{RECORDED}/data/artifacts/staging"


class Borrowed:
    """The folder, as `layout`: of `run`, that of the run in the store, it has what says how its parts stand.

    All other files are empty until they are fetched: their names tell what there is.
    """

    def __init__(self, run: Store, folder: Path) -> None:
        self._run = run
        self.layout = RunLayout(folder)
        self._there: list[str] = []
        self._states: dict[str, bytes] = {}

    def outline(self) -> None:
        """Begin anew, with how it stands now. Raises ResultsError."""
        files = self._run.files(RECORDED)
        self._there = [path for path in files if is_plain(path) and not path.startswith(OF_NO_USE)]
        self._states = self._run.read_all([path for path in self._there if _is_state(path)])
        with naming(self.layout.root):
            shutil.rmtree(self.layout.root, ignore_errors=True)
            for path in self._there:
                target = self.layout.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._states.get(path, b""))

    def fetch(self, parts: Sequence[Part], until: float) -> None:
        """Bring what these parts are sent with, until then (monotonic). Raises ResultsError, TimeoutError."""
        borrowed = [part for part in parts if part.folder.is_relative_to(self.layout.root)]  # or kept here, by the user
        folders = tuple(f"{part.folder.relative_to(self.layout.root).as_posix()}/" for part in borrowed)
        self._bring((path for path in self._there if path.startswith(folders) and not _is_state(path)), until)
        logs = [part.log for part in borrowed if not wandb_log.is_empty(part.log)]
        files = [file for log in logs for file in wandb_log.staged_files(log)]
        staged = {f"{_STAGED}/{Path(file.path).name}" for file in files if file.artifact_type != CHECKPOINT_TYPE}
        self._bring((path for path in self._there if path in staged), until)
        folders_of_steps = {Path(file.path).parent.name for file in files if file.artifact_type == CHECKPOINT_TYPE}
        steps = {step for name in folders_of_steps if (step := step_of(name)) is not None}
        if steps:
            _check(until)
            restore.bring_checkpoints(self._run, self.layout.root, steps)

    def _bring(self, paths: Iterable[str], until: float) -> None:
        for path in paths:
            _check(until)
            self._run.fetch(path, self.layout.root / path)

    def give_back(self) -> None:
        """Have the store know what has been sent. Raises ResultsError."""
        for path in (self.layout.root / RECORDED).rglob("*"):
            name = path.relative_to(self.layout.root).as_posix()
            if _is_state(name) and path.is_file() and self._states.get(name) != (data := path.read_bytes()):
                self._run.write(name, data)


def _is_state(path: str) -> bool:
    return path == f"{RECORDED}/{LINKS}" or path.endswith(STATE_FILES)


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError
