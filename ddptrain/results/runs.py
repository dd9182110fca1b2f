"""The runs of a place: a folder of this machine (LocalRuns), or an object store (remote/stored_runs.py)."""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain import file_ops
from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import RunLocked, RunNotFound, UsageError
from ddptrain.log import Log
from ddptrain.results import ownership
from ddptrain.results.annotations import Annotations, Change, edit_folder
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import LATEST, PRUNED, files_below, valid_run_id
from ddptrain.results.run import Run, is_sweep
from ddptrain.results.secure_files import is_own_folder, write_file
from ddptrain.storage.store import is_url

if TYPE_CHECKING:
    from ddptrain.results.remote.uploader import Uploader

_LARGEST_CONFIG_BYTES = 1 << 20
_MOST_LISTED = 10
_TRIAL = re.compile(r"([^/]+)-\d{4,}(?:-s\d+)?")  # the run id of a trial begins with that of its sweep
_NUMBERED = re.compile(r"([^/]+)/(\d{1,9})")
_log = Log(__name__)


class Runs(ABC):
    """The runs of a place. Methods raise StoreError if the place is a store that fails.

    where: the folder or the URL, for messages. folder: in which a driver creates the folder of a new run.
    """

    where: str
    folder: Path

    @abstractmethod
    def inside(self, name: str) -> Runs:
        """Return the trials of a sweep."""

    @abstractmethod
    def list(self, kind: str = "", *, sizes: bool = False) -> list[Run]:
        """Return every run of that kind, newest first; sizes: the caller reads the size of each. Raises UsageError."""

    @abstractmethod
    def get(self, run_id: str) -> Run | None:
        """Return the run or sweep of that id; None if there is none."""

    @abstractmethod
    def claim(self, run_id: str, *, resumed: bool) -> AbstractContextManager[Uploader | None]:
        """Hold the run for the block; yield the upload of its working folder, which a run in a store has.

        Raises RunLocked; UsageError if the id is taken; ResultsError.
        """

    @abstractmethod
    def edit(self, run: str, change: Change) -> Annotations:
        """Change the tags and the note of a run; return them. Raises RunNotFound, ResultsError."""

    @abstractmethod
    def delete(self, chosen: Run) -> None:
        """Delete a run. A kill at any moment leaves no partial run: `leftovers` has the rest.

        chosen: the run as it was when the decision was made. Raises RunLocked, UsageError, ResultsError.
        """

    @abstractmethod
    def leftovers(self) -> dict[str, int]:
        """Return the sizes in bytes of runs whose deletion was interrupted, by their names."""

    @abstractmethod
    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises RunLocked, ResultsError."""

    def find(self, run: str) -> Run:
        """Return a run by its id, an unambiguous prefix, `latest`, a path, or SWEEP/7 for a trial.

        Raises RunNotFound, with a list of existing runs, if no run or more than one run matches.
        """
        if "\0" in run:
            raise RunNotFound("a run's name can't hold a NUL character")
        if "/" not in run and run not in ("", ".", ".."):
            if run == LATEST:
                if runs := self.list():
                    return runs[0]
                raise RunNotFound(
                    f"there is no run in {self.where} yet; start one with ddptrain train (--runs-dir: another folder)"
                )
            if (found := self._training(run) or self._trial(run)) is not None:
                return found
            matches = sorted(name for name in self.names() if name.startswith(run))
            if len(matches) == 1 and (found := self.get(matches[0])) is not None:
                return found
            if matches:
                raise RunNotFound(
                    f'"{shorten(run)}" matches {len(matches)} runs: {_first_names(matches)}; '
                    "give more characters of the name"
                )
        elif run and _is_run(Path(run)):
            return Run(Path(os.path.abspath(run)))
        elif (found := self._trial(run)) is not None:
            return found
        raise RunNotFound(self._why_not_found(run))

    def _training(self, run_id: str) -> Run | None:
        found = self.get(run_id) if valid_run_id(run_id) else None
        return None if found is None or found.is_sweep else found

    def _trial(self, name: str) -> Run | None:
        """Return a trial, given by its id or as SWEEP/7; None if it does not exist."""
        if numbered := _NUMBERED.fullmatch(name):
            name = f"{numbered[1]}-{int(numbered[2]):04d}"
        trial = _TRIAL.fullmatch(name)
        return self.inside(trial[1]).get(name) if trial and valid_run_id(trial[1]) and valid_run_id(name) else None

    def names(self) -> Iterable[str]:
        """Return the names of the folders of all runs but sweeps."""
        return [run.root.name for run in self.list()]

    def _why_not_found(self, run: str) -> str:
        if (about_sweep := self._about_sweep(run)) is not None:
            return about_sweep
        names = list(self.names())
        what = f'no run "{shorten(run)}" in {self.where}'
        if os.path.isdir(run):
            what += f', and the folder "{shorten(run)}" contains no run.json'
        if not names:
            return f"{what}, which contains no runs (--runs-dir names another folder)"
        match = nearest(run, names)
        newest = [each.run_id for each in self.list()]
        return f"{what}; " + (f"did you mean {match}?" if match else f"there are: {_first_names(newest)}")

    def _about_sweep(self, run: str) -> str | None:
        """Return the message for the name of a sweep, and for SWEEP/7 without that trial; None for other names."""
        numbered = _NUMBERED.fullmatch(run)
        for name in filter(None, (run, numbered and numbered[1])):
            sweep = self.get(name) if valid_run_id(name) else None
            if sweep is not None and sweep.is_sweep:
                inside = self.inside(name)
            elif is_sweep(Path(name)):
                inside = LocalRuns(Path(name))
            else:
                continue
            trials = sorted(inside.names())
            what = f'sweep "{shorten(name)}" has no trial {numbered[2]}' if numbered else f'"{shorten(run)}" is a sweep'
            return what + (f"; its trials are runs: {_first_names(trials)}" if trials else ", and no trial has begun")
        return None


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def open_runs_dir(place: str) -> Runs:
    """Return the runs of a folder, or of an object store for a URL such as s3://bucket/runs.

    Raises UsageError, StoreError.
    """
    if not is_url(place):
        return LocalRuns(Path(place))
    from ddptrain.results.remote.stored_runs import StoredRuns  # the clients of stores take a while to import
    from ddptrain.storage.object_store import open_folder

    store = open_folder(place)
    store.check()
    return StoredRuns(store)


def split_run(run: str, place: str) -> tuple[str, str]:
    """Return the runs directory and the name of a run: the parts of `run` if it is a URL, otherwise `place` and `run`.

    Raises RunNotFound if the URL has no name.
    """
    if not is_url(run):
        return place, run
    parent, _, name = run.rstrip("/").rpartition("/")
    if not name or not is_url(f"{parent}/") or parent.endswith(":/"):
        raise RunNotFound(f"{run} is not a run's address; give one like s3://bucket/runs/petnames-20250101-120000-ab12")
    return parent, name


def fetch_config(url: str) -> Path:
    """Return a local copy of a configuration file at a URL such as s3://bucket/runs/ID/best.yaml, of a sweep.

    Raises UsageError if there is no such file; StoreError, ResultsError.
    """
    from platformdirs import user_cache_path

    from ddptrain.storage.object_store import open_folder

    parent, _, name = url.rpartition("/")
    data = open_folder(parent).read(name, _LARGEST_CONFIG_BYTES) if name else None
    if data is None:
        raise UsageError(f"{shorten(url)}: there is no such file")
    digest = file_ops.sha256(url.encode()).hexdigest()[:16]
    folder = user_cache_path("ddptrain", appauthor=False) / "configs" / digest
    with results_errors(folder):
        file_ops.make_private(folder)
    write_file(folder / name, data)
    return folder / name


def _has_record(folder: Path) -> bool:
    return not folder.name.startswith(PRUNED) and os.path.isfile(f"{folder}/run.json")


def _is_run(folder: Path) -> bool:
    return _has_record(folder) and not is_sweep(folder)


class LocalRuns(Runs):
    """The runs in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    def inside(self, name: str) -> LocalRuns:
        """See Runs."""
        return LocalRuns(self.folder / name)

    def list(self, kind: str = "", *, sizes: bool = False) -> list[Run]:
        """See Runs. No runs if the folder does not exist."""
        try:
            folders = [path for path in self.folder.iterdir() if _has_record(path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            why = error.strerror
            raise UsageError(f"cannot list runs in {self.folder}: {why}; choose another with --runs-dir") from error
        return sorted((run for run in map(Run, folders) if run.kind == kind), key=lambda run: run.age, reverse=True)

    def names(self) -> Iterable[str]:
        """See Runs."""
        return [path.name for path in file_ops.entries(self.folder) if _is_run(path)]

    def get(self, run_id: str) -> Run | None:
        """See Runs."""
        return Run(self.folder / run_id) if _has_record(self.folder / run_id) else None

    @contextmanager
    def claim(self, run_id: str, *, resumed: bool) -> Iterator[None]:
        """See Runs: RunWriter takes the lock of the folder."""
        yield None

    def edit(self, run: str, change: Change) -> Annotations:
        """See Runs."""
        return edit_folder(self.find(run).root, change)

    def delete(self, chosen: Run) -> None:
        """See Runs. The folder is renamed to `.pruned-RUN-TOKEN` first, which all readers ignore."""
        folder = chosen.root
        aside = folder.with_name(f"{PRUNED}{folder.name[:100]}-{os.urandom(4).hex()}")
        try:
            owner = ownership.LockFile(chosen.lock_file).take()  # so that no driver can resume it
        except ResultsError:
            if not folder.is_dir():  # another prune was faster
                raise RunLocked(f"run {folder.name} was deleted already") from None
            raise
        try:
            now = Run(folder, is_ours=True)
            if (now.status, now.record.driver, now.problem) != (chosen.status, chosen.record.driver, ""):
                raise RunLocked(f"run {chosen.run_id} has changed since it was chosen: it is {now.shown_status}")
            with results_errors(folder, "move"):
                file_ops.publish(folder, aside)
            _log.info("run moved aside", run=folder.name, folder=aside)
            LocalRuns(folder.parent).finish(aside.name)  # of a trial that of the sweep
        finally:
            owner.release()

    def leftovers(self) -> dict[str, int]:
        """See Runs."""
        folders = [path for path in file_ops.entries(self.folder) if path.name.startswith(PRUNED)]
        own = [path for path in sorted(folders) if not path.is_symlink() and is_own_folder(path)]
        return {path.name: sum(size for _, size in files_below(path)) for path in own}

    def finish(self, name: str) -> None:
        """See Runs."""
        folder = self.folder / name
        with results_errors(folder, "delete"):
            while folder.exists():
                with suppress(FileNotFoundError):  # another prune deletes it at the same time
                    shutil.rmtree(folder)
