"""The images that a run has logged, as small pictures inside the page.

An image of a run directory is not copied: it is decoded and encoded again, so that a page contains only what this
program has written. Files that are too large, damaged, or of another format are left out.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ddptrain.file_ops import open_regular

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_FORMATS = ("PNG", "JPEG", "WEBP")
_LARGEST_FILE_BYTES = 16 << 20
_MOST_PIXELS = 32_000_000
_LONGEST_SIDE = 480  # of a picture in the page
_SMALL = 64  # pixels: it is shown enlarged, without smoothing
_MOST_GROUPS = 12
_MOST_OF_GROUP = 24
_STEP = re.compile(r"step-(\d{1,18})-")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a run: `source` is a data URL; `name` its file."""

    name: str
    source: str
    width: int
    height: int

    @property
    def is_small(self) -> bool:
        """Whether it is to be enlarged."""
        return max(self.width, self.height) <= _SMALL


class PictureReader:
    """Reads images below a folder."""

    def __init__(self, folder: Path, files: Mapping[str, int], most: int) -> None:
        """files: the files of the folder with their sizes; no other file is read. most: pictures that are read."""
        self._folder, self._files = folder, files
        self._left = most

    def read(self, path: str) -> Picture | None:
        """Return the picture of a file below the folder; None if it cannot be shown, or there are too many."""
        if not is_picture(path) or not 0 < self._files.get(path, 0) <= _LARGEST_FILE_BYTES or self._left <= 0:
            return None
        found = _encoded(self._folder / path)
        if found is None:
            return None
        data, kind, size = found
        self._left -= 1
        return Picture(PurePosixPath(path).name, f"data:image/{kind};base64,{data}", *size)

    def groups(self, taken: Iterable[str] = ()) -> list[tuple[str, list[Picture]]]:
        """Return the pictures below images/ by folder, those of the newest steps first, without the files `taken`."""
        skipped = set(taken)
        below: dict[str, list[str]] = {}
        for path in self._files:
            if is_picture(path) and path not in skipped:
                below.setdefault(path.rpartition("/")[0], []).append(path)
        groups = []
        for folder in sorted(below)[:_MOST_GROUPS]:
            newest = sorted(below[folder], key=lambda path: (-step_of_file(path), path))[:_MOST_OF_GROUP]
            pictures = [picture for path in newest if (picture := self.read(path)) is not None]
            if pictures:
                groups.append((folder.removeprefix("images/"), pictures))
        return groups


def is_picture(path: str) -> bool:
    """Return whether a file has the name of an image that can be shown."""
    return path.lower().endswith(_SUFFIXES)


def step_of_file(path: str) -> int:
    """Return the step in a name such as step-20-rank-0.png; -1 without one."""
    match = _STEP.search(PurePosixPath(path).name)
    return int(match[1]) if match else -1


def _encoded(path: Path) -> tuple[str, str, tuple[int, int]] | None:
    """Return the image as base64, its kind, and its size in pixels."""
    from PIL import Image

    try:
        with os.fdopen(open_regular(path), "rb") as file, Image.open(file, formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                return None
            image.draft("RGB", (_LONGEST_SIDE, _LONGEST_SIDE))  # a large JPEG is decoded smaller
            picture = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except Exception:  # a damaged image raises errors of many types
        return None
    picture.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    target = io.BytesIO()
    is_photo = max(picture.size) > 2 * _SMALL and picture.mode == "RGB"
    picture.save(target, "JPEG" if is_photo else "PNG", quality=85)
    return base64.b64encode(target.getvalue()).decode(), "jpeg" if is_photo else "png", picture.size
