"""Changes the annotations of a run. The driver may be working, and other users may change them at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import wait_for_lock
from ddptrain.results.annotations.annotations import FILE, Annotations, read_annotations
from ddptrain.results.errors import results_errors
from ddptrain.results.remote.local_copy import origin_of
from ddptrain.results.secure_files import open_to_lock, require_own_folder, write_file
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import NoConditionalWrites, WriteConflict

Change = Callable[[Annotations], Annotations]
_LOCK = f".{FILE}.lock"
_MOST_CONFLICTS = 20


def edit_folder(folder: Path, change: Change) -> Annotations:
    """Change the annotations of the run in a local folder; return the new ones.

    Raises UsageError if the folder is a local copy of a run in a store; ResultsError.
    """
    if (origin := origin_of(folder)) is not None:
        raise UsageError(f"{folder} is a copy; give the run's address, {origin.url}")
    require_own_folder(folder)
    descriptor = open_to_lock(folder / _LOCK)
    try:
        with results_errors(folder / _LOCK, "lock"):
            wait_for_lock(descriptor)
        changed = change(read_annotations(folder))
        write_file(folder / FILE, changed.to_json())
        return changed
    finally:
        os.close(descriptor)


def edit_stored(run: RemoteFolder, change: Change) -> Annotations:
    """Change the annotations of a run in a store; return the new ones.

    If several processes change them at once, no change is lost, unless the store has no conditional writes: then the
    last one wins.

    Raises ClusterError, StoreError.
    """
    for _ in range(_MOST_CONFLICTS):
        try:
            before = run.read_versioned(FILE)
            changed = change(Annotations.parse(before.data if before is not None else None))
            run.write_versioned(FILE, changed.to_json(), before)
        except WriteConflict:
            continue
        except NoConditionalWrites:
            changed = change(Annotations.parse(run.read(FILE)))
            run.write(FILE, changed.to_json())
        return changed
    raise ClusterError(f"{run.url}/{FILE} was changed by other processes {_MOST_CONFLICTS} times in a row: try again")
