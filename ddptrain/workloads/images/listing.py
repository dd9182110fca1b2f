"""Lists the images of a source once for all ranks: finds classes, selects and splits images, writes the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from ddptrain.config.wording import counted, listed, nearest, shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import is_utf8
from ddptrain.protocol.rank_spec import names_model
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import Limits, Listed, Location
from ddptrain.workloads.held_out import HeldOut, digest_of
from ddptrain.workloads.images.manifest import FILE, PARTS, TRAIN, VAL, Manifest, is_plain_key
from ddptrain.workloads.images.params import N_OUTPUTS, WEIGHTS_NAME, ImagesParams
from ddptrain.workloads.images.reader import open_images

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
# The driver waits for a store that does not answer for the sum of these; a page of a listing takes less than 1 s.
_TIMEOUT_S = 6.0
_PATIENCE_S = 12.0
_RETRIES = 4
_TELL_FIRST_S, _TELL_EVERY_S = 2.0, 10.0
_MOST_NAMED = 8
_TRAIN, _VAL = "train", "val"  # the folders of a split source; test may be beside them, and is not used
_WORDNET = re.compile(r"^n\d{8}-")  # prefix in the names of ImageNet's classes
_ID = r"n[0-9]{8}"
_FOLDER_WITH_ID = re.compile(rf"({_ID})(?:[-_. ].*)?", re.DOTALL)
_Text = Annotated[str, Field(min_length=1, max_length=2000)]
_LABELS = TypeAdapter(dict[int, _Text | tuple[Annotated[str, Field(pattern=f"^{_ID}$")], _Text]])
_FORM = 'expected JSON as {"0": "tench", "1": "goldfish"}, or {"0": ["n01440764", "tench"]} with WordNet ids'

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
    if known is None:
        check_weights_file(settings)
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
    weights = settings.weights if known is None else None  # otherwise a checkpoint has them, or the ranks check them
    if weights is not None and not WEIGHTS_NAME.fullmatch(weights):
        from ddptrain.workloads.images.model import check_weights_fit  # imports torch: two seconds

        check_weights_fit(settings, weights, manifest.classes, folder)
    if manifest is not known:
        manifest.write(folder)


def list_for_copy(request: Sequence[Any], send: Callable[[Any], None]) -> None:
    """Do the same in a process of a rank (see isolated.py). request: the parameters, and the folder."""
    prepare(request[0], Path(request[1]), send)


@dataclass(frozen=True, slots=True)
class GivenImage:
    """A file that `predict` gets, or an argument that names none, with the reason."""

    name: str
    problem: str = ""


def find_images(arguments: Iterable[str]) -> list[GivenImage]:
    """Return the images of all arguments, in their order; those of a folder, with all folders below, by name.

    Raises UsageError if there is not a single image.
    """
    found = [item for argument in arguments for item in _given(argument)]
    if any(not item.problem for item in found):
        return found
    lines = [f"{shorten(item.name, 300)}: {item.problem}" for item in found[:_MOST_NAMED]]
    more = [f"and {len(found) - _MOST_NAMED:,} more"] if len(found) > _MOST_NAMED else []
    raise UsageError("\n  ".join(["nothing to classify:", *lines, *more] if found[1:] else lines))


def _given(argument: str) -> list[GivenImage]:
    path = os.path.expanduser(argument)
    if not os.path.isdir(path):
        url = "predict takes files and folders; download it first" if "://" in argument else "no such file or folder"
        return [GivenImage(path) if os.path.exists(path) else GivenImage(hide_credentials(argument), url)]
    found, entered = list[GivenImage](), set[str]()
    for folder, folders, names in os.walk(path, followlinks=True):
        entered.add(os.path.realpath(folder))
        folders[:] = [name for name in sorted(folders) if name[0] != "." and _is_new(folder, name, entered)]
        images = (name for name in sorted(names) if name[0] != "." and PurePosixPath(name).suffix.lower() in SUFFIXES)
        found += [GivenImage(os.path.join(folder, name)) for name in images]
    return found or [GivenImage(argument, f"no images in it ({', '.join(sorted(SUFFIXES))})")]


def _is_new(folder: str, name: str, entered: AbstractSet[str]) -> bool:
    return os.path.realpath(os.path.join(folder, name)) not in entered  # cycles of links end


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The images for training and, in a split source, those for validation. Keys are relative to the source."""

    train: SourceListing
    val: SourceListing | None = None

    @property
    def description(self) -> str:
        """For a message: the files that are left out, and that the source is split; "" or begins with ";"."""
        ignored = [self.train.ignored, self.val.ignored if self.val else ""]
        left_out = "".join(f"; left out: {text}" for text in ignored if text)
        return f"{left_out}; {_TRAIN}/ trains, {_VAL}/ validates" if self.val else left_out


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
    if not split_into_parts:
        return ImageSource(whole)
    train, val = (_part(items, location, part) for part in (_TRAIN, _VAL))
    for part, listing in ((_TRAIN, train), (_VAL, val)):
        _check(listing, Location(f"{location.url}/{part}", location.options, location.setting))
    return ImageSource(train, val)


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
            f"{_TRAIN} and {_VAL} with a folder for each class: rename the others"
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
    where = location.description if source.val is None else f"{location.description}/{_TRAIN}"
    classes = chosen_classes(sorted(listing.by_class), params.subset, where)
    if len(classes) < 2:
        raise UsageError(_too_few(listing, classes, where, location.setting, depth=1 if source.val is None else 2))
    used, val_keys = _by_key(listing, classes), set[str]()
    val: dict[str, list[Listed]] = {}
    if source.val is None:
        _, val_keys = split(
            {name: [item.key for item in used[name]] for name in classes}, params.train_pct, params.seed
        )
    else:
        check_classes_agree(
            listing.by_class.keys(), classes, source.val.by_class.keys(), f"{location.description}/{_VAL}"
        )
        val = _by_key(source.val, classes)
    train = ((item, label) for label, name in enumerate(classes) for item in used[name])
    images = [(item, label, VAL if item.key in val_keys else TRAIN) for item, label in train]
    images += [(item, label, VAL) for label, name in enumerate(classes) for item in val.get(name, [])]
    return Manifest.of(location.description, classes, images, _made_of(params, location))


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
    return {
        "source": location.description,
        "subset": subset,
        "train_pct": params.train_pct,
        "downsample_to": 1.0,  # as in manifests of earlier versions, which stay valid
        "seed": params.seed,
    }


