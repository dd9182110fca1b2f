"""Every path of a run directory, the names of runs, and which paths ranks may ask for."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from ddptrain.config.wording import shown
from ddptrain.results.errors import UnsafePath
from ddptrain.results.remote.local_copy import origin_of, where_of

LATEST = "latest"
BEST = "best"
MANIFEST = "checkpoint.json"
INCOMING = ".incoming-"
INPUTS = "inputs"
ARTIFACTS = "artifacts"
TRACKING = "tracking"

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOG_NAME = re.compile(r"rank-(\d{1,9})\.log")
_STEP_NAME = re.compile(r"step-(\d{1,18})")
_DRIVE = re.compile(r"[A-Za-z]:")
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|COM[0-9]|LPT[0-9])(\..*)?", re.IGNORECASE)
_LONGEST_COMPONENT_BYTES = 200  # file systems take 255; the rest is room for the name that it has while it is written
_LONGEST_PATH_BYTES = 1000


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Where everything of one run is."""

    root: Path

    @property
    def is_original(self) -> bool:
        """Whether `root` is the run's own place, and no copy of what is in a store."""
        return origin_of(self.root) is None

    @property
    def where(self) -> str:
        """The run's place as people know it: an address, where `root` is a copy of what is there."""
        return where_of(self.root)

    def told(self, path: Path) -> str:
        """A path below `root` as people know it."""
        return f"{self.where}/{path.relative_to(self.root).as_posix()}"

    @property
    def run_json(self) -> Path:
        """What the run is, and how it went."""
        return self.root / "run.json"

    @property
    def config_yaml(self) -> Path:
        """The configuration, resolved, secrets left out."""
        return self.root / "config.yaml"

    @property
    def events_jsonl(self) -> Path:
        """Every event but log lines."""
        return self.root / "events.jsonl"

    @property
    def metrics_jsonl(self) -> Path:
        """Every number that was logged."""
        return self.root / "metrics.jsonl"

    @property
    def logs_dir(self) -> Path:
        """A log a rank."""
        return self.root / "logs"

    @property
    def checkpoints_dir(self) -> Path:
        """A folder a checkpoint, and the pointers latest and best."""
        return self.root / "checkpoints"

    @property
    def artifacts_dir(self) -> Path:
        """The files that ranks handed over."""
        return self.root / ARTIFACTS

    @property
    def inputs_dir(self) -> Path:
        """What the driver has prepared for the ranks, for every attempt of the run."""
        return self.root / INPUTS

    @property
    def tracking_dir(self) -> Path:
        """What trackers write: a folder a tracker."""
        return self.root / TRACKING

    @property
    def lock_file(self) -> Path:
        """Held by the driver for the life of the run."""
        return self.root / "run.lock"

    @property
    def heartbeat_file(self) -> Path:
        """Touched by the driver for the life of the run, for hosts that do not see its lock."""
        return self.root / ".heartbeat"

    @property
    def driver_log(self) -> Path:
        """What a detached driver printed."""
        return self.root / "driver.log"

    @property
    def stop_json(self) -> Path:
        """What somebody asks of the driver, until it has read it."""
        return self.root / ".stop.json"

    @property
    def scratch_dir(self) -> Path:
        """The embedded cluster's, while the run is on; no reader looks here."""
        return self.root / ".scratch"

    @property
    def plot_png(self) -> Path:
        """Where a picture of the curves goes, unless told otherwise."""
        return self.root / "plot.png"

    def area(self, name: str) -> Path:
        """The folder that a rank may hand over a file for. Raises UnsafePath for any other."""
        if name not in (ARTIFACTS, TRACKING):
            raise UnsafePath(f'a rank asked for a file in "{shown(name)}": it may write to {ARTIFACTS} and {TRACKING}')
        return self.root / name

    def log(self, rank: int) -> Path:
        """What that rank printed."""
        return self.logs_dir / f"rank-{rank}.log"

    def logs(self) -> dict[int, Path]:
        """The logs there are, by rank, in the order of ranks."""
        elsewhere = {self.root / path for path in self._elsewhere("logs/")}
        found = ((_LOG_NAME.fullmatch(path.name), path) for path in {*_entries(self.logs_dir), *elsewhere})
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def artifacts(self) -> dict[str, int]:
        """The files that ranks handed over: path below artifacts/ -> size in bytes, in the order of paths.

        What goes while they are listed, as of a run that is on, is left out.
        """
        sizes = {path.relative_to(self.artifacts_dir).as_posix(): size for path, size in _files(self.artifacts_dir)}
        sizes |= {path.partition("/")[2]: size_bytes for path, size_bytes in self._elsewhere("artifacts/").items()}
        return {path: sizes[path] for path in sorted(sizes) if not PurePosixPath(path).name.startswith(INCOMING)}

    def _elsewhere(self, folder: str) -> dict[str, int]:
        """What the original of this folder holds there, by path from `root`; it may not have been fetched."""
        origin = origin_of(self.root)
        return {path: size for path, size in origin.files.items() if path.startswith(folder)} if origin else {}


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """The plain files below a folder that are still there when they are looked at, each with its size in bytes."""
    for place, _, names in os.walk(folder):  # Path.rglob raises where a folder goes meanwhile
        for name in names:
            path = Path(place, name)
            with suppress(OSError):
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    yield path, state.st_size


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def new_run_id(name: str, now: datetime | None = None) -> str:
    """A fresh `<name>-<UTC YYYYmmdd-HHMMSS>-<4 hex>`."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def valid_run_id(run_id: str) -> bool:
    """Whether a folder may have that name on every system, and no command takes it for something else."""
    if not _RUN_ID.fullmatch(run_id) or run_id.endswith("."):
        return False
    return run_id.lower() not in (LATEST, BEST) and not _DEVICE.fullmatch(run_id)


def step_name(step: int) -> str:
    """The folder of that step's checkpoint. Raises UnsafePath for a step that can't be one."""
    name = f"step-{step}"
    if not _STEP_NAME.fullmatch(name):
        raise UnsafePath(f"a checkpoint's step must be a number from 0 on, of at most 18 digits, not {step}")
    return name


def step_of(name: str) -> int | None:
    """The step that a checkpoint folder's name stands for, or None for another name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def safe_relative(path: str) -> PurePosixPath:
    """The path, when it stays below the folder it is joined to and every file system can hold it.

    Raises:
        UnsafePath: it is absolute, climbs with `..`, or holds a name that is reserved, hidden from people, or
            too long.
    """
    problem = _whole_problem(path)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for part in parts:
        problem = problem or _part_problem(part)
    if not parts:
        problem = problem or "names no file"
    if problem:
        raise UnsafePath(
            f'cannot save a file as "{shown(path)}": the path {problem}; give one like "samples/names.json"'
        )
    return PurePosixPath(*parts)


def _whole_problem(path: str) -> str:
    if path.startswith("/") or _DRIVE.match(path):
        return "is absolute"
    if path.endswith("/"):
        return "names a folder"
    if "\\" in path:
        return "holds a backslash"
    if not path.isprintable():
        return "holds a character that can't be printed"
    return "is too long" if len(path.encode()) > _LONGEST_PATH_BYTES else ""


def _part_problem(part: str) -> str:
    if part == "..":
        return 'leaves the run directory with ".."'
    if len(part.encode(errors="replace")) > _LONGEST_COMPONENT_BYTES:
        return "holds a name that is too long"
    if _DEVICE.fullmatch(part) or part.startswith(INCOMING):
        return f'holds the reserved name "{shown(part)}"'
    if part != part.rstrip(". "):
        return "holds a name that ends in a dot or a space"
    return ""
