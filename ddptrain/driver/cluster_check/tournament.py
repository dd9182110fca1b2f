"""Which pairs of hosts measure at the same time."""

from __future__ import annotations


def rounds(hosts: int, most: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rounds of a round-robin tournament: in each, every host is in one pair; after all of them each pair has met once.

    At most `most` rounds; each host then has met so many others. With an odd number of hosts one rests in each round.
    """
    if hosts < 2:
        return ()
    circle: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    found = []
    for _ in range(min(most, len(circle) - 1)):
        half = len(circle) // 2
        pairs = [
            (min(a, b), max(a, b))
            for a, b in zip(circle[:half], reversed(circle[half:]), strict=True)
            if a is not None and b is not None
        ]
        found.append(tuple(sorted(pairs)))
        circle = [circle[0], circle[-1], *circle[1:-1]]  # the first stays, the others move on
    return tuple(found)
