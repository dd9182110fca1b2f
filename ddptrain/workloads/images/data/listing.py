"""Lists the images of a source once for all ranks: finds classes, selects and splits images, writes the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ddptrain.config.wording import counted, listed, nearest, shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import is_utf8
from ddptrain.storage.store import Limits, Listed, Location
from ddptrain.workloads.images.data.manifest import FILE, PARTS, TRAIN, VAL, Manifest, is_plain_key
from ddptrain.workloads.images.data.synthetic import open_images
from ddptrain.workloads.images.model.labels import outputs_of
from ddptrain.workloads.images.model.preflight import check_weights, is_weights_name, labels_of
from ddptrain.workloads.images.params import ImagesParams

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
# The driver waits for a store that does not answer for the sum of these; a page of a listing takes less than 1 s.
_TIMEOUT_S = 6.0
_PATIENCE_S = 12.0
_RETRIES = 4
_TELL_FIRST_S, _TELL_EVERY_S = 2.0, 10.0
_MOST_NAMED = 8
_TRAIN, _VAL = "train", "val"  # the folders of a split source; test may be beside them, and is not used
_WORDNET = re.compile(r"^n\d{8}-")  # prefix in the names of ImageNet's classes

Tell = Callable[[str], None]


@dataclass(slots=True)
class SourceListing:
    """The content of a source: the images of each class, and the numbers of files that are not used.

    suffixes: of files that are not images. n_stray: images outside of class folders. folders: all top-level folders;
    each should be a class.
    """

    by_class: dict[str, list[Listed]] = field(default_factory=dict)
    suffixes: Counter[str] = field(default_factory=Counter)
    n_hidden: int = 0
    n_stray: int = 0
    folders: set[str] = field(default_factory=set)

    @property
    def ignored(self) -> str:
        """The files that are left out, for a message; "" if there are none."""
        others = sum(self.suffixes.values())
        parts = [
            f"{counted(others, 'file')} that {'is not an image' if others == 1 else 'are not images'}"
            if others
            else "",
            f"{counted(self.n_hidden, 'hidden file')}" if self.n_hidden else "",
            f"{counted(self.n_stray, 'image')} outside of class folders" if self.n_stray else "",
            _imageless(sorted(self.folders - self.by_class.keys())),
        ]
        return ", ".join(part for part in parts if part)


def _imageless(folders: Sequence[str]) -> str:
    """Return the part of a message about folders without images, which are no classes."""
    return f"{counted(len(folders), 'folder')} without an image ({listed(folders, _MOST_NAMED)})" if folders else ""


def prepare(params: Mapping[str, object], folder: Path, tell: Tell) -> None:
    """Write the run's manifest into `folder`, unless the one there was made with the same parameters.

    Raises: UsageError for invalid parameters or an unusable source, StoreError if the source can't be listed.
    """
    settings = ImagesParams.model_validate_json(json.dumps(params), strict=True)
    location = Location.of(settings.source, settings.source_options)
    made_of = _made_of(settings, location)
    known = Manifest.read(folder) if (folder / FILE).exists() else None
    if known is None:  # otherwise a checkpoint has the weights, or the ranks check them
        check_weights(settings)
    if known is not None and known.made_of == made_of:
        tell(f"the run's list of images is used again: {_summary(known)}")
        manifest = known
    else:
        if known is not None:
            tell(f"the images are listed again: {_differences(known.made_of, made_of)}")
        source = find_source(location, settings, tell)
        manifest = make_manifest(source, settings, location)
        tell(f"{_summary(manifest)}{source.description}")
    labels = labels_of(settings)
    if labels is not None:
        outputs_of(manifest.classes, labels)
    if known is None and settings.weights is not None and not is_weights_name(settings.weights):
        from ddptrain.workloads.images.model.initial_weights import check_weights_fit  # imports torch: two seconds

        check_weights_fit(settings, settings.weights, manifest.classes, labels, folder)
    if manifest is not known:
        manifest.write(folder)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The images for training and, if they are in a folder of their own, those for validation.

    Keys of `train`, and of `val` if `val_location` is None, are relative to the source, also if it `is_split`.
    """

    train: SourceListing
    val: SourceListing | None = None
    is_split: bool = False
    val_location: Location | None = None

    @property
    def description(self) -> str:
        """For a message: the files that are left out, and that the source is split; "" or begins with ";"."""
        ignored = [self.train.ignored, self.val.ignored if self.val else ""]
        left_out = "".join(f"; left out: {text}" for text in ignored if text)
        return f"{left_out}; {_TRAIN}/ trains, {_VAL}/ validates" if self.is_split else left_out


