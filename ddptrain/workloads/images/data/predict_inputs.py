"""The inputs of `predict`: expands files and folders to single images, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.workloads.images.data.listing import SUFFIXES

_SUFFIXES = tuple(sorted(SUFFIXES))
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class PredictInput:
    """One image: the path of its file."""

    name: str


@dataclass(frozen=True, slots=True)
class InputProblem:
    """An input that can't be read."""

    name: str
    reason: str


def find_images(arguments: Iterable[str]) -> Iterator[PredictInput | InputProblem]:
    """The images of all arguments, in the order of the arguments, then by name; folders are searched recursively.

    The images are not kept in memory: there may be millions. Raises UsageError if there is not a single image.
    """
    inputs = chain.from_iterable(map(_expand, arguments))
    problems: list[InputProblem] = []
    for item in inputs:
        if isinstance(item, PredictInput):
            return chain(problems, [item], inputs)
        problems.append(item)
    lines = [f"{shorten(problem.name, 300)}: {problem.reason}" for problem in problems[:_MOST_NAMED]]
    more = [f"and {len(problems) - _MOST_NAMED:,} more"] if len(problems) > _MOST_NAMED else []
    raise UsageError("\n  ".join(["nothing to classify:", *lines, *more] if problems[1:] else lines))


def _expand(argument: str) -> Iterator[PredictInput | InputProblem]:
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        found = _below(path, set())
        yield next(found, InputProblem(argument, f"no images in it ({', '.join(_SUFFIXES)})"))
        yield from found
    elif os.path.exists(path):
        yield PredictInput(path)
    elif "://" in argument:
        yield InputProblem(hide_credentials(argument), "predict takes files and folders; download it first")
    else:
        yield InputProblem(argument, "no such file or folder")


def _below(folder: str, entered: set[tuple[int, int]]) -> Iterator[PredictInput | InputProblem]:
    """Yield the images below a folder. Links are followed; no folder is entered twice, so that cycles of links end."""
    try:
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in entered:
            return
        entered.add((state.st_dev, state.st_ino))
        with os.scandir(folder) as entries:
            children = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        yield InputProblem(folder, error.strerror or str(error))
        return
    for name, is_folder in children:
        path = os.path.join(folder, name)
        if is_folder:
            yield from _below(path, entered)
        elif name.lower().endswith(_SUFFIXES):
            yield PredictInput(path)
