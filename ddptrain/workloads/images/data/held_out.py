"""The images to evaluate on: those that a run held out, or all images of another source. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    if not manifest.val:
        raise UsageError(
            f"{run_dir.name} held out no images (params.train_pct): name a folder or URL of images with --data, or "
            "train with params.train_pct below 1"
        )
    return manifest


def evaluated_only(manifest: Manifest, classes: Collection[str] | None = None) -> Manifest:
    """Return a manifest that only validates: on the held-out images, or on all images if it holds out none.

    classes: only images of these classes remain.
    """
    kept = manifest.val or manifest.train
    if classes is not None:
        kept = tuple(index for index in kept if manifest.classes[manifest.labels[index]] in classes)
    return replace(manifest, train=(), val=kept)


def described(manifest: Manifest) -> HeldOut:
    """Return the digest and number of the images to evaluate on: their names, classes, sizes and versions count."""
    images = evaluated_only(manifest).val
    rows = [
        [
            manifest.keys[index],
            manifest.classes[manifest.labels[index]],
            manifest.sizes[index],
            manifest.versions[index],
        ]
        for index in images
    ]
    return HeldOut(digest_of({"url": manifest.val_url or manifest.url, "images": rows}), len(images), "images")


def evaluated_params(params: ImagesParams, data: str | None) -> ImagesParams:
    """Return the params with which the images of `data` are read, instead of the source of the training."""
    return params if data is None else params.model_copy(update={"source": data, "val_source": None})


def _listed(params: ImagesParams, data: str, tell: Callable[[str], None]) -> Manifest:
    """Return a manifest that holds out the val folder of a split source, or else nothing: then all images count."""
    whole = {"train_pct": 1.0, "subset": None}
    settings = evaluated_params(params, data).model_copy(update=whole)
    location = Location.of(data, settings.source_options, "--data")
    return make_manifest(find_source(location, settings, tell), settings, location)