def list_images(location: Location, tell: Tell | None = None) -> SourceListing:
    """List a source in one pass; its folders are the classes.

    Raises: UsageError if no class folder has images; StoreError if the source can't be listed.
    """
    listing = _part(_listing(location, tell), location)
    _check(listing, location)
    return listing


def find_source(location: Location, params: ImagesParams, tell: Tell) -> ImageSource:
    """List a source and detect its layout.

    Raises: UsageError if the source is unusable; StoreError if it can't be listed.
    """
    items = list(_listing(location, tell))
    whole = _part(items, location)
    _check(whole, location)
    split_into_parts = is_split(whole.by_class.keys() | (whole.folders & PARTS), location.description)
    if params.val_source is not None:
        val_location = Location.of(params.val_source, params.source_options, "params.val_source")
        if val_location == location or split_into_parts:
            what = f"has a {_VAL}/ of its own" if split_into_parts else "is params.val_source"
            raise UsageError(
                f"params.source, {location.description}, {what}: give another folder to one of them, or leave "
                "params.val_source out"
            )
        return ImageSource(whole, list_images(val_location, tell), val_location=val_location)
    if not split_into_parts:
        return ImageSource(whole)
    train, val = (_part(items, location, part) for part in (_TRAIN, _VAL))
    for part, listing in ((_TRAIN, train), (_VAL, val)):
        _check(listing, Location(f"{location.url}/{part}", location.options, location.setting))
    return ImageSource(train, val, is_split=True)


def is_split(folders: AbstractSet[str], where: str) -> bool:
    """Return whether the folders of a source are train and val, perhaps with test; otherwise they are its classes.

    Raises UsageError if they look like a source that is split in another way.
    """
    if {_TRAIN, _VAL} <= folders <= {_TRAIN, _VAL, "test"}:
        return True
    names = {name.lower() for name in folders}
    if {_TRAIN, _VAL} <= names or {_TRAIN} < names <= PARTS:
        raise UsageError(
            f"{where} has the folders {listed(sorted(folders), _MOST_NAMED)}: expected a folder for each class, or "
            f"{_TRAIN} and {_VAL} with a folder for each class; give others as params.source and params.val_source, "
            f"such as {where}/{_TRAIN} and {where}/valid"
        )
    return False


def _listing(location: Location, tell: Tell | None) -> Iterator[Listed]:
    next_word = time.monotonic() + _TELL_FIRST_S
    store = open_images(location, Limits(_TIMEOUT_S, retries=_RETRIES, patience_s=_PATIENCE_S))
    for number, item in enumerate(store.listing(), 1):
        yield item
        if tell is not None and number % 1000 == 0 and time.monotonic() > next_word:
            next_word = time.monotonic() + _TELL_EVERY_S
            tell(f"listing {location.description}: {number:,} files so far")


