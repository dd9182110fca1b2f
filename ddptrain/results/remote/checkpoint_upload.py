"""Uploads a run's checkpoints to an object store. A checkpoint exists there as soon as its manifest exists."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddptrain.results.checkpoints.verification import is_plain_name, parse_manifest
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import BEST, LATEST, MANIFEST, RunLayout, checkpoint_folders, step_name, step_of
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreError

CHECKPOINTS = "checkpoints"
OUTGOING = ".outgoing"
# In the store's manifest: file name -> name of the object that contains the file, if the names differ.
STORED_AS = "stored_as"


class StoredCheckpoints:
    """Uploads the checkpoints of the working folder, and deletes those that the folder no longer has.

    Other threads may change the working folder at the same time.
    """

    def __init__(self, store: RemoteFolder, layout: RunLayout) -> None:
        self._store = store
        self._layout = layout
        self._stored: dict[int, dict[str, Any]] | None = None  # step -> manifest of a complete checkpoint in the store
        self._objects: set[str] = set()
        self._pointers: dict[str, bytes] = {}
        self._uploads = 0

    def sync(self, before_upload: Callable[[], None]) -> int:
        """Upload one new checkpoint and the pointers, and delete what the folder no longer has; return how many it was.

        Raises StoreError.

        before_upload: called before the new checkpoint is uploaded.
        """
        if self._stored is None:
            self._list_store()
        if (step := self._next_step()) is not None:
            before_upload()
            self._upload(step)
        self._update_pointers()
        self._prune()
        return 0 if step is None else 1

    @property
    def is_synced(self) -> bool:
        """Whether every checkpoint of the folder is in the store, and `latest` and `best` are the same there."""
        stored = self._stored or {}
        whole = all(_same(manifest, stored.get(step)) for step, manifest in self._local().items())
        return whole and all(self._pointers.get(name, b"") == self._pointer(name) for name in (LATEST, BEST))

    def _list_store(self) -> None:
        self._objects = set(self._store.files(CHECKPOINTS))
        manifests = [path for path in self._objects if path.endswith(f"/{MANIFEST}")]
        stored = {}
        for path, data in self._store.read_all(manifests).items():
            step, manifest = step_of(path.split("/")[1]), parse_stored(data)
            if step is not None and manifest and _objects_of(step, manifest) <= self._objects:
                stored[step] = manifest
        self._stored = stored

    def _local(self) -> dict[int, dict[str, Any]]:
        manifests = {}
        for folder in checkpoint_folders(self._layout):
            with suppress(OSError):
                if manifest := parse_stored((folder / MANIFEST).read_bytes()):
                    manifests[int(folder.name.removeprefix("step-"))] = manifest
        return manifests

    def _next_step(self) -> int | None:
        """Return the step to upload next: the newest, every second time the best; None if none is left."""
        stored = self._stored or {}
        left = [step for step, local in self._local().items() if not _same(local, stored.get(step))]
        best = _step_in(self._pointer(BEST))
        self._uploads += 1
        if best in left and self._uploads % 2 == 0:
            return best
        return max(left, default=None)

    def _upload(self, step: int) -> None:
        """Upload a checkpoint: files first, then the manifest. An object that a manifest names is not overwritten."""
        assert self._stored is not None
        with _linked_files(self._layout, step) as folder:
            manifest = parse_stored((folder / MANIFEST).read_bytes()) if folder else None
            if folder is None or manifest is None:
                return  # deleted meanwhile
            before = self._stored.get(step)
            names = _object_names(manifest, before)
            for file in manifest["files"]:
                path = _path(step, names[file["name"]])
                if before is None or path not in _objects_of(step, before):
                    self._store.write(path, folder / file["name"])
                    self._objects.add(path)
        self._check_sizes(step, manifest, names)
        renamed = {name: stored for name, stored in names.items() if name != stored}
        text = json.dumps({**manifest, **({STORED_AS: renamed} if renamed else {})}, indent=2) + "\n"
        self._store.write(_path(step, MANIFEST), text.encode())
        self._objects.add(_path(step, MANIFEST))
        self._stored[step] = {**manifest, STORED_AS: renamed}
        self._remove(_objects_of(step, before or {}) - _objects_of(step, self._stored[step]))

    def _check_sizes(self, step: int, manifest: Mapping[str, Any], names: Mapping[str, str]) -> None:
        stored_files = self._store.files(f"{CHECKPOINTS}/{step_name(step)}")
        for file in manifest["files"]:
            stored = stored_files.get(_path(step, names[file["name"]]))
            if stored is None or stored.size_bytes != file["size_bytes"]:
                has = "is missing" if stored is None else f"has {stored.size_bytes} bytes, not {file['size_bytes']}"
                raise StoreError(f"{self._store.url}/{_path(step, names[file['name']])} {has} after it was written")

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
        stored = self._stored or {}
        local = self._local()
        if not any(_same(manifest, stored.get(step)) for step, manifest in local.items()):
            return
        kept_steps = {*local, *map(_step_in, self._pointers.values()), None}

        def is_dropped(path: str) -> bool:
            return step_of(path.split("/")[1]) not in kept_steps

        for path in sorted(filter(is_dropped, self._objects)):
            if path.endswith(f"/{MANIFEST}"):  # first: without a manifest there is no checkpoint
                self._remove({path})
                stored.pop(step_of(path.split("/")[1]) or 0, None)
        kept = {path for step in stored for path in _objects_of(step, stored[step])}
        self._remove({path for path in self._objects if is_dropped(path) and path not in kept})

    def _remove(self, paths: set[str]) -> None:
        for path in sorted(paths):
            self._store.remove(path)
            self._objects.discard(path)


def parse_stored(data: bytes) -> dict[str, Any] | None:
    """Parse the manifest of a checkpoint in a folder or in a store. None if the data are no manifest."""
    manifest = parse_manifest(data)
    stored_as = {} if manifest is None else manifest.get(STORED_AS, {})
    return manifest if isinstance(stored_as, dict) and all(map(is_plain_name, stored_as.values())) else None


def stored_name(manifest: Mapping[str, Any], name: str) -> str:
    """Return the name of the object that contains the file, in the folder of the manifest in the store."""
    return str(manifest.get(STORED_AS, {}).get(name, name))


def without_stored_as(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest as it is in a run directory."""
    return {key: value for key, value in manifest.items() if key != STORED_AS}


