"""An attempt without processes: a clock, a state, and the answers that the attempt's loop would give."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

from ddptrain.driver.attempt import actions, inbox
from ddptrain.driver.attempt.actions import Action
from ddptrain.driver.attempt.state import Moment, new_state
from ddptrain.driver.attempt.transition import step
from ddptrain.driver.failure.fault import Fault
from ddptrain.driver.failure.watchdog import Watchdog
from ddptrain.protocol import events, worker_notices
from tests.unit.driver.attempt.ranks import running

GRACE_S = 20.0
START_TIMEOUT_S = 30.0
LOST_AFTER_S = 60.0
PORT = 4711

A = TypeVar("A", bound=Action)


class Play:
    """Ranks on hosts h0, h1, ... (two on each with `two_a_host`) whose messages the test sends."""

    def __init__(
        self,
        world_size: int = 3,
        *,
        hang_timeout_s: float | None = None,
        two_a_host: bool = False,
        attempt: int = 1,
        checks_purity: bool = True,
        **spec: Any,
    ) -> None:
        self.now = 100.0
        self.checks_purity = checks_purity
        self.done: list[tuple[float, Action]] = []
        self.unread: dict[int, list[events.Event]] = {}  # events in the files of a rank that is lost
        self.connected = True
        fields = {"grace_s": GRACE_S, "attempt": attempt, "world_size": world_size, **spec}
        ranks = [
            running(rank, f"h{rank // 2 if two_a_host else rank}", spec=fields, submitted_at=0.0)
            for rank in range(world_size)
        ]
        watchdog = Watchdog(hang_timeout_s, START_TIMEOUT_S)
        self.state = new_state(ranks, watchdog, START_TIMEOUT_S, LOST_AFTER_S, self.moment())
        self.send(inbox.Begin())

    def moment(self) -> Moment:
        return Moment(self.now, int(self.now * 1e9))

    def send(self, message: inbox.Message) -> None:
        """One step, and the answers to its actions."""
        before = self.state
        image = repr(before) if self.checks_purity else ""
        self.state, ordered = step(before, message, self.moment())
        assert not image or repr(before) == image, "the step has changed the state that it was given"
        for action in ordered:
            self.done.append((self.now, action))
            self._answer(action)

    def _answer(self, action: Action) -> None:
        match action:
            case actions.ReadOutput(rank, _, _, ended) if ended is not None:
                self.send(inbox.OutputRead(rank, ended=ended))
            case actions.ReadRest(rank, loss):
                for event in self.unread.pop(rank, []):
                    self.send(inbox.RankEvent(rank, event))
                self.send(inbox.OutputRead(rank, loss=loss))

    def start(self, *, entered: bool = True) -> Play:
        """The store opens, all ranks start, and enter the workload."""
        self.send(worker_notices.StoreOpened(self.attempt, 0, PORT))
        for rank in range(len(self.state.ranks)):
            self.event(rank, events.Started(self.moment().time_ns, 1000 + rank, f"h{rank}"))
            self.alive(rank)
        for rank in range(len(self.state.ranks)) if entered else ():
            self.event(rank, events.Entered(self.moment().time_ns))
        return self

    @property
    def attempt(self) -> int:
        return self.state.ranks[0].spec.attempt

    def event(self, rank: int, event: events.Event) -> None:
        self.send(inbox.RankEvent(rank, event))

    def alive(self, rank: int, cpu_s: float = 0.0) -> None:
        self.send(worker_notices.Alive(self.attempt, rank, cpu_s))

    def exit(self, rank: int, status: int = 0, at_s: float | None = None, **more: Any) -> None:
        """The process of a rank ends, at a time of its own host's clock."""
        time_ns = int((self.now if at_s is None else at_s) * 1e9)
        self.send(worker_notices.RankExit(self.attempt, rank, 1000 + rank, status, time_ns, 0, 0, **more))

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
        self.send(inbox.Tick(connected=self.connected, **{"read_until": self.now, **more}))

    def wait(self, seconds: float, *, alive: bool = True, every_s: float = 0.1) -> None:
        """Let time pass in small steps; the workers of running ranks send their heartbeats."""
        steps = round(seconds / every_s)
        for number in range(steps):
            if alive and number % 10 == 0:
                for rank, watched in enumerate(self.state.ranks):
                    if watched.submitted_at and not watched.over:
                        self.alive(rank)
            self.tick(every_s)

    def obey(self) -> None:
        """Ranks that were told to stop end with SIGTERM."""
        told = {rank for _, stop in self.all(actions.StopRanks) for rank in stop.ranks}
        for rank in sorted(told):
            if not self.state.ranks[rank].over:
                self.exit(rank, -signal.SIGTERM)

    def all(self, kind: type[A]) -> list[tuple[float, A]]:
        """The actions of a kind, with their times in seconds after the beginning."""
        return [(round(at - 100.0, 3), action) for at, action in self.done if isinstance(action, kind)]

    def stops(self) -> list[tuple[float, tuple[int, ...], float]]:
        """When which ranks were stopped, with which grace period."""
        return [(at, stop.ranks, stop.grace_s) for at, stop in self.all(actions.StopRanks)]

    def commands(self) -> list[tuple[float, str, tuple[int, ...]]]:
        return [(at, str(sent.command), sent.ranks) for at, sent in self.all(actions.SendCommand)]

    def texts(self) -> list[str]:
        """Warnings, announcements and states that the user sees."""
        kinds = actions.Warn | actions.Announce | actions.ShowStatus
        return [action.text for _, action in self.done if isinstance(action, kinds)]

    @property
    def cause(self) -> Fault:
        fault = self.state.end().fault
        assert fault is not None
        return fault
