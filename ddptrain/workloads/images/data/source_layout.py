"""Detects a source that is split into folders: train/CLASS/.. beside val/CLASS/.., perhaps with test/CLASS/.."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddptrain.config.wording import shown
from ddptrain.errors import UsageError

TRAIN = "train"
VALIDATION = ("val", "valid", "validation")
TEST = "test"
_NAMES = frozenset({TRAIN, *VALIDATION, TEST})
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of a split source, as they are spelled there; `val` is "" where there is none."""

    train: str
    val: str = ""
    unused: tuple[str, ...] = ()


def is_split_folder(name: str) -> bool:
    """Whether a folder of this name is a part of a data set, not a class, where a source is split."""
    return name.lower() in _NAMES


def detect(
    folders: Mapping[str, int], where: str, subset: int | Sequence[str] | None = None, *, has_val_source: bool = False
) -> Layout | None:
    """The layout of a source, or None where its folders are classes.

    `folders` are the source's own folders: for each the number of class folders in it, 0 where images lie directly in
    it, or where there are none. A source is split where `train` holds class folders only, and the other folders are
    val, valid, validation or test. A list `subset` that names one of these folders says that they are classes.

    Raises: UsageError where the source could be either, or is split in a way that can't be used.
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
            return None  # one class: the error that says so tells what to do
        raise UsageError(f"{where} holds {_named(sorted(parts))} and no train: {_how_to_say(where)}")
    _check_parts(parts, train, val, where, has_val_source=has_val_source)
    used = "" if has_val_source or not val else val[0]
    return Layout(train[0], used, tuple(sorted(parts.keys() - {train[0], used})))


def _check_others_are_classes(
    parts: Mapping[str, int], train: Sequence[str], others: Sequence[str], where: str
) -> None:
    """Raises UsageError where `train` looks like a part of a data set, and there are folders that are no parts."""
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
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return ", ".join(f"{shown(name, 40)}/" for name in names[:_MOST_NAMED]) + more


def check_classes_agree(train: Sequence[str], used: Sequence[str], val: Sequence[str], where: str) -> None:
    """Pass where the validation folder `where` has every class that is used, and none that training lacks.

    Raises: UsageError.
    """
    if unknown := sorted(set(val) - set(train)):
        raise UsageError(
            f"{where}, the folder of the images to validate with, has folders that are no classes of the training "
            f"data: {_named(unknown)}; its classes must have the names of those in training: {_named(train)}"
        )
    if missing := sorted(set(used) - set(val)):
        raise UsageError(
            f"{where}, the folder of the images to validate with, has no images of {_named(missing)}: it needs some "
            "of every class that is trained; add them, or leave these classes out with params.subset"
        )
