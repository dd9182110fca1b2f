"""The checkpoints of a run in an object store: upload and download. One exists there as soon as its manifest exists."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddptrain.errors import RunNotFound
from ddptrain.results.checkpoints.verification import Manifest, parse_manifest, verify
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, LATEST, MANIFEST, RunLayout, checkpoint_folders, step_name, step_of
from ddptrain.results.secure_files import write_file
from ddptrain.storage.store import Store

CHECKPOINTS = "checkpoints"
OUTGOING = ".outgoing"


# --- Upload ---


class StoredCheckpoints:
    """Uploads the checkpoints of the working folder, and deletes those that the folder no longer has.

    Other threads may change the working folder at the same time.
    """

    def __init__(self, store: Store, layout: RunLayout) -> None:
        self._store = store
        self._layout = layout
        self._stored: dict[int, Manifest] | None = None  # step -> manifest of a complete checkpoint in the store
        self._objects: set[str] = set()
        self._pointers: dict[str, bytes] = {}
        self._uploads = 0

    def sync(self, before_upload: Callable[[], object]) -> bool:
        """Upload one new checkpoint and the pointers, and delete what the folder no longer has.

        before_upload: called before the new checkpoint is uploaded. Returns whether there was one. Raises StoreError.
        """
        if self._stored is None:
            self._list_store()
        if (step := self._next_step()) is not None:
            before_upload()
            self._upload(step)
        self._update_pointers()
        self._prune()
        return step is not None

    @property
    def is_synced(self) -> bool:
        """Whether every checkpoint of the folder is in the store, and `latest` and `best` are the same there."""
        stored = self._stored or {}
        complete = all(_same(manifest, stored.get(step)) for step, manifest in self._local().items())
        return complete and all(self._pointers.get(name, b"") == self._pointer(name) for name in (LATEST, BEST))

    def _list_store(self) -> None:
        self._objects = set(self._store.files(CHECKPOINTS))
        found = _manifests(self._store, self._objects)
        self._stored = {step: each for step, each in found.items() if _objects_of(step, each) <= self._objects}

    def _local(self) -> dict[int, Manifest]:
        manifests = {}
        for folder in checkpoint_folders(self._layout):
            with suppress(OSError):
                if manifest := parse_manifest((folder / MANIFEST).read_bytes()):
                    manifests[int(folder.name.removeprefix("step-"))] = manifest
        return manifests

    def _next_step(self) -> int | None:
        """Return the step to upload next: the newest, every second time the best; None if none is left."""
        stored = self._stored or {}
        left = [step for step, local in self._local().items() if not _same(local, stored.get(step))]
        best = _step_in(self._pointer(BEST))
        self._uploads += 1
        return best if best in left and self._uploads % 2 == 0 else max(left, default=None)

    def _upload(self, step: int) -> None:
        """Upload a checkpoint: files first, then the manifest. An object that a manifest names is not overwritten."""
        assert self._stored is not None
        with _linked_files(self._layout, step) as folder:
            manifest = parse_manifest((folder / MANIFEST).read_bytes()) if folder else None
            if folder is None or manifest is None:
                return  # deleted meanwhile
            before: Mapping[str, Any] = self._stored.get(step, {})
            names = _object_names(manifest, before)
            for name, stored_as in names.items():
                if (path := _path(step, stored_as)) not in _objects_of(step, before):
                    self._store.write(path, folder / name)
                    self._objects.add(path)
        renamed = {name: stored_as for name, stored_as in names.items() if name != stored_as}
        text = json.dumps({**manifest, **({"stored_as": renamed} if renamed else {})}, indent=2) + "\n"
        self._store.write(_path(step, MANIFEST), text.encode())
        self._objects.add(_path(step, MANIFEST))
        self._stored[step] = {**manifest, "stored_as": renamed}
        self._remove(_objects_of(step, before) - _objects_of(step, self._stored[step]))

    def _pointer(self, name: str) -> bytes:
        try:
            return (self._layout.checkpoints_dir / name).read_bytes()
        except OSError:
            return b""

    def _update_pointers(self) -> None:
        for name in (LATEST, BEST):
            data = self._pointer(name)
            if data != self._pointers.get(name) and _step_in(data) in (self._stored or {}):
                self._store.write(f"{CHECKPOINTS}/{name}", data)
                self._pointers[name] = data
            elif not data and self._pointers.get(name, b"?"):
                self._store.remove(f"{CHECKPOINTS}/{name}")
                self._pointers[name] = data

    def _prune(self) -> None:
        """Delete checkpoints that the folder no longer has.

        The last complete checkpoint stays, and so do those to which `latest` and `best` point.
        """
        stored, local = self._stored or {}, self._local()
        if not any(_same(manifest, stored.get(step)) for step, manifest in local.items()):
            return
        kept_steps = {*local, *map(_step_in, self._pointers.values()), None}
        dropped = sorted(path for path in self._objects if step_of(path.split("/")[1]) not in kept_steps)
        # The manifests first: without a manifest there is no checkpoint.
        self._remove(sorted(dropped, key=lambda path: not path.endswith(f"/{MANIFEST}")))
        for path in dropped:
            stored.pop(step_of(path.split("/")[1]) or 0, None)

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._store.remove(path)
            self._objects.discard(path)


@contextmanager
def _linked_files(layout: RunLayout, step: int) -> Iterator[Path | None]:
    """Yield a folder with hard links to the files of a checkpoint, so that they stay if the checkpoint is deleted.

    Yields None if the checkpoint does not exist any more.
    """
    target = layout.root / OUTGOING / step_name(step)
    shutil.rmtree(target, ignore_errors=True)
    try:
        with results_errors(target):
            target.mkdir(parents=True)
        yield target if _link_files(layout.checkpoints_dir / step_name(step), target) else None
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _link_files(source: Path, target: Path) -> bool:
    try:
        # By descriptor: the folder may be replaced by another one between two files.
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        for name in os.listdir(folder):
            try:
                os.link(name, target / name, src_dir_fd=folder)
            except FileNotFoundError:
                return False
            except OSError:  # a file system without links
                shutil.copyfile(f"/proc/self/fd/{folder}/{name}", target / name)
    finally:
        os.close(folder)
    return (target / MANIFEST).exists()


# --- Download ---


def download_newest(run: Store, paths: Iterable[str], folder: Path, warn: Callable[[str], None]) -> None:
    """Download the newest checkpoint that matches its manifest; `warn` is called for each damaged one.

    Of older checkpoints only the manifests are downloaded, so that `checkpoint.keep` counts and later deletes them.
    Raises ResultsError, StoreError.
    """
    manifests = _manifests(run, paths)
    for step in sorted(manifests, reverse=True):
        try:
            _fetch(run, folder, step, manifests[step])
        except CheckpointDamaged as error:
            warn(f"checkpoint {step_name(step)} of {run.url} is skipped: {error}")
            continue
        for other in sorted(manifests):
            if other < step:
                _write_manifest(folder, other, manifests[other])
        return


def download_checkpoints(run: Store, folder: Path) -> None:
    """Download the checkpoints that match their manifests.

    One that the folder has already is not downloaded again. Raises ResultsError, StoreError.
    """
    for step, manifest in _manifests(run, run.files(CHECKPOINTS)).items():
        with suppress(CheckpointDamaged):
            _fetch(run, folder, step, manifest)


def download_model(run: Store, folder: Path, paths: Iterable[str], which: str = BEST) -> None:
    """Download a checkpoint, unless the folder has it: best (or else the newest), latest, or a name such as step-100.

    Raises RunNotFound if there is none; ResultsError, StoreError.
    """
    manifests = _manifests(run, paths)
    if not manifests:
        raise RunNotFound(f"run {folder.name} has no checkpoint in {run.url}")
    step = step_of(which)
    if step is None:
        pointed = (_step_in(run.read(f"{CHECKPOINTS}/{name}") or b"") for name in dict.fromkeys((which, LATEST)))
        step = next((each for each in pointed if each is not None and each in manifests), max(manifests))
    elif step not in manifests:
        steps = ", ".join(step_name(step) for step in sorted(manifests))
        raise RunNotFound(f"run {folder.name} has no checkpoint {which} in {run.url}; it has {steps}")
    if not _is_here(folder, step, manifests[step]):
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    _fetch(run, folder, step, manifests[step])
    for name in (BEST, LATEST):
        write_file(folder / CHECKPOINTS / name, f"{step_name(step)}\n".encode())


def _fetch(run: Store, folder: Path, step: int, manifest: Manifest) -> None:
    """Download a checkpoint's files, then its manifest, and compare them, unless the folder has it.

    Raises CheckpointDamaged, and then the folder does not have it; StoreError.
    """
    if _is_here(folder, step, manifest):
        return
    target = folder / CHECKPOINTS / step_name(step)
    files = run.files(f"{CHECKPOINTS}/{step_name(step)}")
    try:
        for file in manifest["files"]:
            path = _path(step, _stored_name(manifest, file["name"]))
            if path not in files:
                raise CheckpointDamaged(f"{path} is missing")
            run.fetch(path, target / file["name"])
        _write_manifest(folder, step, manifest)
        verify(target)
    except CheckpointDamaged:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _is_here(folder: Path, step: int, manifest: Manifest) -> bool:
    try:
        local = json.loads((folder / _path(step, MANIFEST)).read_bytes())
    except (OSError, ValueError):
        return False
    return _same(manifest, local)


def _write_manifest(folder: Path, step: int, manifest: Manifest) -> None:
    target = folder / _path(step, MANIFEST)
    with results_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, (json.dumps(_without_stored_as(manifest), indent=2) + "\n").encode())


# --- Manifests and paths in a store ---


def _manifests(run: Store, paths: Iterable[str]) -> dict[int, Manifest]:
    """Return the manifests of a run's checkpoints, by step."""
    steps = {}
    for path in paths:
        top, _, rest = path.partition("/")
        if top == CHECKPOINTS and (step := step_of(rest.removesuffix(f"/{MANIFEST}"))) is not None:
            steps[path] = step
    manifests = {steps[path]: parse_manifest(data) for path, data in run.read_all(list(steps)).items()}
    return {step: manifest for step, manifest in manifests.items() if manifest is not None}


