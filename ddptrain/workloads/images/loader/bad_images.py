"""Images that could not be had: named once each, replaced in training, and the end of a run where they are too many."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ddptrain.config.wording import shown
from ddptrain.errors import TrainingFailed

if TYPE_CHECKING:
    from ddptrain.workloads.images.data.manifest import Manifest

_NAMED = 20
_LONGEST = 500  # of a key or a reason, in characters


class TooManyBadImages(TrainingFailed):
    """More images are missing or damaged than params.max_bad_fraction allows; the message lists them."""


def check_bad(n_bad: int, n_images: int, max_fraction: float, named: Mapping[str, str]) -> None:
    """Pass where at most that fraction of all images is bad; `named` are keys, perhaps some of them, and reasons.

    Raises: TooManyBadImages.
    """
    if n_bad <= max_fraction * n_images:
        return
    listed = "".join(f"\n  {_told(key, reason)}" for key, reason in list(named.items())[:_NAMED])
    more = f"\n  and {n_bad - _NAMED} more" if n_bad > _NAMED else ""
    raise TooManyBadImages(
        f"{n_bad} of {n_images:,} images could not be read, which is more than params.max_bad_fraction "
        f"{max_fraction:g} allows: mend them, or raise it\n{listed.strip(chr(10))}{more}"
    )


class BadImages:
    """Those that this rank has met: place in manifest.keys -> reason."""

    def __init__(self, manifest: Manifest, max_fraction: float, tell: Callable[[str], None]) -> None:
        self.reasons: dict[int, str] = {}
        self._manifest, self._max_fraction, self._tell = manifest, max_fraction, tell
        self._of_label: dict[int, list[int]] = {}
        for index in manifest.train:
            self._of_label.setdefault(manifest.labels[index], []).append(index)

    def add(self, index: int, reason: str) -> None:
        """Takes note of an image, and says so the first time. Raises: TooManyBadImages."""
        if index in self.reasons:
            return
        self.reasons[index] = reason
        self._tell(f"bad image {_told(self._manifest.name(index), reason)}")
        n_images = len(self._manifest.train) + len(self._manifest.val)
        check_bad(len(self.reasons), n_images, self._max_fraction, self.by_key())

    def by_key(self) -> dict[str, str]:
        """Name -> reason, in the order in which they were met."""
        return {self._manifest.name(index): reason for index, reason in self.reasons.items()}

    def others(self, index: int, seed: int) -> Iterator[int]:
        """Other training images of the same class, in an order that `seed` gives, less those known to be bad.

        Which image stands in for another depends on nothing else, however many ranks there are.
        Raises: TooManyBadImages after the last one.
        """
        label = self._manifest.labels[index]
        known = self._of_label.get(label, [])
        begin = random.Random(seed).randrange(max(1, len(known)))
        for other in known[begin:] + known[:begin]:
            if other != index and other not in self.reasons:
                yield other
        raise TooManyBadImages(
            f"no image of class {shown(self._manifest.classes[label])} could be read, the last one being "
            f"{_told(self._manifest.name(index), self.reasons.get(index, ''))}; mend one, or leave the class out, by "
            "params.subset"
        )


def _told(key: str, reason: str) -> str:
    """Which and why, in one line: names of files, and what is said of them, may hold anything."""
    return f"{shown(key, _LONGEST)}: {shown(reason, _LONGEST)}"
