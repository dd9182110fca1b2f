"""What of a run comes from an object store to be gone on with, or to be used: never more than is needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ddptrain.errors import RunNotFound
from ddptrain.results.checkpoint_verification import verify
from ddptrain.results.checkpoints import MANIFEST
from ddptrain.results.errors import CheckpointDamaged, naming
from ddptrain.results.files import write_whole
from ddptrain.results.layout import BEST, INPUTS, LATEST, step_name, step_of
from ddptrain.results.remote.checkpoints import CHECKPOINTS, STORED_AS, parsed, stored_name
from ddptrain.results.remote.store import Store, Stored

_CONTINUED = ("run.json", "config.yaml", "events.jsonl", "metrics.jsonl")


def bring(run: Store, folder: Path, warn: Callable[[str], None]) -> None:
    """Fetch what a driver goes on writing, and the newest checkpoint that is whole.

    Of the checkpoints before it come the manifests alone: they are counted, and dropped when their time comes.
    `warn` is told of those that are damaged. Raises ResultsError.
    """
    there = run.files()
    for path in there:
        is_log = path.startswith("logs/") and path.count("/") == 1 and "\\" not in path
        is_input = path.startswith(f"{INPUTS}/") and path.count("/") == 1 and "\\" not in path
        if path in _CONTINUED or is_log or is_input:
            run.fetch(path, folder / path)
    manifests = _manifests(run, there)
    for step in sorted(manifests, reverse=True):
        try:
            _fetch(run, folder, step, manifests[step])
        except CheckpointDamaged as error:
            warn(f"checkpoint {step_name(step)} of {run.url} is passed over: {error}")
            shutil.rmtree(folder / CHECKPOINTS / step_name(step), ignore_errors=True)
            continue
        for other in sorted(manifests):
            if other < step:
                _write_manifest(folder, other, manifests[other])
        return


def bring_checkpoints(run: Store, folder: Path, steps: Collection[int]) -> None:
    """Fetch those of these checkpoints that are there, and whole. Raises ResultsError."""
    for step, manifest in _manifests(run, run.files(CHECKPOINTS)).items():
        if step in steps:
            try:
                _fetch(run, folder, step, manifest)
            except CheckpointDamaged:
                shutil.rmtree(folder / CHECKPOINTS / step_name(step), ignore_errors=True)


def copy_model(run: Store, folder: Path, there: Mapping[str, Stored]) -> None:
    """Fetch the best checkpoint, or else the newest, for a reader, unless it is here.

    Raises: RunNotFound where there is none; ResultsError.
    """
    manifests = _manifests(run, there)
    if not manifests:
        raise RunNotFound(f"run {folder.name} has no checkpoint in {run.url}")
    pointed = run.read_all([f"{CHECKPOINTS}/{name}" for name in (BEST, LATEST)])
    steps = [
        step_of(pointed.get(f"{CHECKPOINTS}/{name}", b"").decode(errors="replace").strip()) for name in (BEST, LATEST)
    ]
    step = next((step for step in steps if step in manifests), None)
    step = max(manifests) if step is None else step
    try:
        here = json.loads((folder / CHECKPOINTS / step_name(step) / MANIFEST).read_bytes())
    except (OSError, ValueError):
        here = None
    if here != _bare(manifests[step]):
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        _fetch(run, folder, step, manifests[step])
    for name in (BEST, LATEST):
        write_whole(folder / CHECKPOINTS / name, f"{step_name(step)}\n".encode())


def _manifests(run: Store, there: Mapping[str, Stored]) -> dict[int, dict[str, object]]:
    """The manifests of a run's checkpoints, by step."""
    paths = {
        path: step
        for path in there
        if path.startswith(f"{CHECKPOINTS}/") and path.count("/") == 2 and path.endswith(f"/{MANIFEST}")
        if (step := step_of(path.split("/")[1])) is not None
    }
    found = {paths[path]: parsed(data) for path, data in run.read_all(list(paths)).items()}
    return {step: manifest for step, manifest in found.items() if manifest is not None}


def _fetch(run: Store, folder: Path, step: int, manifest: dict[str, object]) -> None:
    """Fetch a checkpoint's files, the manifest last, and compare them with it. Raises CheckpointDamaged, StoreError."""
    target = folder / CHECKPOINTS / step_name(step)
    there = run.files(f"{CHECKPOINTS}/{step_name(step)}")
    files = manifest["files"]
    assert isinstance(files, list)
    for file in files:
        path = f"{CHECKPOINTS}/{step_name(step)}/{stored_name(manifest, file['name'])}"
        if path not in there:
            raise CheckpointDamaged(f"{path} is missing")
        run.fetch(path, target / file["name"])
    _write_manifest(folder, step, manifest)
    verify(target)


def _write_manifest(folder: Path, step: int, manifest: dict[str, object]) -> None:
    target = folder / CHECKPOINTS / step_name(step)
    with naming(target):
        target.mkdir(parents=True, exist_ok=True)
    write_whole(target / MANIFEST, (json.dumps(_bare(manifest), indent=2) + "\n").encode())


def _bare(manifest: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in manifest.items() if key != STORED_AS}