def _stored_name(manifest: Mapping[str, Any], name: str) -> str:
    """Return the name of the object that contains the file, in the folder of the manifest in the store."""
    return str(manifest.get("stored_as", {}).get(name, name))


def _without_stored_as(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest as it is in a run directory."""
    return {key: value for key, value in manifest.items() if key != "stored_as"}


def _object_names(manifest: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """Return file name -> object name; the names differ if an object of the file's name has different content.

    before: the manifest of that step in the store; empty if there is none.
    """
    taken = {_stored_name(before, file["name"]): file["sha256"] for file in before.get("files", ())}
    names = {}
    for file in manifest["files"]:
        plain, special = file["name"], f"{file['name']}.{file['sha256'][:8]}"
        names[plain] = plain if taken.get(plain, file["sha256"]) == file["sha256"] else special
    return names


def _objects_of(step: int, manifest: Mapping[str, Any]) -> set[str]:
    return {_path(step, _stored_name(manifest, file["name"])) for file in manifest.get("files", ())}


def _path(step: int, name: str) -> str:
    return f"{CHECKPOINTS}/{step_name(step)}/{name}"


def _same(one: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    return other is not None and _without_stored_as(one) == _without_stored_as(other)


def _step_in(pointer: bytes) -> int | None:
    return step_of(pointer.decode(errors="replace").strip())
