"""Splits images, per class and by seed, independently of the order of the listing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence


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
