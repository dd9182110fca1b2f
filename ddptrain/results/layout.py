"""All paths of a run directory, the names of runs, and the paths that ranks may write to."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.results.errors import UnsafePath
from ddptrain.results.secure_files import read_bytes, write_file

LATEST = "latest"
BEST = "best"
MANIFEST = "checkpoint.json"
INCOMING = ".incoming-"
PRUNED = ".pruned-"  # a run that `results prune` deletes: its folder gets this prefix first
INPUTS = "inputs"
ARTIFACTS = "artifacts"
TRACKING = "tracking"

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOG_NAME = re.compile(r"rank-(\d{1,9})\.log")
_STEP_NAME = re.compile(r"step-(\d{1,18})(?:\.(\d{1,6}))?")
_LONGEST_NAME_BYTES = 200  # file systems allow 255; temporary names are longer
_LONGEST_PATH_BYTES = 1000
ORIGIN = ".store.json"


class _Below:
    """A descriptor: the path of a file or folder below `root`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: RunLayout, owner: type[RunLayout]) -> Path:
        return layout.file(self._name)


class RunLayout:
    """The paths of one run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, name: str) -> Path:
        """Return the path of a file of the run; one of an object store is downloaded if it exists there."""
        return self.root / name

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises OSError."""
        return read_bytes(self.file(name))

    @property
    def is_original(self) -> bool:
        """Whether `root` is the run itself, and not a local copy of a run in an object store."""
        return origin_of(self.root) is None

    @property
    def where(self) -> str:
        """The location of the run, for messages: its folder, or its URL in the store."""
        origin = origin_of(self.root)
        return origin.url if origin is not None else str(self.root)

    def shown_path(self, path: Path) -> str:
        """Return a path below `root` for messages, as `where` does for `root`."""
        return f"{self.where}/{path.relative_to(self.root).as_posix()}"

    run_json = _Below("run.json")  # the record of the run: see run_record.py
    config_yaml = _Below("config.yaml")  # the resolved configuration, without secrets
    events_jsonl = _Below("events.jsonl")  # all events except log lines
    metrics_jsonl = _Below("metrics.jsonl")  # all logged numbers
    system_jsonl = _Below("system.jsonl")  # the use of hosts, ranks and GPUs
    logs_dir = _Below("logs")  # one log for each rank
    checkpoints_dir = _Below("checkpoints")  # one folder for each checkpoint, and the pointers latest and best
    artifacts_dir = _Below(ARTIFACTS)  # the files that ranks saved
    inputs_dir = _Below(INPUTS)  # what the driver has prepared for the ranks of every attempt
    tracking_dir = _Below(TRACKING)  # one folder for each tracker
    git_diff = _Below("git.diff")  # changes of the code that were not committed, without secrets
    lock_file = _Below("run.lock")  # the driver holds the lock for the life of the run, and touches the file
    driver_log = _Below("driver.log")  # what a detached driver printed
    decision_log = _Below("logs/ddptrain.log")  # ddptrain's own log of the run, for bug reports
    stop_json = _Below(".stop.json")  # a request to stop, until the driver has read it
    scratch_dir = _Below(".scratch")  # files of the embedded cluster, while the run is running

    def area(self, name: str) -> Path:
        """Return the folder of that name if ranks may save files in it. Raises UnsafePath otherwise."""
        if name not in (ARTIFACTS, TRACKING):
            raise UnsafePath(
                f'a rank asked for a file in "{shorten(name)}": it may write to {ARTIFACTS} and {TRACKING}'
            )
        return self.root / name

    def log(self, rank: int) -> Path:
        """Return the log of that rank."""
        return self.file(f"logs/rank-{rank}.log")

    def logs(self) -> dict[int, Path]:
        """Return the paths of the existing logs by rank, in the order of ranks; log(rank) also downloads one."""
        found = ((_LOG_NAME.fullmatch(name), name) for name in self.names_in("logs"))
        return dict(sorted((int(match[1]), self.root / "logs" / name) for match, name in found if match))

    def names_in(self, folder: str) -> dict[str, int]:
        """Return the files below a folder: path from there -> size in bytes."""
        top = self.root / folder
        return {path.relative_to(top).as_posix(): size_bytes for path, size_bytes in files_below(top)}

    def artifacts(self) -> dict[str, int]:
        """Return the files that ranks saved: path below artifacts/ -> size in bytes, in the order of paths."""
        found = sorted(self.names_in(ARTIFACTS).items())
        return {path: size_bytes for path, size_bytes in found if not PurePosixPath(path).name.startswith(INCOMING)}


