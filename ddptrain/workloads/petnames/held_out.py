"""The names to evaluate on: those that a run held out, or all names of another source. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError
from ddptrain.file_ops import read_regular, write_atomic
from ddptrain.workloads.held_out import HeldOut, digest_of
from ddptrain.workloads.petnames.names import clean_names, load_names
from ddptrain.workloads.petnames.params import PetnamesParams

NAMES_FILE = "names.json"  # in artifacts/ of a run, and in the inputs of an evaluation
_MOST_CHARACTERS = 1000


def prepare(request: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
    """Write the names of the run `request["run"]`, or of the source `request["data"]`, into `folder`.

    Raises UsageError if there are none, or they cannot be read.
    """
    names = _names_of_source(request) if request["data"] else held_out_names(Path(request["run"]))
    write_atomic(folder / NAMES_FILE, json.dumps(names).encode())
    HeldOut(digest_of({"names": names}), len(names), "names").write(folder)
    tell(f"{len(names):,} names to evaluate on")


def held_out_names(run_dir: Path) -> list[str]:
    """Return the names that a run held out. Raises UsageError if it has none."""
    path = run_dir / "artifacts" / NAMES_FILE
    try:
        entries = json.loads(read_regular(path))["held_out"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"can't read the names that {run_dir.name} held out: {path}: {type(error).__name__}: {error}; "
            "name others with --data"
        ) from error
    names = _clean(entries if isinstance(entries, list) else [])
    if not names:
        raise UsageError(
            f"{run_dir.name} held out no names (params.val_fraction): name a list of names with --data, or train with "
            "params.val_fraction above 0"
        )
    return names


def read_names(folder: Path) -> list[str]:
    """Return the names that `prepare` has written."""
    return [str(name) for name in json.loads((folder / NAMES_FILE).read_bytes())]


def _names_of_source(request: Mapping[str, Any]) -> list[str]:
    params = PetnamesParams.model_validate_json(json.dumps(request["params"]), strict=True)
    return _clean(load_names(params.model_copy(update={"names": request["data"]})).names)


def _clean(entries: Sequence[object]) -> list[str]:
    return sorted(clean_names(entries, max_length=_MOST_CHARACTERS).names)
