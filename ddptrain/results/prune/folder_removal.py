"""Deletes runs in a folder of this machine, so that a kill at any moment leaves no partial run.

1. The lock of the run is taken, so that no driver can resume it.
2. A mark file in the run directory names the folder of step 3. Only a marked folder is ever deleted: in a folder that
   others may write to, another user could give such a name to a run that must stay.
3. The run directory is renamed to `.pruned-RUN-TOKEN`, which all readers ignore. From now on the run does not exist.
4. Its files are deleted. If the process dies before the end, the next prune finds the folder and continues.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddptrain import file_ops
from ddptrain.errors import RunLocked, RunNotFound
from ddptrain.log import Log
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import PRUNED, RunLayout, files_below
from ddptrain.results.lookup import RunView, find_checkpoint, load_run
from ddptrain.results.ownership import run_lock
from ddptrain.results.prune.policy import RunFacts
from ddptrain.results.run_store import LocalRuns
from ddptrain.results.secure_files import FolderIdentity, is_own_folder, read_bytes, write_file

MARK = ".pruned.json"
_log = Log(__name__)


class FolderRemoval:
    """The runs of a folder of this machine, for `prune`."""

    def __init__(self, runs: LocalRuns) -> None:
        self._folder = runs.folder

    def facts(self, view: RunView, age_s: float) -> RunFacts:
        """Return the facts by which the policy decides about a run; `age_s`: seconds since its end."""
        folder = view.layout.root
        foreign = "" if is_own_folder(folder) else "of another user"
        return RunFacts(
            folder=folder.name,
            run_id=view.run_id,
            name=view.record.name,
            status=view.status,
            age_s=age_s,
            size_bytes=folder_bytes(folder),
            has_checkpoint=_has_checkpoint(view.layout),
            foreign="a symbolic link" if folder.is_symlink() else foreign,
            problem=view.problem,
        )

    def remove(self, chosen: RunView) -> None:
        """Delete a run directory.

        chosen: the run as it was when the decision was made.

        Raises RunLocked; ResultsError: either nothing is deleted, or the rest is in a folder that readers ignore.
        """
        folder = chosen.layout.root
        aside = folder.with_name(f"{PRUNED}{folder.name[:100]}-{secrets.token_hex(4)}")
        with _locked(chosen.layout):
            _refuse_if_changed(chosen)
            identity = FolderIdentity.of(folder)
            write_file(folder / MARK, json.dumps({"folder": aside.name}).encode())
            identity.check()
            with results_errors(folder, "move"):
                file_ops.publish(folder, aside)
            _log.info("run moved aside", run=folder.name, folder=aside)
            _delete(aside, FolderIdentity(aside, identity.device, identity.inode))

    def leftovers(self) -> list[tuple[str, int]]:
        """Return the folders, with their sizes in bytes, of runs whose deletion was interrupted."""
        try:
            folders = [path for path in self._folder.iterdir() if path.name.startswith(PRUNED)]
        except OSError:
            return []
        return [(path.name, folder_bytes(path)) for path in sorted(folders) if _is_marked(path)]

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises ResultsError."""
        leftover = self._folder / name
        try:
            _delete(leftover, FolderIdentity.of(leftover))
        except ResultsError:
            if leftover.exists():  # otherwise another prune was faster
                raise


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder in bytes."""
    return sum(size for _, size in files_below(folder))


def _has_checkpoint(layout: RunLayout) -> bool:
    try:
        find_checkpoint(layout)
    except (RunNotFound, OSError):
        return False
    return True


@contextmanager
def _locked(layout: RunLayout) -> Iterator[None]:
    try:
        descriptor = run_lock.take(layout.lock_file)
    except ResultsError:
        if not layout.root.is_dir():  # another prune was faster
            raise RunLocked(f"run {layout.root.name} was deleted already") from None
        raise
    try:
        yield
    finally:
        os.close(descriptor)


def _refuse_if_changed(chosen: RunView) -> None:
    """Raise RunLocked unless the run has ended and has not changed since it was chosen."""
    now = load_run(chosen.layout.root, is_ours=True)
    if (now.status, now.record.driver, now.problem) != (chosen.status, chosen.record.driver, ""):
        raise RunLocked(f"run {chosen.run_id} has changed since it was chosen: it is {now.shown_status}")


def _is_marked(folder: Path) -> bool:
    if folder.is_symlink() or not is_own_folder(folder):
        return False
    try:
        return bool(json.loads(read_bytes(folder / MARK))["folder"] == folder.name)
    except FileNotFoundError:
        return _is_empty(folder)  # the mark is deleted last
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:  # another prune was faster
        return False


def _delete(folder: Path, identity: FolderIdentity) -> None:
    """Delete a folder, the mark last. Raises ResultsError.

    The files are deleted through a descriptor of the folder, so that nothing else is deleted if another process puts a
    different folder there.
    """
    with results_errors(folder, "delete"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # another prune was faster
            return
        try:
            state = os.fstat(descriptor)
            if (state.st_dev, state.st_ino) != (identity.device, identity.inode):
                raise ResultsError(f"cannot delete {folder}: another process has put a different folder there")
            names = os.listdir(descriptor)
            for name in sorted(names, key=lambda each: (each == MARK, each != "run.json")):
                _delete_entry(name, descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileNotFoundError):
            folder.rmdir()


def _delete_entry(name: str, parent: int) -> None:
    """Delete an entry of the folder with the descriptor `parent`. Another prune may delete it at the same time."""
    while True:
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                shutil.rmtree(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                os.lstat(name, dir_fd=parent)
                continue  # a file below it has vanished: delete the rest
        return