def files_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the regular files below a folder, each with its size in bytes. Files that vanish are left out."""
    for place, _, names in os.walk(folder):  # Path.rglob raises if a folder vanishes
        for name in names:
            path = Path(place, name)
            with suppress(OSError):
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    yield path, state.st_size


def new_run_id(name: str, now: datetime | None = None) -> str:
    """Return a new `<name>-<UTC YYYYmmdd-HHMMSS>-<4 hex>`."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def valid_run_id(run_id: str) -> bool:
    """Return whether a run's folder can have that name, and no command gives the name another meaning."""
    return _RUN_ID.fullmatch(run_id) is not None and run_id.lower() not in (LATEST, BEST)


def check_run_id(run_id: str) -> None:
    """Check that a run's folder can have that name. Raises UsageError otherwise."""
    if not valid_run_id(run_id):
        raise UsageError(
            f'"{shorten(run_id)}" is not a run id: use up to 128 letters, digits, dots, dashes and underscores, '
            "not a reserved word such as latest"
        )


def step_name(step: int, number: int = 1) -> str:
    """Return the folder name of a step's checkpoint. number: 2 if the step is saved a second time.

    Raises UnsafePath for an invalid step.
    """
    name = f"step-{step}" if number == 1 else f"step-{step}.{number}"
    if not _STEP_NAME.fullmatch(name):
        raise UnsafePath(f"a checkpoint's step must be a number from 0 on, of at most 18 digits, not {step}")
    return name


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint folder's name, or None for another name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def newest_of_steps(names: Iterable[str]) -> dict[int, str]:
    """Return the name of the last folder of each step among the names of folders, the highest step first."""
    found = {(int(match[1]), int(match[2] or 1)): match[0] for match in map(_STEP_NAME.fullmatch, names) if match}
    return dict(sorted({step: found[step, number] for step, number in sorted(found)}.items(), reverse=True))


def checkpoint_folders(layout: RunLayout) -> list[Path]:
    """Return the folders of a run's checkpoints, the highest step first, damaged ones included."""
    if not layout.checkpoints_dir.is_dir():
        return []
    names = newest_of_steps(path.name for path in layout.checkpoints_dir.iterdir())
    return [layout.checkpoints_dir / name for name in names.values()]


def safe_relative(path: str) -> PurePosixPath:
    """Return a relative path that a rank has given, without "." and empty parts.

    Raises UnsafePath if it is absolute, contains `..`, or contains a name that is reserved, not printable or too long.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    problem = ""
    if path.startswith("/"):
        problem = "is absolute"
    elif not parts or path.endswith("/"):
        problem = "names a folder"
    elif not path.isprintable():
        problem = "holds a character that can't be printed"
    elif ".." in parts:
        problem = 'leaves the run directory with ".."'
    elif len(path.encode()) > _LONGEST_PATH_BYTES or any(len(part.encode()) > _LONGEST_NAME_BYTES for part in parts):
        problem = "is too long"
    elif any(part.startswith(INCOMING) for part in parts):
        problem = f"holds a name that begins with {INCOMING}"
    if problem:
        raise UnsafePath(
            f'cannot save a file as "{shorten(path)}": the path {problem}; use one like "samples/names.json"'
        )
    return PurePosixPath(*parts)


@dataclass(frozen=True, slots=True)
class Origin:
    """The run in a store of which a driver's working folder is a copy; token: of this driver's lease."""

    url: str
    token: str = ""

    def mark(self, folder: Path) -> None:
        """Write the mark into the folder. Raises ResultsError."""
        write_file(folder / ORIGIN, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


def origin_of(folder: Path) -> Origin | None:
    """Return the original of a working folder; None if the folder is an original itself."""
    try:
        raw = json.loads(read_bytes(folder / ORIGIN))
        return Origin(str(raw["url"]), str(raw["token"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
