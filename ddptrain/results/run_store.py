"""What a place that holds runs does for commands, and such a place in a folder of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from ddptrain.errors import DdptrainError
from ddptrain.results.lookup import RunView, find_run, list_runs, load_run


class Need(Enum):
    """What a command reads of a run besides its record."""

    NOTHING = "nothing"
    METRICS = "metrics"
    LOGS = "logs"
    MODEL = "model"  # the best checkpoint, and the small files that go with it


class Keeping(Protocol):
    """Keeps what a driver writes where it belongs, for as long as the run is on."""

    def begin(self) -> None:
        """The run's folder is there: keep it. Raises ResultsError."""

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Tell `warn` what goes wrong, and `lost` once the run has to end for it."""

    def flush(self, deadline_s: float) -> str:
        """Keep all of it as it is now; what is wrong, in one line, where that was not possible in time."""


class KeptHere:
    """A run in a folder of this machine is kept by being written."""

    def begin(self) -> None:
        """Nothing is left to do."""

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Nothing will be said."""

    def flush(self, deadline_s: float) -> str:
        """Nothing is left to do."""
        return ""


@dataclass(frozen=True, slots=True)
class LocalRuns:
    """Runs in a folder of this machine; new ones are written into `folder`, too."""

    folder: Path

    def list(self) -> list[RunView]:
        """Every run, newest first."""
        return list_runs(self.folder)

    def find(self, run: str, need: Need = Need.NOTHING, rank: int | None = None) -> RunView:
        """The run of that name. Raises RunNotFound."""
        return load_run(find_run(self.folder, run))

    def follow(self, view: RunView, rank: int | None) -> Callable[[], bool] | None:
        """None: whoever reads the run's files sees what has come."""
        return None

    def candidates(self, name: str, which: str, run_id: str | None = None) -> Path:
        """The folder in which to choose the run to resume."""
        return self.folder

    @contextmanager
    def keeping(self, run_id: str, *, resumed: bool, max_failures: int) -> Iterator[Keeping]:
        """Holds the run for the block; yields what keeps its folder."""
        yield KeptHere()
