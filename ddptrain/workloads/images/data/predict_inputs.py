"""What predict is given to classify: files, folders, patterns and URLs become single images, one after the other."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from ddptrain.config.wording import shown
from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.redact import hide_credentials
from ddptrain.storage.base import Location, StoreMissing, open_store
from ddptrain.workloads.images.data.listing import SUFFIXES

_SUFFIXES = tuple(sorted(SUFFIXES))
_PATTERN = re.compile(r"[*?\[]")
_MOST_TOLD = 10


@dataclass(frozen=True, slots=True)
class Given:
    """One image: its name as people know it, and its key in a store; without a location it is a file's path."""

    name: str
    key: str
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """What was asked for and can't be had; `exit_code` is that of a command that can do nothing else."""

    name: str
    reason: str
    exit_code: int = ExitCode.USAGE


class NothingGiven(DdptrainError):
    """None of what was asked for is an image that can be looked at."""

    def __init__(self, troubles: Iterable[Trouble]) -> None:
        told = [*troubles]
        self.exit_code = max((trouble.exit_code for trouble in told), default=ExitCode.USAGE)
        lines = [f"{shown(trouble.name, 300)}: {trouble.reason}" for trouble in told[:_MOST_TOLD]]
        more = [f"and {len(told) - _MOST_TOLD:,} more"] if len(told) > _MOST_TOLD else []
        super().__init__("\n  ".join(["nothing to classify:", *lines, *more] if told[1:] else lines))


def images_of(arguments: Iterable[str], options: Mapping[str, Any]) -> Iterator[Given | Trouble]:
    """The images of all arguments, in their order and then by name; folders are entered, whatever their layout.

    `options` are those of stores, as fsspec names them. Nothing is kept: there may be a great many.

    Raises: NothingGiven where there is not a single image.
    """
    found = chain.from_iterable(_of(argument, options) for argument in arguments)
    troubles: list[Trouble] = []
    for one in found:
        if isinstance(one, Given):
            return chain(troubles, [one], found)
        troubles.append(one)
    raise NothingGiven(troubles)


def is_image(name: str) -> bool:
    """Whether a file of that name is taken for an image where it was not asked for by its name."""
    return name.lower().endswith(_SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def in_words(reason: object, name: str) -> str:
    """What a store says of a place or an image, without its name, and with the command's names of the options."""
    told = str(reason).replace("params.source_options", "--source-option").replace("params.source", "the address")
    told = told.replace(f"the address {name}", name).replace("no longer there", "not there")
    return told.replace(f"{name}: ", "").removeprefix(f"{name} ")


def _of(argument: str, options: Mapping[str, Any]) -> Iterator[Given | Trouble]:
    if argument.startswith("file://"):
        argument = argument.removeprefix("file://")
    elif "://" in argument:
        return _of_url(argument, options)
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        return _or_none(_below(path, set()), argument)
    if not os.path.lexists(path) and _PATTERN.search(path):
        return _or_none(_of_pattern(path), argument, "no image fits the pattern")
    return iter([Given(path, path) if os.path.exists(path) else Trouble(argument, "no such file or folder")])


def _or_none(
    found: Iterator[Given | Trouble], name: str, reason: str = f"no images in it ({', '.join(_SUFFIXES)})"
) -> Iterator[Given | Trouble]:
    """What is found, or that there is nothing."""
    first = next(found, None)
    yield Trouble(name, reason) if first is None else first
    yield from found


def _below(folder: str, entered: set[tuple[int, int]]) -> Iterator[Given | Trouble]:
    """The images below a folder; links are followed, and no folder is entered twice, so that circles end."""
    try:
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in entered:
            return
        entered.add((state.st_dev, state.st_ino))
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries)
    except OSError as error:
        yield Trouble(folder, error.strerror or str(error))
        return
    for name, is_folder in found:
        path = os.path.join(folder, name)
        if is_folder and not name.startswith("."):
            yield from _below(path, entered)
        elif not is_folder and is_image(name):
            yield Given(path, path)


def _of_pattern(pattern: str) -> Iterator[Given | Trouble]:
    """The images that a pattern of the shell fits, ** included, and those of folders that it fits."""
    for path in sorted(glob.glob(pattern, recursive=True)):
        if is_image(path) and not os.path.isdir(path):
            yield Given(path, path)
        elif os.path.isdir(path) and "**" not in pattern:
            yield from _below(path, set())


def _of_url(url: str, options: Mapping[str, Any]) -> Iterator[Given | Trouble]:
    """The image at a URL, or those below it."""
    parts = urlsplit(url)
    is_web = parts.scheme.lower() in ("http", "https")
    if is_web and parts.query:  # a signed address, say: no part of it can be left out
        return iter([Given(hide_credentials(url), "", Location(url, options))])
    if is_image(url):
        folder, _, name = url.rpartition("/")
        return iter([Given(hide_credentials(url), name, Location(folder, options))])
    return _listed(Location(url.rstrip("/"), options))


def _listed(location: Location) -> Iterator[Given | Trouble]:
    any_there = False
    try:
        for listed in open_store(location).listing():
            if is_image(listed.key):
                any_there = True
                yield Given(f"{location.words}/{listed.key}", listed.key, location)
    except DdptrainError as error:
        yield Trouble(location.words, in_words(error, location.words), error.exit_code)
        return
    if not any_there:
        yield Trouble(location.words, f"no images below it ({', '.join(_SUFFIXES)})", StoreMissing.exit_code)