def _part(items: Iterable[Listed], location: Location, inside: str = "") -> SourceListing:
    """Sort the files of a source, or those inside one of its folders."""
    listing = SourceListing()
    prefix = f"{inside}/" if inside else ""
    for item in items:
        if item.key.startswith(prefix):
            _add(listing, item, item.key.removeprefix(prefix))
    if location.protocol == "file":  # also empty folders, which object stores don't have
        entries = os.scandir(Path(location.url, inside))
        listing.folders |= {entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."}
    return listing


def make_manifest(source: ImageSource, params: ImagesParams, location: Location) -> Manifest:
    """Select images by the parameters, and split them.

    Raises UsageError if `subset` names unknown classes or selects fewer than two, or if the classes of the
    validation images are not those of the training images.
    """
    listing = source.train
    inside = f"{location.description}/{{}}" if source.is_split else location.description
    where = inside.format(_TRAIN)
    classes = chosen_classes(sorted(listing.by_class), params.subset, where)
    if len(classes) < 2:
        raise UsageError(_too_few(listing, classes, where, location.setting, depth=2 if source.is_split else 1))
    used, val_keys = _by_key(listing, classes), set[str]()
    val: dict[str, list[Listed]] = {}
    if source.val is None:
        _, val_keys = split(
            {name: [item.key for item in used[name]] for name in classes}, params.train_pct, params.seed
        )
    else:
        val_where = source.val_location.description if source.val_location else inside.format(_VAL)
        check_classes_agree(listing.by_class.keys(), classes, source.val.by_class.keys(), val_where)
        val = _by_key(source.val, classes)
    train = ((item, label) for label, name in enumerate(classes) for item in used[name])
    images = [(item, label, VAL if item.key in val_keys else TRAIN) for item, label in train]
    images += [(item, label, VAL) for label, name in enumerate(classes) for item in val.get(name, [])]
    val_url = source.val_location.description if source.val_location else ""
    return Manifest.of(location.description, classes, images, _made_of(params, location), val_url)


def check_classes_agree(train: AbstractSet[str], used: Sequence[str], val: AbstractSet[str], where: str) -> None:
    """Check that the validation folder `where` has all classes that are used, and none that training lacks.

    Raises UsageError.
    """
    if unknown := sorted(val - train):
        raise UsageError(
            f"{where}, the folder of the images to validate with, has folders that are not classes of the training "
            f"data: {listed(unknown, _MOST_NAMED)}; its classes must have the names of those in training: "
            f"{listed(sorted(train), _MOST_NAMED)}"
        )
    if missing := sorted(set(used) - val):
        raise UsageError(
            f"{where}, the folder of the images to validate with, has no images of {listed(missing, _MOST_NAMED)}: it "
            "needs some of every class that is trained; add them, or leave these classes out with params.subset"
        )


def _by_key(listing: SourceListing, classes: Sequence[str]) -> dict[str, list[Listed]]:
    return {name: sorted(listing.by_class[name], key=lambda item: item.key) for name in classes}


def chosen_classes(classes: Sequence[str], subset: int | Sequence[str] | None, where: str) -> list[str]:
    """Return the selected classes, sorted: all, the first `subset` ones, or those named in `subset`.

    Raises UsageError for unknown names, with the nearest class as a hint, and for a number above that of the classes.
    """
    if subset is None:
        return list(classes)
    if isinstance(subset, int):
        if subset > len(classes):
            raise UsageError(f"params.subset asks for {subset} classes, and {where} has {len(classes)}")
        return list(classes[:subset])
    unknown = [name for name in subset if name not in set(classes)]
    if unknown:
        problems = "; ".join(_unknown(name, classes) for name in unknown[:_MOST_NAMED])
        more = f"; and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        raise UsageError(f"params.subset contains names that are not classes of {where}: {problems}{more}")
    return sorted(set(subset))


def _unknown(name: str, classes: Sequence[str]) -> str:
    inside = [known for known in classes if name.lower() in known.lower()]
    names = {_WORDNET.sub("", known): known for known in classes} | {known: known for known in classes}
    match = inside[0] if len(inside) == 1 else names.get(nearest(name, names) or "")
    hint = f"did you mean {shorten(match)}?" if match else f"there are {listed(classes, _MOST_NAMED)}"
    return f'"{shorten(name)}" ({hint})'


def _add(listing: SourceListing, item: Listed, path: str) -> None:
    """Add a file; `path` is its key relative to the folder of the class folders."""
    parts = path.split("/")
    if any(part.startswith(".") for part in parts) or not is_utf8(item.key):
        listing.n_hidden += 1
        return
    if len(parts) > 1:
        listing.folders.add(parts[0])
    if (suffix := PurePosixPath(parts[-1]).suffix.lower()) not in SUFFIXES:
        listing.suffixes[suffix] += 1
    elif not is_plain_key(path):
        listing.n_stray += 1
    else:
        listing.by_class.setdefault(parts[0], []).append(item)


def _check(listing: SourceListing, location: Location) -> None:
    """Raise UsageError if there are no images in class folders."""
    if listing.by_class:
        return
    where = location.description
    want = f"{location.setting} must be a folder with one folder of images for each class"
    if listing.n_stray:
        raise UsageError(
            f"{where} has its {counted(listing.n_stray, 'image')} directly in it, not in class folders: {want}"
        )
    n_files = sum(listing.suffixes.values()) + listing.n_hidden
    if not n_files and listing.folders:
        raise UsageError(f"there is no file in {where}, only {_imageless(sorted(listing.folders))}; {want}")
    if not n_files:
        why = "the folder is empty" if location.protocol == "file" else "it is empty, or does not exist"
        raise UsageError(f"there is nothing in {where}: {why}; {want}")
    common = ", ".join(
        f"{n:,} {shorten(suffix, 20) or 'without suffix'}" for suffix, n in listing.suffixes.most_common(3)
    )
    raise UsageError(f"there is no image in {where}, only {counted(n_files, 'other file')} ({common}); {want}")


def _too_few(listing: SourceListing, classes: Sequence[str], where: str, setting: str, depth: int) -> str:
    problem = f"{where} gives {counted(len(classes), 'class')} only, {shorten(classes[0])}: at least 2 are needed"
    if len(listing.by_class) > 1:
        return f"{problem}; see params.subset"
    deeper = sum(item.key.count("/") > depth for item in listing.by_class[classes[0]])
    if deeper:
        return f"{problem}; did you mean {setting}: {where}/{shorten(classes[0])}?"
    return f"{problem}; {setting} must be a folder with one folder of images for each class"


def _made_of(params: ImagesParams, location: Location) -> dict[str, object]:
    """Return the parameters that determine the manifest, as JSON values."""
    subset = params.subset if isinstance(params.subset, int | None) else sorted(set(params.subset))
    made_of: dict[str, object] = {
        "source": location.description,
        "subset": subset,
        "train_pct": params.train_pct,
        "downsample_to": 1.0,  # as in manifests of earlier versions, which stay valid
        "seed": params.seed,
    }
    if params.val_source is not None:  # absent otherwise, so that manifests of earlier versions stay valid
        made_of["val_source"] = Location.of(params.val_source, {}).description
    return made_of


def _differences(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    changed = [
        f"params.{name} was {shorten(str(before.get(name)), 60)} and is {shorten(str(now.get(name)), 60)}"
        for name in {**now, **before}
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changed) or "they were listed with other parameters"


def _summary(manifest: Manifest) -> str:
    n_source = len(manifest.keys) - (len(manifest.val) if manifest.val_url else 0)
    of = f"{n_source:,} images of {len(manifest.classes):,} classes in {manifest.url}"
    val = f"{len(manifest.val):,} from {manifest.val_url}" if manifest.val_url else f"{len(manifest.val):,}"
    return f"{of}: {len(manifest.train):,} to train on, {val} to validate with"


def split(by_class: Mapping[str, Sequence[str]], train_share: float, seed: int) -> tuple[set[str], set[str]]:
    """Return the keys for training and those for validation: at least one key of each class is for training.

    Of all keys together `train_share` (rounded) are for training; in each class the number differs by one at most. The
    split depends only on the seed and the set of keys.
    """
    if train_share >= 1.0:
        return {key for keys in by_class.values() for key in keys}, set()
    sizes = _sizes({name: len(keys) for name, keys in by_class.items()}, train_share, seed)
    train, val = set[str](), set[str]()
    for name, keys in by_class.items():
        drawn = _drawn(keys, seed)
        train.update(drawn[: sizes[name]])
        val.update(drawn[sizes[name] :])
    return train, val


def _sizes(totals: Mapping[str, int], share: float, seed: int) -> dict[str, int]:
    """Return how many of each class train, by the largest remainder, so that the sum is exact; at least 1."""
    exact = {name: total * share for name, total in totals.items()}
    sizes = {name: int(exact[name]) for name in totals}
    missing = round(sum(totals.values()) * share) - sum(sizes.values())
    drawn = {name: position for position, name in enumerate(_drawn(totals, seed))}
    by_remainder = sorted(totals, key=lambda name: (sizes[name] - exact[name], drawn[name]))
    for name in by_remainder[: max(0, missing)]:
        sizes[name] += 1
    return {name: min(totals[name], max(1, size)) for name, size in sizes.items()}


def _drawn(names: Iterable[str], seed: int) -> list[str]:
    """Return the names in a pseudo-random order that depends only on the seed: the order of their hashes."""

    def ticket(name: str) -> tuple[bytes, str]:
        text = f"split/{seed}/{name}".encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=8).digest(), name

    return sorted(names, key=ticket)