def _object_names(manifest: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, str]:
    """Return file name -> object name; the names differ if an object of the file's name has different content."""
    if before is None:
        return {file["name"]: file["name"] for file in manifest["files"]}
    taken = {stored_name(before, file["name"]): file["sha256"] for file in before["files"]}
    names = {}
    for file in manifest["files"]:
        plain, special = file["name"], f"{file['name']}.{file['sha256'][:8]}"
        names[plain] = plain if taken.get(plain, file["sha256"]) == file["sha256"] else special
    return names


def _objects_of(step: int, manifest: Mapping[str, Any]) -> set[str]:
    return {_path(step, stored_name(manifest, file["name"])) for file in manifest.get("files", ())}


def _path(step: int, name: str) -> str:
    return f"{CHECKPOINTS}/{step_name(step)}/{name}"


def _same(local: Mapping[str, Any], stored: Mapping[str, Any] | None) -> bool:
    return stored is not None and without_stored_as(local) == without_stored_as(stored)


def _step_in(pointer: bytes) -> int | None:
    return step_of(pointer.decode(errors="replace").strip())


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
            _link_or_copy(folder, name, target / name)
    except FileNotFoundError:
        return False
    finally:
        os.close(folder)
    return (target / MANIFEST).exists()


def _link_or_copy(folder: int, name: str, target: Path) -> None:
    """Make `target` a hard link to a file, or a copy if the file system has no links."""
    try:
        os.link(name, target, src_dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError:
        with (
            open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=folder)) as source,
            target.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
