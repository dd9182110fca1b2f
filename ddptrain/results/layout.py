"""The names of runs, of their files and checkpoints, and the paths that ranks may write to."""

from __future__ import annotations

import dataclasses
import json
import os
import re
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
WANDB = "wandb"
RECORDED = f"{TRACKING}/{WANDB}"  # what W&B has recorded

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP_NAME = re.compile(r"step-(\d{1,18})(?:\.(\d{1,6}))?")
_LONGEST_NAME_BYTES = 200  # file systems allow 255; temporary names are longer
_LONGEST_PATH_BYTES = 1000
ORIGIN = ".store.json"


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
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


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


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder `checkpoints` of a run, the highest step first, damaged ones included."""
    if not folder.is_dir():
        return []
    return [folder / name for name in newest_of_steps(path.name for path in folder.iterdir()).values()]


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
