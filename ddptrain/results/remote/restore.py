"""Downloads parts of a run from an object store: the files to resume the run, or the model that a command reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.errors import RunNotFound
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, INPUTS, LATEST, MANIFEST, step_name, step_of
from ddptrain.results.remote.checkpoint_upload import CHECKPOINTS, parse_stored, stored_name, without_stored_as
from ddptrain.results.secure_files import write_file
from ddptrain.storage.remote_folder import RemoteFolder

_CONTINUED = ("run.json", "sweep.json", "config.yaml", "events.jsonl", "metrics.jsonl", "system.jsonl")


def download_run(run: RemoteFolder, folder: Path, warn: Callable[[str], None]) -> None:
    """Download the files that a resumed run appends to, and the newest checkpoint that matches its manifest.

    Of older checkpoints only the manifests are downloaded, so that `checkpoint.keep` counts and later deletes them.
    `warn` is called for each damaged checkpoint. Raises ResultsError, StoreError.
    """
    paths = run.files()
    for path in paths:
        is_below = path.startswith(("logs/", f"{INPUTS}/")) and path.count("/") == 1 and "\\" not in path
        if path in _CONTINUED or is_below:
            run.fetch(path, folder / path)
    manifests = _manifests(run, paths)
    for step in sorted(manifests, reverse=True):
        try:
            _fetch(run, folder, step, manifests[step])
        except CheckpointDamaged as error:
            warn(f"checkpoint {step_name(step)} of {run.url} is skipped: {error}")
            shutil.rmtree(folder / CHECKPOINTS / step_name(step), ignore_errors=True)
            continue
        for other in sorted(manifests):
            if other < step:
                _write_manifest(folder, other, manifests[other])
        return


def download_checkpoints(run: RemoteFolder, folder: Path) -> None:
    """Download the checkpoints that match their manifests.

    One that the folder has already is not downloaded again. Raises ResultsError, StoreError.
    """
    for step, manifest in _manifests(run, run.files(CHECKPOINTS)).items():
        if not _is_here(folder, step, manifest):
            try:
                _fetch(run, folder, step, manifest)
            except CheckpointDamaged:
                shutil.rmtree(folder / CHECKPOINTS / step_name(step), ignore_errors=True)


def download_model(run: RemoteFolder, folder: Path, paths: Iterable[str], which: str = BEST) -> None:
    """Download a checkpoint, unless the folder has it: best (or else the newest), latest, or a name such as step-100.

    Raises RunNotFound if there is none; ResultsError, StoreError.
    """
    manifests = _manifests(run, paths)
    if not manifests:
        raise RunNotFound(f"run {folder.name} has no checkpoint in {run.url}")
    step = step_of(which)
    if step is None:
        step = _pointed_at(run, (BEST, LATEST) if which == BEST else (LATEST,), manifests)
    elif step not in manifests:
        steps = ", ".join(step_name(step) for step in sorted(manifests))
        raise RunNotFound(f"run {folder.name} has no checkpoint {which} in {run.url}; it has {steps}")
    if not _is_here(folder, step, manifests[step]):
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        _fetch(run, folder, step, manifests[step])
    for name in (BEST, LATEST):
        write_file(folder / CHECKPOINTS / name, f"{step_name(step)}\n".encode())


def _is_here(folder: Path, step: int, manifest: Mapping[str, Any]) -> bool:
    try:
        local = json.loads((folder / CHECKPOINTS / step_name(step) / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(local == without_stored_as(manifest))


def _pointed_at(run: RemoteFolder, pointers: Sequence[str], steps: Collection[int]) -> int:
    """Return the step of the first pointer whose checkpoint exists; the newest of `steps` if there is none."""
    contents = run.read_all([f"{CHECKPOINTS}/{name}" for name in pointers])
    texts = (contents.get(f"{CHECKPOINTS}/{name}", b"").decode(errors="replace").strip() for name in pointers)
    return next((step for text in texts if (step := step_of(text)) in steps and step is not None), max(steps))


def _manifests(run: RemoteFolder, paths: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Return the manifests of a run's checkpoints, by step."""
    steps = {
        path: step
        for path in paths
        if path.startswith(f"{CHECKPOINTS}/") and path.count("/") == 2 and path.endswith(f"/{MANIFEST}")
        if (step := step_of(path.split("/")[1])) is not None
    }
    manifests = {steps[path]: parse_stored(data) for path, data in run.read_all(list(steps)).items()}
    return {step: manifest for step, manifest in manifests.items() if manifest is not None}


def _fetch(run: RemoteFolder, folder: Path, step: int, manifest: Mapping[str, Any]) -> None:
    """Download a checkpoint's files, then its manifest, and compare them. Raises CheckpointDamaged, StoreError."""
    target = folder / CHECKPOINTS / step_name(step)
    files = run.files(f"{CHECKPOINTS}/{step_name(step)}")
    for file in manifest["files"]:
        path = f"{CHECKPOINTS}/{step_name(step)}/{stored_name(manifest, file['name'])}"
        if path not in files:
            raise CheckpointDamaged(f"{path} is missing")
        run.fetch(path, target / file["name"])
    _write_manifest(folder, step, manifest)
    verify(target)


def _write_manifest(folder: Path, step: int, manifest: Mapping[str, Any]) -> None:
    target = folder / CHECKPOINTS / step_name(step)
    with results_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    write_file(target / MANIFEST, (json.dumps(without_stored_as(manifest), indent=2) + "\n").encode())
