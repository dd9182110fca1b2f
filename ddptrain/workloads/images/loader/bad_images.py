"""Unreadable images: each is reported once and replaced in training; the run fails if there are too many."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from ddptrain.config.wording import shorten
from ddptrain.errors import TrainingFailed
from ddptrain.workloads.images.data.manifest import Manifest

_MOST_NAMED = 20
_LONGEST = 500  # characters of a key or a reason


class TooManyBadImages(TrainingFailed):
    """More images are unreadable than params.max_bad_fraction allows; the message lists them."""


def check_bad(n_bad: int, n_images: int, max_fraction: float, named: Mapping[str, str]) -> None:
    """Check that at most a fraction of all images is bad; `named` has names and reasons, perhaps of some only.

    Raises TooManyBadImages.
    """
    if n_bad <= max_fraction * n_images:
        return
    listed = "".join(f"\n  {_one_line(key, reason)}" for key, reason in list(named.items())[:_MOST_NAMED])
    more = f"\n  and {n_bad - _MOST_NAMED} more" if n_bad > _MOST_NAMED else ""
    raise TooManyBadImages(
        f"{n_bad} of {n_images:,} images could not be read, which is more than params.max_bad_fraction "
        f"{max_fraction:g} allows: repair them, or raise it{listed}{more}"
    )


class BadImages:
    """The unreadable images that this rank found: index in manifest.keys -> reason."""

    def __init__(self, manifest: Manifest, max_fraction: float, tell: Callable[[str], None]) -> None:
        self.reasons: dict[int, str] = {}
        self._manifest, self._max_fraction, self._tell = manifest, max_fraction, tell
        self._of_label: dict[int, list[int]] = {}
        for index in manifest.train:
            self._of_label.setdefault(manifest.labels[index], []).append(index)

    def add(self, index: int, reason: str) -> None:
        """Record an image, and report it the first time. Raises TooManyBadImages."""
        if index in self.reasons:
            return
        self.reasons[index] = reason
        self._tell(f"bad image {_one_line(self._manifest.name(index), reason)}")
        n_images = len(self._manifest.train) + len(self._manifest.val)
        check_bad(len(self.reasons), n_images, self._max_fraction, self.by_key())

    def by_key(self) -> dict[str, str]:
        """Name -> reason, in the order in which they were found."""
        return {self._manifest.name(index): reason for index, reason in self.reasons.items()}

    def others(self, index: int, seed: int) -> Iterator[int]:
        """Yield replacements for an image: training images of its class that are not known to be bad.

        Their order depends only on `seed`, so the replacement is the same for any number of ranks.
        Raises TooManyBadImages after the last one.
        """
        label = self._manifest.labels[index]
        known = self._of_label.get(label, [])
        begin = random.Random(seed).randrange(max(1, len(known)))
        for other in known[begin:] + known[:begin]:
            if other != index and other not in self.reasons:
                yield other
        raise TooManyBadImages(
            f"no image of class {shorten(self._manifest.classes[label])} could be read, the last one being "
            f"{_one_line(self._manifest.name(index), self.reasons.get(index, ''))}; repair one, or leave the class out "
            "with params.subset"
        )


def _one_line(key: str, reason: str) -> str:
    """Return name and reason in one short line, without control characters: neither of them can be trusted."""
    return f"{shorten(key, _LONGEST)}: {shorten(reason, _LONGEST)}"
