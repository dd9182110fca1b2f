"""The images to evaluate on: those that a run held out, or all images of another source. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddptrain.errors import UsageError
from ddptrain.storage.store import Location
from ddptrain.workloads.held_out import HeldOut, digest_of
from ddptrain.workloads.images.data.listing import find_source, make_manifest
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams


def prepare(request: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
    """Write a manifest of the run `request["run"]`, or of the source `request["data"]`, into `folder`.

    Raises UsageError if there are no images, or they cannot be listed; StoreError.
    """
    params = ImagesParams.model_validate_json(json.dumps(request["params"]), strict=True)
    manifest = _listed(params, str(request["data"]), tell) if request["data"] else held_out_images(Path(request["run"]))
    manifest.write(folder)
    held_out = described(manifest)
    held_out.write(folder)
    tell(f"{held_out.n:,} images of {len(manifest.classes):,} classes to evaluate on")


def held_out_images(run_dir: Path) -> Manifest:
    """Return the manifest of a run that held out images. Raises UsageError, also if it held out none."""
    try:
        manifest = Manifest.read(run_dir / "inputs")
    except UsageError as error:
        raise UsageError(f"{error}; name images to evaluate on with --data") from error
    if not len(manifest.val):
        raise UsageError(
            f"{run_dir.name} held out no images (params.train_pct): name a folder or URL of images with --data, or "
            "train with params.train_pct below 1"
        )
    return manifest


def evaluated_only(manifest: Manifest, classes: Collection[str] | None = None) -> Manifest:
    """Return a manifest that only validates: on the held-out images, or on all images if it holds out none.

    classes: only images of these classes remain.
    """
    kept = manifest.val if len(manifest.val) else manifest.train
    if classes is not None:
        labels = [label for label, name in enumerate(manifest.classes) if name in classes]
        kept = kept[np.isin(manifest.labels[kept], labels)]
    return manifest.validating_on(kept)


def described(manifest: Manifest) -> HeldOut:
    """Return the digest and number of the images to evaluate on: their names, classes, sizes and versions count."""
    rows = []
    for index in evaluated_only(manifest).val.tolist():
        image = manifest.image(index)
        rows.append([image.key, manifest.classes[manifest.labels[index]], image.size_bytes, image.version])
    return HeldOut(digest_of({"url": manifest.val_url or manifest.url, "images": rows}), len(rows), "images")


def evaluated_params(params: ImagesParams, data: str | None) -> ImagesParams:
    """Return the params with which the images of `data` are read, instead of the source of the training."""
    return params if data is None else params.model_copy(update={"source": data, "val_source": None})


def _listed(params: ImagesParams, data: str, tell: Callable[[str], None]) -> Manifest:
    """Return a manifest that holds out the val folder of a split source, or else nothing: then all images count."""
    whole = {"train_pct": 1.0, "subset": None}
    settings = evaluated_params(params, data).model_copy(update=whole)
    location = Location.of(data, settings.source_options, "--data")
    return make_manifest(find_source(location, settings, tell), settings, location)
