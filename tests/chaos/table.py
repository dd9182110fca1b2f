"""The table of cases: fault, moment, victim, with or without a restart, and cluster."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

STEPS = 12  # of the stub

_RAISES = ("raise", "exit3")
_SILENT = ("os_exit0", "os_exit5", "kill", "segv", "abort")
_OURS = ("server", "store", "worker")
_DRIVER = ("driver_kill", "driver_term", "driver_int")
# Runs in these can share a cluster that is up: it is as good as new afterwards.
_HARMLESS = frozenset(
    {
        *_RAISES,
        *_SILENT,
        *_DRIVER,
        "thread",
        "driver_stop",
        "driver_twice",
        "hang",
        "stop",
        "term",
        "early",
        "loader",
        "raise_slow",
        "no_space",
    }
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table, without the random parameters."""

    fault: str
    moment: str
    victim: str  # "0", "1", "both"; for faults that are not of a rank: the rank that causes them
    restart: bool = False
    # "warm": running, shared by cases; "own": running, for this case; "embedded"
    cluster: str = "warm"
    resumes: int = 1  # commands that resume the run at the same time

    @property
    def words(self) -> str:
        """The text that --only searches."""
        restart = " restart" if self.restart else ""
        overlapping = " overlapping resumes" if self.resumes > 1 else ""
        return f"{self.fault} at {self.moment} by {self.victim}{restart} on {self.cluster}{overlapping}"


@dataclass(frozen=True, slots=True)
class Case:
    """A case with its random parameters, which depend only on seed and number."""

    seed: int
    number: int
    kind: Kind
    step: int
    share: float  # position of the fault, as a fraction of all bytes of all checkpoints
    operation: int  # number of the driver's file operation
    settle_s: float
    asynchronous: bool
    interval: int  # steps between two checkpoints; 3 steps are an epoch
    sharded: bool = False  # FSDP2: each rank writes its part of a checkpoint

    @property
    def saves(self) -> int:
        """The number of checkpoints of a run without a fault."""
        return STEPS // self.interval

    @property
    def words(self) -> str:
        """The case in one line."""
        where = {"write": f", {self.share:.2%} of all bytes", "home": f", operation {self.operation}"}.get(
            self.kind.moment, ""
        )
        step = f", step {self.step}" if self.kind.moment in ("first", "mid") else ""
        how = f"{'' if self.asynchronous else ', synchronous'}, saved every {self.interval} steps"
        return f"{self.kind.words}{step}{where}{how}{', sharded' if self.sharded else ''}"

    @property
    def reproduction(self) -> str:
        """The command line that repeats it."""
        return f"python -m tests.chaos --seed {self.seed} --case {self.number}{' --sharded' if self.sharded else ''}"

    @property
    def ranks(self) -> list[int]:
        """The rank that causes the fault."""
        return [0, 1] if self.kind.victim == "both" else [int(self.kind.victim)]


def kinds() -> list[Kind]:
    """All rows."""
    return [*_of_ranks(), *_of_ours(), *_of_drivers(), *_of_what_is_no_failure()]


def _of_what_is_no_failure() -> Iterator[Kind]:
    """What a run must survive: a silent validation, and slow steps."""
    for victim in ("0", "1", "both"):
        yield Kind("validate", "mid", victim)
        yield Kind("slow", "mid", victim)


def _of_ranks() -> Iterator[Kind]:
    for fault in _RAISES:
        for moment in ("import", "first", "mid", "write", "end"):
            yield from _restarts(fault, moment, ("0", "1", "both") if moment != "write" else ("0", "1"))
    for fault in _SILENT:
        for moment in ("import", "rendezvous", "first", "mid", "write", "end"):
            both = ("both",) if moment in ("import", "mid") else ()
            yield from _restarts(fault, moment, ("0", *(("1",) if moment != "write" else ()), *both))
    for fault in ("other_kill", "other_stop"):
        yield from _restarts(fault, "write", ("0",))
    for moment in ("first", "mid", "end"):
        yield from _restarts("hang", moment, ("0", "1"))
    for moment in ("rendezvous", "mid", "write", "end"):
        yield from _restarts("stop", moment, ("0", *(("1",) if moment != "write" else ())))
    yield from _restarts("hang", "import", ("1",))
    yield from _restarts("early", "mid", ("0", "1"))
    yield from _restarts("loader", "mid", ("0", "1"))
    yield from _restarts("raise_slow", "mid", ("0", "1"))
    yield from _restarts("no_space", "write", ("0",))
    for moment in ("mid", "end"):
        yield from _restarts("thread", moment, ("0", "1"))
    for victim in ("0", "1", "both"):
        yield Kind("term", "mid", victim)
    yield Kind("term", "write", "0")
    yield Kind("kill", "start", "0")
    yield Kind("kill", "start", "1")