def _differences(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    changed = [
        f"params.{name} was {shorten(str(before.get(name)), 60)} and is {shorten(str(now.get(name)), 60)}"
        for name in {**now, **before}
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changed) or "they were listed with other parameters"


def _summary(manifest: Manifest) -> str:
    of = f"{len(manifest.keys):,} images of {len(manifest.classes):,} classes in {manifest.url}"
    return f"{of}: {len(manifest.train):,} to train on, {len(manifest.val):,} to validate with"


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


# --- the data of an evaluation ---


def prepare_held_out(request: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
    """Write the manifest of the run `request["run"]`, or of the source `request["data"]`, into `folder`.

    Raises UsageError if there are no images, or they cannot be listed; StoreError.
    """
    params = ImagesParams.model_validate_json(json.dumps(request["params"]), strict=True)
    manifest = _listed(params, str(request["data"]), tell) if request["data"] else held_out_images(Path(request["run"]))
    manifest.write(folder)
    held_out = describe_held_out(manifest)
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


def describe_held_out(manifest: Manifest) -> HeldOut:
    """Return the digest and number of the images to evaluate on: their names, classes, sizes and versions count."""
    rows = []
    for index in evaluated_only(manifest).val.tolist():
        image = manifest.image(index)
        rows.append([image.key, manifest.classes[manifest.labels[index]], image.size_bytes, image.version])
    return HeldOut(digest_of({"url": manifest.url, "images": rows}), len(rows), "images")


def evaluated_params(params: ImagesParams, data: str | None) -> ImagesParams:
    """Return the params with which the images of `data` are read, instead of the source of the training."""
    return params if data is None else params.model_copy(update={"source": data})


def _listed(params: ImagesParams, data: str, tell: Callable[[str], None]) -> Manifest:
    """Return a manifest that holds out the val folder of a split source, or else nothing: then all images count."""
    whole = {"train_pct": 1.0, "subset": None}
    settings = evaluated_params(params, data).model_copy(update=whole)
    location = Location.of(data, settings.source_options, "--data")
    return make_manifest(find_source(location, settings, tell), settings, location)


# --- params.label_map: the output of the weights for each class. Nothing is guessed: names must be equal ---


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of all outputs of a model; the outputs by label and WordNet id; `source` is the file for messages."""

    source: str
    names: tuple[str, ...]
    outputs: Mapping[str, Sequence[int]]


def read_labels(path: Path, n_outputs: int | None = None) -> Labels:
    """Return the labels in a file; for a model with `n_outputs`, if that is known.

    Raises UsageError if it is unreadable, or has not one label for each output.
    """
    try:
        found = _LABELS.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"can't read the labels {path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"][:1]))
        raise UsageError(f"no labels in {path}: {f'{where}: ' if where else ''}{first['msg']}; {_FORM}") from None
    n_expected = len(found) if n_outputs is None else n_outputs
    if not found or found.keys() != set(range(n_expected)):
        raise UsageError(
            f"the labels of {path} are {len(found):,}, from output {min(found, default=0):,} to "
            f"{max(found, default=0):,}: expected one for each output of the model, from 0 to {n_expected - 1:,}"
        )
    outputs: dict[str, list[int]] = defaultdict(list)
    for output, label in found.items():
        for name in {label} if isinstance(label, str) else {*label}:
            outputs[name].append(output)
    names = [label if isinstance(label, str) else label[1] for _, label in sorted(found.items())]
    return Labels(str(path), tuple(names), outputs)


def outputs_of(classes: Sequence[str], labels: Labels) -> list[int]:
    """Return the output of each class: the one with its WordNet id, as in n01440764-tench, or with its name as label.

    Raises UsageError, which lists all classes without an output, with several, or with that of another class.
    """
    by_class = {name: _outputs(name, labels) for name in classes}
    of_output: dict[int, list[str]] = defaultdict(list)
    problems = []
    for name, outputs in by_class.items():
        if len(outputs) == 1:
            of_output[outputs[0]].append(shorten(name))
        elif outputs:
            problems.append(f"{shorten(name)}: outputs {', '.join(map(str, outputs))} have this label")
        else:
            near = nearest(name, labels.outputs)
            problems.append(f"{shorten(name)}: no label has its name or id{f', did you mean {near}?' if near else ''}")
    problems += [f"{', '.join(names)}: all have the label of output {n}" for n, names in of_output.items() if names[1:]]
    if problems:
        raise UsageError(
            f"{labels.source} does not determine the output of each class: {listed(problems, 20, 200)}; "
            "rename the folder or the label, or leave params.label_map out"
        )
    return [by_class[name][0] for name in classes]


def _outputs(name: str, labels: Labels) -> Sequence[int]:
    with_id = _FOLDER_WITH_ID.fullmatch(name)
    return labels.outputs.get(name, ()) or (labels.outputs.get(with_id[1], ()) if with_id else ())


def check_weights_file(params: ImagesParams) -> None:
    """Check params.weights, if it is the path of a file: a missing one must not be noticed after the start of ranks.

    Raises UsageError.
    """
    weights = params.weights
    if weights is None or WEIGHTS_NAME.fullmatch(weights) or names_model(weights):
        return
    path = Path(weights).expanduser()
    if not path.is_file():
        raise UsageError(
            f"there are no weights {shorten(str(path.absolute()), 300)}: params.weights is the path of a file that the "
            "command and all ranks can read"
        )


def labels_of(params: ImagesParams) -> Labels | None:
    """The labels in params.label_map, if set. Raises UsageError, also if their number is not that of the weights."""
    if params.label_map is None:
        return None
    n_outputs = N_OUTPUTS if params.weights is not None and WEIGHTS_NAME.fullmatch(params.weights) else None
    return read_labels(Path(params.label_map).expanduser(), n_outputs)
