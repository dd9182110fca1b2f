"""Lists a source of images once, for all ranks: finds the classes, chooses and splits the images, writes the list."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ddptrain.errors import UsageError
from ddptrain.wording import counted, nearest, shown
from ddptrain.workloads.images.manifest import FILE, Manifest, class_of, is_plain_key
from ddptrain.workloads.images.namedfiles import check_weights, checked_labels, is_weights_name
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.split import sample, split
from ddptrain.workloads.images.store import Listed, Location, open_store

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
# A store that does not answer is given up after the sum of the two; a page of a listing takes well below a second.
_TIMEOUT_S = 6.0
_PATIENCE_S = 12.0
_RETRIES = 4
_TELL_FIRST_S, _TELL_EVERY_S = 2.0, 10.0
_MOST_NAMED = 8
_WORDNET = re.compile(r"^n\d{8}-")  # in front of the names of ImageNet's classes

Tell = Callable[[str], None]


@dataclass(slots=True)
class Found:
    """What a source holds: the images of each class; how many files are no images, hidden, or in no class's folder.

    folders: all of the source's own, which should be those of the classes.
    """

    by_class: dict[str, list[Listed]] = field(default_factory=dict)
    suffixes: Counter[str] = field(default_factory=Counter)
    n_hidden: int = 0
    n_stray: int = 0
    folders: set[str] = field(default_factory=set)

    @property
    def n_images(self) -> int:
        """Images in a class's folder."""
        return sum(len(images) for images in self.by_class.values())

    @property
    def ignored(self) -> str:
        """What is left out, in words; "" where nothing is."""
        others = sum(self.suffixes.values())
        parts = [
            f"{counted(others, 'file')} that {'is' if others == 1 else 'are'} no {_kind(others)}" if others else "",
            f"{counted(self.n_hidden, 'hidden file')}" if self.n_hidden else "",
            f"{counted(self.n_stray, 'image')} in no class's folder" if self.n_stray else "",
            _imageless(sorted(self.folders - self.by_class.keys())),
        ]
        return ", ".join(part for part in parts if part)


def _imageless(folders: Sequence[str]) -> str:
    """What is said of folders without an image, which are no classes."""
    names = ", ".join(shown(name, 40) for name in folders[:_MOST_NAMED])
    more = ", ..." if len(folders) > _MOST_NAMED else ""
    return f"{counted(len(folders), 'folder')} without an image ({names}{more})" if folders else ""


def _kind(number: int) -> str:
    return "image" if number == 1 else "images"


def prepare(params: Mapping[str, object], folder: Path, tell: Tell) -> None:
    """Have the run's list of images in `folder`: the one that is there, or else a new one.

    Raises: UsageError where the parameters or the source do not do, StoreError where the source can't be listed.
    """
    settings = ImagesParams.model_validate_json(json.dumps(params), strict=True)
    location = Location.at(settings)
    made_of = _made_of(settings, location)
    known = Manifest.read(folder) if (folder / FILE).exists() else None
    if known is None:  # else there is a checkpoint, or the ranks look
        check_weights(settings)
    if known is not None and known.made_of == made_of:
        tell(f"the run's list of images is used again: {_summary(known)}")
        manifest = known
    else:
        if known is not None:
            tell(f"the images are listed anew: {_differences(known.made_of, made_of)}")
        found = list_images(location, tell)
        manifest = make_manifest(found, settings, location, made_of)
        tell(f"{_summary(manifest)}{f'; left out: {found.ignored}' if found.ignored else ''}")
    labels = checked_labels(settings, manifest.classes)
    if known is None and settings.weights is not None and not is_weights_name(settings.weights):
        from ddptrain.workloads.images.weightscheck import check_weights_fit  # takes two seconds, for torch

        check_weights_fit(settings, manifest.classes, labels, tell)
    if settings.scheduler == "plateau" and not manifest.val:
        raise UsageError(
            "params.scheduler: plateau watches val/loss, and there are too few images for any to validate with: lower "
            "params.train_pct, or choose another scheduler"
        )
    if manifest is not known:
        manifest.write(folder)


def list_images(location: Location, tell: Tell | None = None) -> Found:
    """What the source holds, in one pass over it.

    Raises: UsageError where there are no images in folders of classes; StoreError where it can't be listed.
    """
    found = Found()
    next_word = time.monotonic() + _TELL_FIRST_S
    store = open_store(location, timeout_s=_TIMEOUT_S, retries=_RETRIES, patience_s=_PATIENCE_S)
    for number, item in enumerate(store.listing(), 1):
        _add(found, item)
        if tell is not None and number % 1000 == 0 and time.monotonic() > next_word:
            next_word = time.monotonic() + _TELL_EVERY_S
            tell(f"listing {location.words}: {number:,} files so far")
    if location.protocol == "file":  # in a store no folder is empty
        found.folders |= {entry.name for entry in os.scandir(location.url) if entry.is_dir() and entry.name[0] != "."}
    _check(found, location)
    return found


