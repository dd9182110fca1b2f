"""The inputs of `predict`: expands files, folders, patterns and URLs to single images, one after the other."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import Location, StoreMissing, open_store
from ddptrain.workloads.images.data.listing import SUFFIXES

_SUFFIXES = tuple(sorted(SUFFIXES))
_PATTERN = re.compile(r"[*?\[]")
_MOST_TOLD = 10


@dataclass(frozen=True, slots=True)
class PredictInput:
    """One image: its name for the user, and its key in a store; without a location the key is a local path."""

    name: str
    key: str
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class InputProblem:
    """An input that can't be read; `exit_code` is that of the command if it has no other input."""

    name: str
    reason: str
    exit_code: int = ExitCode.USAGE


class NoInputs(DdptrainError):
    """None of the arguments of `predict` is a readable image."""

    def __init__(self, problems: Sequence[InputProblem]) -> None:
        self.exit_code = max((problem.exit_code for problem in problems), default=ExitCode.USAGE)
        lines = [f"{shorten(problem.name, 300)}: {problem.reason}" for problem in problems[:_MOST_TOLD]]
        more = [f"and {len(problems) - _MOST_TOLD:,} more"] if len(problems) > _MOST_TOLD else []
        super().__init__("\n  ".join(["nothing to classify:", *lines, *more] if problems[1:] else lines))


def find_images(arguments: Iterable[str], options: Mapping[str, Any]) -> Iterator[PredictInput | InputProblem]:
    """The images of all arguments, in the order of the arguments, then by name; folders are searched recursively.

    `options` are fsspec's options of stores. The images are not kept in memory: there may be millions.

    Raises NoInputs if there is not a single image.
    """
    inputs = chain.from_iterable(_expand(argument, options) for argument in arguments)
    problems: list[InputProblem] = []
    for item in inputs:
        if isinstance(item, PredictInput):
            return chain(problems, [item], inputs)
        problems.append(item)
    raise NoInputs(problems)


def is_image(name: str) -> bool:
    """Return whether a file in a folder or a listing counts as an image, by its name."""
    return name.lower().endswith(_SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def describe_reason(reason: object, name: str) -> str:
    """A store's error message without the image's name, and with the options of the command instead of parameters."""
    text = str(reason).replace("params.source_options", "--source-option").replace("params.source", "the address")
    text = text.replace(f"the address {name}", name).replace("no longer there", "not there")
    return text.replace(f"{name}: ", "").removeprefix(f"{name} ")


def _expand(argument: str, options: Mapping[str, Any]) -> Iterator[PredictInput | InputProblem]:
    if argument.startswith("file://"):
        argument = argument.removeprefix("file://")
    elif "://" in argument:
        return _expand_url(argument, options)
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        return _or_problem(_below(path, set()), argument)
    if not os.path.lexists(path) and _PATTERN.search(path):
        return _or_problem(_expand_pattern(path), argument, "no image matches the pattern")
    exists = os.path.exists(path)
    return iter([PredictInput(path, path) if exists else InputProblem(argument, "no such file or folder")])


def _or_problem(
    inputs: Iterator[PredictInput | InputProblem], name: str, reason: str = f"no images in it ({', '.join(_SUFFIXES)})"
) -> Iterator[PredictInput | InputProblem]:
    """Yield the inputs that were found, or a problem if there are none."""
    first = next(inputs, None)
    yield InputProblem(name, reason) if first is None else first
    yield from inputs


def _below(folder: str, entered: set[tuple[int, int]]) -> Iterator[PredictInput | InputProblem]:
    """Yield the images below a folder. Links are followed; no folder is entered twice, so that cycles of links end."""
    try:
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in entered:
            return
        entered.add((state.st_dev, state.st_ino))
        with os.scandir(folder) as entries:
            children = sorted((entry.name, entry.is_dir()) for entry in entries)
    except OSError as error:
        yield InputProblem(folder, error.strerror or str(error))
        return
    for name, is_folder in children:
        path = os.path.join(folder, name)
        if is_folder and not name.startswith("."):
            yield from _below(path, entered)
        elif not is_folder and is_image(name):
            yield PredictInput(path, path)


def _expand_pattern(pattern: str) -> Iterator[PredictInput | InputProblem]:
    """Yield the images that match a shell pattern (** included), and those below matching folders."""
    for path in sorted(glob.glob(pattern, recursive=True)):
        if is_image(path) and not os.path.isdir(path):
            yield PredictInput(path, path)
        elif os.path.isdir(path) and "**" not in pattern:
            yield from _below(path, set())


def _expand_url(url: str, options: Mapping[str, Any]) -> Iterator[PredictInput | InputProblem]:
    """Return the image at a URL, or those below it."""
    parts = urlsplit(url)
    is_web = parts.scheme.lower() in ("http", "https")
    if is_web and parts.query:  # such as a signed URL: it must be used as a whole
        return iter([PredictInput(hide_credentials(url), "", Location(url, options))])
    if is_image(url):
        folder, _, name = url.rpartition("/")
        return iter([PredictInput(hide_credentials(url), name, Location(folder, options))])
    return _list(Location(url.rstrip("/"), options))


def _list(location: Location) -> Iterator[PredictInput | InputProblem]:
    is_empty = True
    try:
        for listed in open_store(location).listing():
            if is_image(listed.key):
                is_empty = False
                yield PredictInput(f"{location.description}/{listed.key}", listed.key, location)
    except DdptrainError as error:
        yield InputProblem(location.description, describe_reason(error, location.description), error.exit_code)
        return
    if is_empty:
        yield InputProblem(location.description, f"no images below it ({', '.join(_SUFFIXES)})", StoreMissing.exit_code)
