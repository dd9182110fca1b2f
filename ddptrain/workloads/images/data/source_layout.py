"""Detects sources that are split into folders: train/CLASS/.. and val/CLASS/.., perhaps also test/CLASS/.."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddptrain.config.wording import listed
from ddptrain.errors import UsageError

TRAIN = "train"
VALIDATION = ("val", "valid", "validation")
TEST = "test"
_NAMES = frozenset({TRAIN, *VALIDATION, TEST})
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """The folders of a split source, as they are spelled; `val` is "" if there is no such folder."""

    train: str
    val: str = ""
    unused: tuple[str, ...] = ()


def is_split_folder(name: str) -> bool:
    """Return whether a folder of this name is a part of a split source, not a class, if the source is split."""
    return name.lower() in _NAMES


def detect(
    folders: Mapping[str, int], where: str, subset: int | Sequence[str] | None = None, *, has_val_source: bool = False
) -> SourceLayout | None:
    """Return the layout of a split source; None if its folders are classes.

    `folders`: the top-level folders, each with its number of class folders; 0 if images are directly in it, or if it
    has no images. A source is split if `train` contains only class folders and the other folders are val, valid,
    validation or test. If a list `subset` names one of these folders, they are classes.

    Raises UsageError if the source is ambiguous, or is split in a way that can't be used.
    """
    parts = {name: n_classes for name, n_classes in folders.items() if is_split_folder(name)}
    if not parts or (not isinstance(subset, int | None) and parts.keys() & set(subset)):
        return None
    train = [name for name in parts if name.lower() == TRAIN]
    val = sorted(name for name in parts if name.lower() in VALIDATION)
    others = sorted(folders.keys() - parts.keys())
    if others:
        _check_others_are_classes(parts, train, others, where)
        return None
    if not train:
        if len(parts) == 1:
            return None  # a single class: the error for that has the better hint
        raise UsageError(f"{where} holds {_named(sorted(parts))} and no train: {_how_to_say(where)}")
    _check_parts(parts, train, val, where, has_val_source=has_val_source)
    used = "" if has_val_source or not val else val[0]
    return SourceLayout(train[0], used, tuple(sorted(parts.keys() - {train[0], used})))


def _check_others_are_classes(
    parts: Mapping[str, int], train: Sequence[str], others: Sequence[str], where: str
) -> None:
    """Raise UsageError if `train` looks like a part of a split source but other folders are no parts."""
    if train and parts[train[0]] >= 2:
        raise UsageError(
            f"{where} holds {train[0]} with {parts[train[0]]} folders in it, as a split data set does, and also "
            f"{_named(others)}: {_how_to_say(where)}; if each of these folders is a class, list the classes in "
            "params.subset"
        )


def _check_parts(
    parts: Mapping[str, int], train: Sequence[str], val: Sequence[str], where: str, *, has_val_source: bool
) -> None:
    if len(train) > 1 or (len(val) > 1 and not has_val_source):
        raise UsageError(f"{where} holds {_named([*train, *val])}, which name the same part: {_how_to_say(where)}")
    used = train if has_val_source else [*train, *val]
    if flat := [name for name in used if not parts[name]]:
        raise UsageError(
            f"{where} is split into {_named(sorted(parts))}, and {_named(flat)} has no images in class folders: "
            f"each part has to hold a folder of images for each class, as {where}/{train[0]}/CLASS/IMAGE; if these "
            "folders are the classes, list them in params.subset"
        )


def _how_to_say(where: str) -> str:
    return (
        "give the folder of the images to train on as params.source, and that of the images to validate with as "
        f"params.val_source, such as {where}/train and {where}/val"
    )


def _named(names: Sequence[str]) -> str:
    return listed([f"{name}/" for name in names], _MOST_NAMED)


def check_classes_agree(train: Sequence[str], used: Sequence[str], val: Sequence[str], where: str) -> None:
    """Check that the validation folder `where` has all classes that are used, and none that training lacks.

    Raises UsageError.
    """
    if unknown := sorted(set(val) - set(train)):
        raise UsageError(
            f"{where}, the folder of the images to validate with, has folders that are not classes of the "
            f"training data: {_named(unknown)}; its classes must have the names of those in training: {_named(train)}"
        )
    if missing := sorted(set(used) - set(val)):
        raise UsageError(
            f"{where}, the folder of the images to validate with, has no images of {_named(missing)}: it needs some "
            "of every class that is trained; add them, or leave these classes out with params.subset"
        )
