"""The checkpoints of a run in an object store: upload and download. One exists there as soon as its manifest exists.

Its objects have the names of the files in its folder, and are not changed any more. Earlier versions overwrote a step
that was saved again: `stored_as` in their manifests names the objects of other names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ddptrain.errors import RunNotFound
from ddptrain.results.checkpoints.verification import Manifest, parse_manifest, verify
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, LATEST, MANIFEST, checkpoint_folders, newest_of_steps, step_of
from ddptrain.results.secure_files import write_file
from ddptrain.storage.store import Store

CHECKPOINTS = "checkpoints"
OUTGOING = ".outgoing"


# --- Upload ---


class StoredCheckpoints:
    """Uploads the checkpoints of the working folder, and deletes those that the folder no longer has.

    Other threads may change the working folder at the same time.
    """

    def __init__(self, store: Store, root: Path, before_manifest: Callable[[], object]) -> None:
        """root: the working folder. before_manifest: called when a checkpoint lacks only its manifest."""
        self._store, self._root, self._folder = store, root, root / CHECKPOINTS
        self._before_manifest = before_manifest
        self._stored: set[str] | None = None  # the folders of complete checkpoints in the store
        self._objects: set[str] = set()
        self._pointers: dict[str, bytes] = {}
        self._uploads = 0

    def sync(self) -> bool:
        """Upload one new checkpoint and the pointers, and delete what the folder no longer has.

        Returns whether there was a new one. Raises StoreError.
        """
        if self._stored is None:
            self._objects = set(self._store.files(CHECKPOINTS))
            found = _manifests(self._store, self._objects)
            self._stored = {name for name, each in found.items() if _objects(name, each).keys() <= self._objects}
        if (name := self._next()) is not None:
            self._upload(name)
        self._update_pointers()
        self._prune()
        return name is not None

    @property
    def is_synced(self) -> bool:
        """Whether every checkpoint of the folder is in the store, and `latest` and `best` are the same there."""
        complete = self._local() <= (self._stored or set())
        return complete and all(self._pointers.get(name, b"") == self._pointer(name) for name in (LATEST, BEST))

    def _local(self) -> set[str]:
        return {folder.name for folder in checkpoint_folders(self._folder) if (folder / MANIFEST).is_file()}

    def _next(self) -> str | None:
        """Return the checkpoint to upload next: the newest, every second time the best; None if none is left."""
        left = self._local() - (self._stored or set())
        best = _name_in(self._pointer(BEST))
        self._uploads += 1
        return best if best in left and self._uploads % 2 == 0 else next(iter(newest_of_steps(left).values()), None)

    def _upload(self, name: str) -> None:
        """Upload a checkpoint: files first, then the manifest."""
        with _linked_files(self._root, name) as folder:
            if folder is None:
                return  # deleted meanwhile
            for file in sorted(os.listdir(folder), key=MANIFEST.__eq__):
                if file == MANIFEST:
                    self._before_manifest()
                self._store.write(f"{CHECKPOINTS}/{name}/{file}", folder / file)
                self._objects.add(f"{CHECKPOINTS}/{name}/{file}")
        if self._stored is not None:
            self._stored.add(name)

    def _pointer(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return b""

    def _update_pointers(self) -> None:
        for name in (LATEST, BEST):
            data = self._pointer(name)
            if data != self._pointers.get(name) and _name_in(data) in (self._stored or ()):
                self._store.write(f"{CHECKPOINTS}/{name}", data)
            elif not data and self._pointers.get(name, b"?"):
                self._store.remove(f"{CHECKPOINTS}/{name}")
            else:
                continue
            self._pointers[name] = data

    def _prune(self) -> None:
        """Delete checkpoints that the folder no longer has.

        The last complete checkpoint stays, and so do those to which `latest` and `best` point.
        """
        stored, local = self._stored or set(), self._local()
        if not stored & local:
            return
        kept = {*local, *map(_name_in, self._pointers.values())}
        # The manifests first: without a manifest there is no checkpoint.
        for path in sorted(self._objects, key=lambda path: not path.endswith(f"/{MANIFEST}")):
            name = path.split("/")[1]
            if step_of(name) is not None and name not in kept:
                self._store.remove(path)
                self._objects.discard(path)
                stored.discard(name)


@contextmanager
def _linked_files(root: Path, name: str) -> Iterator[Path | None]:
    """Yield a folder with hard links to the files of a checkpoint, so that they stay if the checkpoint is deleted.

    Yields None if the checkpoint does not exist any more.
    """
    source, target = root / CHECKPOINTS / name, root / OUTGOING / name
    shutil.rmtree(target, ignore_errors=True)
    try:
        with results_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copytree(source, target, copy_function=_link)
        except OSError:
            if source.exists():
                raise
            yield None
        else:
            yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


# --- Download ---


def download_newest(run: Store, paths: Iterable[str], folder: Path) -> None:
    """Download checkpoints, the newest first, up to the first one that matches its manifest.

    Of older checkpoints only the manifests are downloaded, so that `checkpoint.keep` counts and later deletes them; a
    damaged one stays, and is skipped as in a local run. Raises ResultsError, StoreError.
    """
    wanted = True
    for name, manifest in _manifests(run, paths).items():
        if wanted:
            with suppress(CheckpointDamaged):
                _fetch(run, folder, name, manifest)
                wanted = False
        _write_manifest(folder, name, manifest)


def download_checkpoints(run: Store, folder: Path) -> None:
    """Download the checkpoints that match their manifests.

    One that the folder has already is not downloaded again. Raises ResultsError, StoreError.
    """
    for name, manifest in _manifests(run, run.files(CHECKPOINTS)).items():
        try:
            _fetch(run, folder, name, manifest)
        except CheckpointDamaged:
            shutil.rmtree(folder / CHECKPOINTS / name, ignore_errors=True)


def download_model(run: Store, folder: Path, paths: Iterable[str], which: str = BEST) -> Path:
    """Download a checkpoint, unless the folder has it: best (or else the newest), latest, or a name such as step-100.

    Return its folder.

    Raises RunNotFound if there is none; ResultsError, StoreError.
    """
    manifests = _manifests(run, paths)
    if not manifests:
        raise RunNotFound(f"run {folder.name} has no checkpoint in {run.url}")
    names = newest_of_steps(manifests)
    if (step := step_of(which)) is None:
        pointed = (_name_in(run.read(f"{CHECKPOINTS}/{name}") or b"") for name in dict.fromkeys((which, LATEST)))
        name = next((each for each in pointed if each in manifests), next(iter(manifests)))
    elif step in names:
        name = names[step]
    else:
        there = ", ".join(reversed(names.values()))
        raise RunNotFound(f"run {folder.name} has no checkpoint {which} in {run.url}; it has {there}")
    if not _is_here(folder, name, manifests[name]):
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    try:
        _fetch(run, folder, name, manifests[name])
    except CheckpointDamaged:
        shutil.rmtree(folder / CHECKPOINTS / name, ignore_errors=True)
        raise
    for pointer in (BEST, LATEST):
        write_file(folder / CHECKPOINTS / pointer, f"{name}\n".encode())
    return folder / CHECKPOINTS / name


def _fetch(run: Store, folder: Path, name: str, manifest: Manifest) -> None:
    """Download a checkpoint's files and its manifest, and compare them, unless the folder has it.

    Raises CheckpointDamaged; StoreError.
    """
    if _is_here(folder, name, manifest):
        return
    there = run.files(f"{CHECKPOINTS}/{name}")
    for path, file in _objects(name, manifest).items():
        if path in there:
            run.fetch(path, folder / CHECKPOINTS / name / file)
    _write_manifest(folder, name, manifest)
    verify(folder / CHECKPOINTS / name)


def _is_here(folder: Path, name: str, manifest: Manifest) -> bool:
    with suppress(OSError):
        local = parse_manifest((folder / CHECKPOINTS / name / MANIFEST).read_bytes())
        return local == {key: value for key, value in manifest.items() if key != "stored_as"}
    return False


def _write_manifest(folder: Path, name: str, manifest: Manifest) -> None:
    target = folder / CHECKPOINTS / name / MANIFEST
    with results_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    without = {key: value for key, value in manifest.items() if key != "stored_as"}
    write_file(target, (json.dumps(without, indent=2) + "\n").encode())


def _manifests(run: Store, paths: Iterable[str]) -> dict[str, Manifest]:
    """Return the manifests of a run's checkpoints by folder, the highest step first."""
    folders = (path.split("/")[1] for path in paths if path.startswith(f"{CHECKPOINTS}/") and path.endswith(MANIFEST))
    found = run.read_all([f"{CHECKPOINTS}/{name}/{MANIFEST}" for name in newest_of_steps(folders).values()])
    manifests = {path.split("/")[1]: parse_manifest(data) for path, data in found.items()}
    return {name: manifest for name, manifest in manifests.items() if manifest is not None}


def _objects(name: str, manifest: Manifest) -> dict[str, str]:
    """Return the objects of a checkpoint's files: path -> name of the file."""
    stored_as: Mapping[str, str] = manifest.get("stored_as", {})
    files = (file["name"] for file in manifest["files"])
    return {f"{CHECKPOINTS}/{name}/{stored_as.get(file, file)}": file for file in files}


def _name_in(pointer: bytes) -> str:
    """Return the folder that a pointer names; "" if it names none."""
    name = pointer.decode(errors="replace").strip()
    return name if step_of(name) is not None else ""