def make_manifest(
    found: Found, params: ImagesParams, location: Location, made_of: Mapping[str, object] | None = None
) -> Manifest:
    """The images that the parameters choose, and which of them train.

    Raises: UsageError for a subset that names no class, or leaves fewer than two.
    """
    classes = chosen_classes(sorted(found.by_class), params.subset, location.words)
    if len(classes) < 2:
        raise UsageError(_too_few(found, classes, location.words))
    by_class = {name: [item.key for item in found.by_class[name]] for name in classes}
    used = sample(by_class, params.downsample_to, params.seed)
    train, _ = split(used, params.train_pct, params.seed)
    items = {item.key: item for name in classes for item in found.by_class[name]}
    keys = [key for name in classes for key in used[name]]
    label_of = {name: label for label, name in enumerate(classes)}
    return Manifest(
        url=location.words,
        classes=tuple(classes),
        keys=tuple(keys),
        labels=tuple(label_of[class_of(key)] for key in keys),
        sizes=tuple(items[key].size_bytes for key in keys),
        versions=tuple(items[key].version for key in keys),
        train=tuple(index for index, key in enumerate(keys) if key in train),
        val=tuple(index for index, key in enumerate(keys) if key not in train),
        made_of=made_of or _made_of(params, location),
    )


def chosen_classes(classes: Sequence[str], subset: int | Sequence[str] | None, where: str) -> list[str]:
    """The classes to use: all, the first so many, or those named, in the order of names.

    Raises: UsageError for a name that is none, with the nearest one, and for more classes than there are.
    """
    if subset is None:
        return list(classes)
    if isinstance(subset, int):
        if subset > len(classes):
            raise UsageError(f"params.subset asks for {subset} classes, and {where} has {len(classes)}")
        return list(classes[:subset])
    unknown = [name for name in subset if name not in set(classes)]
    if unknown:
        said = "; ".join(_unknown(name, classes) for name in unknown[:_MOST_NAMED])
        more = f"; and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        raise UsageError(f"params.subset names what is no class of {where}: {said}{more}")
    return sorted(set(subset))


def _unknown(name: str, classes: Sequence[str]) -> str:
    inside = [known for known in classes if name.lower() in known.lower()]
    names = {_WORDNET.sub("", known): known for known in classes} | {known: known for known in classes}
    match = inside[0] if len(inside) == 1 else names.get(nearest(name, names) or "")
    some = ", ".join(shown(known, 40) for known in classes[:_MOST_NAMED])
    more = ", ..." if len(classes) > _MOST_NAMED else ""
    return f'"{shown(name)}" ({f"did you mean {shown(match)}?" if match else f"there are {some}{more}"})'


def _add(found: Found, item: Listed) -> None:
    parts = item.key.split("/")
    if any(part.startswith(".") for part in parts) or not _is_text(item.key):
        found.n_hidden += 1
        return
    if len(parts) > 1:
        found.folders.add(parts[0])
    if (suffix := PurePosixPath(parts[-1]).suffix.lower()) not in SUFFIXES:
        found.suffixes[suffix] += 1
    elif not is_plain_key(item.key):
        found.n_stray += 1
    else:
        found.by_class.setdefault(parts[0], []).append(item)


def _is_text(key: str) -> bool:
    """Whether a key can be written down: a file's name may be bytes that are none."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(found: Found, location: Location) -> None:
    """Raises UsageError where there is nothing to be used."""
    if found.by_class:
        return
    where = location.words
    want = "params.source is the folder that holds a folder of images for each class"
    if found.n_stray:
        raise UsageError(
            f"{where} has its {counted(found.n_stray, 'image')} directly in it, in no folders of classes: {want}"
        )
    n_files = sum(found.suffixes.values()) + found.n_hidden
    if not n_files and found.folders:
        raise UsageError(f"there is no file in {where}, only {_imageless(sorted(found.folders))}; {want}")
    if not n_files:
        why = "the folder is empty" if location.protocol == "file" else "it is empty, or does not exist"
        raise UsageError(f"there is nothing in {where}: {why}; {want}")
    common = ", ".join(f"{n:,} {shown(suffix, 20) or 'without suffix'}" for suffix, n in found.suffixes.most_common(3))
    raise UsageError(f"there is no image in {where}, only {counted(n_files, 'other file')} ({common}); {want}")


def _too_few(found: Found, classes: Sequence[str], where: str) -> str:
    said = f"{where} gives {counted(len(classes), 'class')} only, {shown(classes[0])}: at least 2 are needed"
    if len(found.by_class) > 1:
        return f"{said}; see params.subset"
    deeper = sum(item.key.count("/") > 1 for item in found.by_class[classes[0]])
    if deeper:
        return f"{said}; did you mean params.source: {where}/{shown(classes[0])}?"
    return f"{said}; params.source is the folder that holds a folder of images for each class"


def _made_of(params: ImagesParams, location: Location) -> dict[str, object]:
    """The parameters that decide what is in the list, as JSON has them."""
    subset = params.subset if isinstance(params.subset, int | None) else sorted(set(params.subset))
    return {
        "source": location.words,
        "subset": subset,
        "train_pct": params.train_pct,
        "downsample_to": params.downsample_to,
        "seed": params.seed,
    }


def _differences(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    changed = [
        f"params.{name} was {shown(str(before.get(name)), 60)} and is {shown(str(value), 60)}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    return ", ".join(changed) or "they were listed with other parameters"


def _summary(manifest: Manifest) -> str:
    of = f"{len(manifest.keys):,} images of {len(manifest.classes):,} classes in {manifest.url}"
    return f"{of}: {len(manifest.train):,} to train on, {len(manifest.val):,} to validate with"
