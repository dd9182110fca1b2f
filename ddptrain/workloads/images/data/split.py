"""Selects and splits images, per class and by seed, independently of the order of the listing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence


def sample(by_class: Mapping[str, Sequence[str]], share: float, seed: int) -> dict[str, list[str]]:
    """Return the selected keys of each class, sorted: `share` of all keys, rounded, and at least one per class.

    The selection depends only on the seed and the set of keys.
    """
    if share >= 1.0:
        return {name: sorted(keys) for name, keys in by_class.items()}
    return {name: sorted(kept) for name, (kept, _) in _parted(by_class, share, seed, "sample").items()}


def split(by_class: Mapping[str, Sequence[str]], train_share: float, seed: int) -> tuple[set[str], set[str]]:
    """Return the keys for training and those for validation: at least one key of each class is for training.

    Of all keys together `train_share` (rounded) are for training; in each class the number differs by one at most. The
    split depends only on the seed and the set of keys.
    """
    if train_share >= 1.0:
        return {key for keys in by_class.values() for key in keys}, set()
    parts = _parted(by_class, train_share, seed, "split").values()
    return {key for train, _ in parts for key in train}, {key for _, val in parts for key in val}


def _parted(
    by_class: Mapping[str, Sequence[str]], share: float, seed: int, purpose: str
) -> dict[str, tuple[list[str], list[str]]]:
    """Return each class's keys in two parts; `share` of them are in the first."""
    sizes = _sizes({name: len(keys) for name, keys in by_class.items()}, share, seed, purpose)
    parts = {}
    for name, keys in by_class.items():
        drawn = _drawn(keys, seed, purpose)
        parts[name] = drawn[: sizes[name]], drawn[sizes[name] :]
    return parts


def _sizes(totals: Mapping[str, int], share: float, seed: int, purpose: str) -> dict[str, int]:
    """Return the size of each class's first part, by the largest remainder, so that the sum is exact; at least 1."""
    exact = {name: total * share for name, total in totals.items()}
    sizes = {name: int(exact[name]) for name in totals}
    missing = round(sum(totals.values()) * share) - sum(sizes.values())
    drawn = {name: position for position, name in enumerate(_drawn(totals, seed, purpose))}
    by_remainder = sorted(totals, key=lambda name: (sizes[name] - exact[name], drawn[name]))
    for name in by_remainder[: max(0, missing)]:
        sizes[name] += 1
    return {name: min(totals[name], max(1, size)) for name, size in sizes.items()}


def _drawn(names: Iterable[str], seed: int, purpose: str) -> list[str]:
    """Return the names in a pseudo-random order that depends only on the seed: the order of their hashes."""

    def ticket(name: str) -> tuple[bytes, str]:
        text = f"{purpose}/{seed}/{name}".encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=8).digest(), name

    return sorted(names, key=ticket)