def _of_ours() -> Iterator[Kind]:
    for fault in _OURS:
        for moment in ("import", "rendezvous", "first", "mid", "write", "end"):
            victim = "1" if moment in ("import", "rendezvous") else "0"
            yield Kind(fault, moment, victim, False, "embedded")
            if moment in ("mid", "write"):
                yield Kind(fault, moment, victim, True, "embedded")
                yield Kind(fault, moment, victim, False, "own")
    for moment in ("first", "mid", "write"):
        yield Kind("scheduler", moment, "0", False, "own")
    yield Kind("server", "mid", "0", True, "own")
    for moment in ("mid", "write"):
        yield Kind("worker_term", moment, "0", False, "own")
        yield Kind("worker_term", moment, "0", False, "embedded")


def _of_drivers() -> Iterator[Kind]:
    for fault in _DRIVER:
        for moment in ("start", "import", "rendezvous", "first", "mid", "write", "end"):
            yield Kind(fault, moment, "0" if moment in ("mid", "write") else "1")
        for moment in ("start", "mid", "write"):
            yield Kind(fault, moment, "0", False, "embedded")
    for moment in ("mid", "write", "end"):
        yield Kind("driver_stop", moment, "0")  # for two seconds
        yield Kind("driver_twice", moment, "0")  # SIGTERM, and again
    for _ in range(12):
        yield Kind("driver_kill", "home", "0")
    for moment in ("mid", "write"):
        yield Kind("driver_kill", moment, "0", resumes=2)


def _restarts(fault: str, moment: str, victims: tuple[str, ...]) -> Iterator[Kind]:
    for victim in victims:
        yield Kind(fault, moment, victim)
        if victim != "both" or moment == "mid":
            yield Kind(fault, moment, victim, restart=True)


def cases(seed: int, count: int, only: str, *, sharded: bool = False) -> Iterator[Case]:
    """The first `count` cases whose text contains all words of `only`."""
    if not any(_matches(kind, only) for kind in kinds()):
        return
    numbered = (case(seed, number, sharded=sharded) for number in itertools.count())
    yield from itertools.islice((found for found in numbered if _matches(found.kind, only)), count)


def _matches(kind: Kind, only: str) -> bool:
    in_writes = {"writes"} if kind.moment in ("write", "home") else set()
    return {*only.split()} <= {*kind.words.split()} | in_writes


def case(seed: int, number: int, *, sharded: bool = False) -> Case:
    """The case with a number. Each row is used once before any row is used again."""
    rows = kinds()
    turn, place = divmod(number, len(rows))
    random.Random(f"{seed}/{turn}").shuffle(rows)
    kind = rows[place]
    chance = random.Random(f"{seed}/{number}/{kind.words}")
    if kind.cluster == "warm" and kind.fault in _HARMLESS and chance.random() < 0.08:
        kind = replace(kind, cluster="embedded")
    interval = chance.choice((2, 3))
    return Case(
        seed=seed,
        number=number,
        kind=kind,
        step=_step(kind, interval, chance),
        share=chance.uniform(0.0, _last_share(kind.fault)),
        operation=chance.randrange(1, 60),
        settle_s=0.3 if kind.moment != "mid" or chance.random() < 0.7 else 0.0,
        asynchronous=not kind.fault.startswith("other_") and chance.random() < 0.7,
        interval=interval,
        sharded=sharded,
    )


def _last_share(fault: str) -> float:
    """The upper limit of `share`: a fault that needs another checkpoint after it must occur early."""
    if fault in ("term", "worker_term", "driver_term"):
        return 0.49
    return 0.74 if fault.startswith("other_") else 0.999


def _step(kind: Kind, interval: int, chance: random.Random) -> int:
    if kind.moment == "first":
        return 1
    if kind.moment == "write":  # faults of the main thread occur after a checkpoint
        return interval * chance.randrange(1, STEPS // interval + 1)
    return chance.randrange(2, STEPS + 1)
