"""Access to the runs of a folder of this machine. remote/runs.py has the same methods for object stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from ddptrain.errors import DdptrainError
from ddptrain.results.annotations import Annotations, Change, edit_folder
from ddptrain.results.layout import BEST, RunLayout
from ddptrain.results.lookup import RunView, find_run, list_runs, load_run


class NeededFiles(Enum):
    """The files that a command reads besides run.json."""

    NOTHING = "nothing"
    METRICS = "metrics"
    LOGS = "logs"
    EVENTS = "events"
    COMPARISON = "comparison"  # metrics.jsonl, config.yaml, events.jsonl, and the JSON files of inputs/
    REPORT = "report"  # metrics, events, logs, config.yaml, git.diff, and the images and tables of artifacts/
    CHECKPOINTS = "checkpoints"
    MODEL = "model"  # the best checkpoint, config.yaml, and the JSON files of artifacts/ and inputs/


class RunUpload(Protocol):
    """Uploads the files that a driver writes, while the run is running."""

    def begin(self) -> None:
        """Start; the run's folder exists. Raises ResultsError."""

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Call `warn` for each failure, and `lost` once if the run must end."""

    def flush(self, deadline_s: float) -> str:
        """Upload everything as it is now. Returns "", or one line about the problem if the deadline was reached."""


class NoUpload:
    """The upload of a run in a folder of this machine: nothing to do."""

    def begin(self) -> None:
        """Do nothing."""

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Do nothing: there are no failures."""

    def flush(self, deadline_s: float) -> str:
        """Do nothing."""
        return ""


@dataclass(frozen=True, slots=True)
class LocalRuns:
    """The runs in a folder of this machine."""

    folder: Path

    def list(self, need: NeededFiles = NeededFiles.NOTHING, kind: str = "") -> list[RunView]:
        """Return every run of that kind, newest first."""
        return list_runs(self.folder, kind)

    def find(
        self, run: str, need: NeededFiles = NeededFiles.NOTHING, rank: int | None = None, checkpoint: str = BEST
    ) -> RunView:
        """Return the run of that name. Raises RunNotFound."""
        return load_run(find_run(self.folder, run))

    def find_exact(self, run_id: str, need: NeededFiles = NeededFiles.NOTHING) -> RunView | None:
        """Return the run of that id; None if there is none."""
        return load_run(self.folder / run_id) if RunLayout(self.folder / run_id).run_json.is_file() else None

    def annotate(self, run: str, change: Change) -> Annotations:
        """Change the tags and the note of a run; return them. Raises RunNotFound, ResultsError."""
        return edit_folder(find_run(self.folder, run), change)

    def follow(self, view: RunView, rank: int | None, *, numbers: bool = False) -> Callable[[], bool] | None:
        """Return None: the files of the run itself are read."""
        return None

    def candidates(self, name: str, which: str, run_id: str | None = None) -> Path:
        """Return the folder in which to choose the run to resume."""
        return self.folder

    @contextmanager
    def keeping(self, run_id: str, *, resumed: bool) -> Iterator[RunUpload]:
        """Yield the upload of the run, which does nothing."""
        yield NoUpload()
