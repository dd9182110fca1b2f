"""An attempt without processes: a clock, and fakes of what the attempt acts through, which note each call."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any, cast

from ddptrain.driver import inbox
from ddptrain.driver.attempt import Attempt, Moment
from ddptrain.driver.fault import Fault
from ddptrain.driver.output import Take
from ddptrain.driver.watchdog import Watchdog
from ddptrain.protocol import events
from ddptrain.protocol.commands import Command
from ddptrain.protocol.news import News, RankExit, RankNews
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.results.run_record import RankRecord
from tests.unit.driver.attempt.ranks import running

GRACE_S = 20.0
START_TIMEOUT_S = 30.0
LOST_AFTER_S = 60.0
PORT = 4711
START_S = 100.0

Call = tuple[Any, ...]  # the name of a method, and what matters of its arguments


class Play:
    """Ranks on hosts h0, h1, ... (two on each with `two_a_host`) to which the test lets things happen.

    It is itself the attempt's workers, output, transfers, recorder and display.
    """

    def __init__(
        self,
        world_size: int = 3,
        *,
        hang_timeout_s: float | None = None,
        two_a_host: bool = False,
        attempt: int = 1,
        **spec: Any,
    ) -> None:
        self.now = START_S
        self.done: list[tuple[float, Call]] = []
        self.unread: dict[int, list[events.Event]] = {}  # events in the files of a rank that is lost
        self.connected = True
        fields = {"grace_s": GRACE_S, "attempt": attempt, "world_size": world_size, "master_port": 0, **spec}
        ranks = [
            running(rank, f"h{rank // 2 if two_a_host else rank}", spec=fields, submitted_at=0.0)
            for rank in range(world_size)
        ]
        fake = cast(Any, self)
        watchdog = Watchdog(hang_timeout_s, START_TIMEOUT_S)
        self.attempt = Attempt(ranks, fake, fake, fake, fake, watchdog, self.moment())
        self.attempt.begin(self.moment())

    # --- what the attempt acts through ---

    def _note(self, *call: Any) -> None:
        self.done.append((self.now, call))

    def submit(self, specs: Sequence[RankSpec], chosen: Sequence[object]) -> None:
        assert len(specs) == len(chosen)
        self._note("submit", tuple(spec.rank for spec in specs), specs[0].group.master_port)

    def stop(self, specs: Sequence[RankSpec], grace_s: float) -> None:
        self._note("stop", tuple(spec.rank for spec in specs), grace_s)

    def tell(self, specs: Sequence[RankSpec], command: Command) -> None:
        self._note("tell", str(command), tuple(spec.rank for spec in specs))

    def forget(self, worker: str) -> None:
        self._note("forget", worker)

    def avoid(self, worker: str) -> None:
        self._note("avoid", worker)

    def reject(self, reason: str) -> None:
        self._note("reject", reason)

    def read(self, news: RankNews, take: Take) -> None:
        take([], "")

    def rest(self, rank: int) -> Iterator[events.Event]:
        self._note("rest", rank)
        return iter(self.unread.pop(rank, []))

    def refused(self, rank: int) -> int:
        return 0

    def add(self, rank: int, event: events.CheckpointSaved | events.FileSaved) -> None:
        self._note("transfer", rank, event)

    def training(self, ranks: tuple[RankRecord, ...]) -> None:
        self._note("training", len(ranks))

    def rank_ended(self, record: RankRecord, *, ok: bool, stopped: bool) -> None:
        self._note("ended", record.rank, ok, stopped)

    def warn(self, text: str, **more: object) -> None:
        self._note("text", text)

    notice = status = silence = hang_suspected = warn

    def fault(self, fault: Fault) -> None:
        self._note("fault", fault)

    def show_cause(self, fault: Fault, text: str) -> None:
        self._note("cause", fault)

    def stored(self, rank: int, path: str, step: int | None) -> None:
        self._note("stored", rank, path, step)

    def rank_numbers(self, *_: object) -> None:
        """Do nothing."""

    verdict = None
    rank_event = system = log_grew = rank_numbers

    # --- what happens ---

    def moment(self) -> Moment:
        return Moment(self.now, int(self.now * 1e9))

    def send(self, message: inbox.Message) -> None:
        self.attempt.on_message(message, self.moment())

    def news(self, rank: int = 0, *, store_port: int = 0, leaving: bool = False, **of_rank: Any) -> None:
        """The worker of a rank sends news."""
        parts = (RankNews(rank, **of_rank),) if of_rank else ()
        self.send(News(self.attempt.number, parts, store_port, leaving, worker=self.attempt.ranks[rank].worker))

    def start(self, *, entered: bool = True) -> Play:
        """The store opens, all ranks start, and enter the workload."""
        self.news(store_port=PORT)
        for rank in range(len(self.attempt.ranks)):
            self.event(rank, events.Started(self.moment().time_ns, 1000 + rank, f"h{rank}"))
            self.alive(rank)
        for rank in range(len(self.attempt.ranks)) if entered else ():
            self.event(rank, events.Entered(self.moment().time_ns))
        return self

    def output(self, rank: int, *found: events.Event, error: str = "") -> None:
        """Events of a rank are read."""

        def read() -> None:
            self.attempt._take(rank, found, error)

        self.send(inbox.OutputFetched(self.attempt.number, read))

    def event(self, rank: int, event: events.Event) -> None:
        self.output(rank, event)

    def alive(self, rank: int, cpu_s: float = 0.0) -> None:
        self.news(rank, cpu_s=cpu_s)

    def exit(self, rank: int, status: int = 0, at_s: float | None = None, **more: Any) -> None:
        """The process of a rank ends, at a time of its own host's clock."""
        time_ns = int((self.now if at_s is None else at_s) * 1e9)
        self.news(rank, ended=RankExit(1000 + rank, status, time_ns, **more))

    def fail(self, rank: int, at_s: float | None = None, **more: Any) -> None:
        """A rank reports an exception."""
        time_ns = int((self.now if at_s is None else at_s) * 1e9)
        self.event(rank, events.Failure(time_ns, "ValueError", f"rank {rank}", "Traceback", **more))

    def finish(self, rank: int) -> None:
        self.event(rank, events.Finished(self.moment().time_ns))
        self.exit(rank)

    def tick(self, seconds: float = 0.0, **more: Any) -> None:
        """Let time pass, in one step."""
        self.now += seconds
        known = {"connected": self.connected, "worker_fault": None, "read_until": self.now}
        self.attempt.on_tick(self.moment(), **(known | more))

    def wait(self, seconds: float, *, alive: bool = True, every_s: float = 0.1) -> None:
        """Let time pass in small steps; the workers of running ranks send their heartbeats."""
        steps = round(seconds / every_s)
        for number in range(steps):
            if alive and number % 10 == 0:
                for rank, watched in enumerate(self.attempt.ranks):
                    if watched.submitted_at and not watched.over:
                        self.alive(rank)
            self.tick(every_s)

    def obey(self) -> None:
        """Ranks that were told to stop end with SIGTERM."""
        for rank in sorted({rank for _, ranks, _ in self.stops() for rank in ranks}):
            if not self.attempt.ranks[rank].over:
                self.exit(rank, -signal.SIGTERM)

    # --- what the attempt has done ---

    def all(self, name: str) -> list[Any]:
        """The arguments of all calls of a method; a single argument by itself."""
        return [call[1] if len(call) == 2 else call[1:] for _, call in self.done if call[0] == name]

    def stops(self) -> list[tuple[float, tuple[int, ...], float]]:
        """When, in seconds after the beginning, which ranks were stopped, with which grace period."""
        return [(round(at - START_S, 3), *call[1:]) for at, call in self.done if call[0] == "stop"]

    def commands(self) -> list[tuple[float, str, tuple[int, ...]]]:
        return [(round(at - START_S, 3), *call[1:]) for at, call in self.done if call[0] == "tell"]

    def texts(self) -> list[str]:
        """Warnings, announcements and states that the user sees."""
        return [text for text in self.all("text") if text]

    @property
    def cause(self) -> Fault:
        fault = self.attempt.end().fault
        assert fault is not None
        return fault
