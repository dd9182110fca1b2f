"""A local folder with the W&B recordings of a run in an object store, for sending them to the server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddptrain.driver.tracking.wandb_artifact_files import wandb_settings
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import ARTIFACTS, RunLayout
from ddptrain.results.remote import restore
from ddptrain.results.tracker_records import RECORDED, TEMPORARY
from ddptrain.storage.remote_folder import RemoteFolder, is_plain
from ddptrain.tracking.wandb.wandb_folders import LINKS, STATE_FILES, RunPart


class StoredWandbRun:
    """A local copy, `layout`, of a run in `store`. Files are empty until they are fetched, except for state files.

    State files show which parts were sent.
    """

    def __init__(self, store: RemoteFolder, folder: Path) -> None:
        self.store = store
        self.layout = RunLayout(folder)
        self._paths: list[str] = []
        self._states: dict[str, bytes] = {}

    def refresh(self) -> None:
        """Create the folder again from the current content of the store. Raises ResultsError."""
        files = self.store.files(RECORDED)
        self._paths = [path for path in files if is_plain(path) and not path.startswith(TEMPORARY)]
        self._states = self.store.read_all([path for path in self._paths if _is_state(path)])
        with results_errors(self.layout.root):
            shutil.rmtree(self.layout.root, ignore_errors=True)
            for path in self._paths:
                target = self.layout.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._states.get(path, b""))

    def fetch(self, parts: Sequence[RunPart], until: float) -> None:
        """Fetch the files of these parts, and what `results sync` logs as artifacts.

        Raises ResultsError; TimeoutError after `until` (monotonic).
        """
        stored = [part for part in parts if part.folder.is_relative_to(self.layout.root)]  # the others are local
        folders = tuple(f"{part.folder.relative_to(self.layout.root).as_posix()}/" for part in stored)
        self._fetch((path for path in self._paths if path.startswith(folders) and not _is_state(path)), until)
        self._fetch(["config.yaml"], until)
        wanted = wandb_settings(self.layout)
        tables = [path for path in self.store.files(f"{ARTIFACTS}/tables") if wanted.tables and is_plain(path)]
        images = self.store.files(f"{ARTIFACTS}/images") if tables else {}
        self._fetch([*tables, *filter(is_plain, images)], until)
        if wanted.checkpoints:
            _check(until)
            restore.download_checkpoints(self.store, self.layout.root)

    def _fetch(self, paths: Iterable[str], until: float) -> None:
        for path in paths:
            _check(until)
            (self.layout.root / path).parent.mkdir(parents=True, exist_ok=True)
            self.store.fetch(path, self.layout.root / path)

    def upload_states(self) -> None:
        """Write state files that have changed to the store. Raises ResultsError."""
        for path in (self.layout.root / RECORDED).rglob("*"):
            name = path.relative_to(self.layout.root).as_posix()
            if _is_state(name) and path.is_file() and self._states.get(name) != (data := path.read_bytes()):
                self.store.write(name, data)


def _is_state(path: str) -> bool:
    return path == f"{RECORDED}/{LINKS}" or path.endswith(STATE_FILES)


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError
