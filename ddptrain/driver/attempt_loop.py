"""Runs one attempt: reads messages and the clock, and passes them to the attempt until it is over."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable

from ddptrain.driver import inbox
from ddptrain.driver.attempt import Attempt, Moment
from ddptrain.driver.inbox import Inbox
from ddptrain.driver.ranks import AttemptEnd
from ddptrain.driver.transfer.transfer_queue import TransferQueue
from ddptrain.driver.workers import Workers

_TICK_S = 0.2  # between two checks of what sends no messages: a worker's process, the connection to the scheduler
_MIN_TICK_S = 0.05  # the shortest time between two checks, while the inbox is empty
_TICK_S_PER_RANK = 0.0005  # added for each rank, because each check reads the state of all ranks
_MAX_TICK_S = 1.0
_SILENCE = 10  # times lost_after_s: a transfer that moves no byte for so long has failed
_SHOWN_AFTER_S = 3.0  # the wait for transfers, when the ranks have ended
_LAST_SIGNAL = 3  # the signal that kills the ranks
_WHY_LOST_S = 0.1  # from the end of a worker's connection until the exit status of its process is known


class AttemptLoop:
    """Starts the ranks of an attempt and watches them until all have ended."""

    def __init__(
        self,
        attempt: Attempt,
        worker_group: Workers,
        transfer: TransferQueue,
        inbox: Inbox,
        worker_fault: Callable[[], str | None],
    ) -> None:
        self.attempt, self.worker_group, self.transfer, self.inbox = attempt, worker_group, transfer, inbox
        self.worker_fault = worker_fault
        self.recorder = attempt.recorder
        self._silence_s = _SILENCE * attempt.lost_after_s
        self._ticked_at = 0.0
        self._why_lost_until = 0.0
        self._marked = False  # a ReadMark is in the inbox
        self._tick_s = min(len(attempt.ranks) * _TICK_S_PER_RANK, _MAX_TICK_S)

    def run(self) -> AttemptEnd:
        """Start rank 0, the other ranks when its store is open, and watch until all ranks have ended or are lost."""
        self.attempt.begin(now())
        while not self.attempt.over:
            self._handle_next()
            self._tick()
        unsaved = self._drain()
        self.recorder.flush()
        return self.attempt.end(unsaved)

    def _drain(self) -> str:
        """Wait for the transfers of checkpoints and files as long as bytes move, or until another signal.

        Return what a signal has prevented from being saved, as text; "" for nothing. What is silent for too long is a
        fault.
        """
        enough = max(2, min(self.attempt.signals + 1, _LAST_SIGNAL))  # the first signal asks to save
        show_at: float | None = time.monotonic() + _SHOWN_AFTER_S
        while self.attempt.transfers > 0:
            if self.attempt.signals >= enough:
                unsaved = [each.what for each in self.transfer.pending if each.vital]
                self.transfer.give_up()
                return ", ".join(unsaved)
            if self.transfer.silent_s > self._silence_s:
                error = TimeoutError(f"no byte was moved for {self._silence_s:g} s")
                for each in list(self.transfer.pending):
                    self.attempt.handle(inbox.ArtifactFailed(each.rank, each.what, error, each.vital), now())
                self.transfer.give_up()
                break
            if show_at is not None and time.monotonic() > show_at:
                show_at = None
                self.recorder.status(f"saving {self.transfer.pending[0].what}" if self.transfer.pending else "saving")
            self._handle_next()
        return ""

    def _handle_next(self) -> None:
        if self.inbox.empty():
            self.recorder.flush()
        due = self.attempt.due()
        timeout_s = _TICK_S if due is None else min(_TICK_S, max(0.0, due - time.monotonic()))
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(message, inbox.ReadMark):
            self._marked = False
            self._look(message.put_at)
            return
        if isinstance(message, inbox.WorkerLost):
            if self.worker_group.has(message.address):
                return  # it was lost before this attempt, and is back
            message = dataclasses.replace(message, reason=self._why_lost(message.address))
        self.attempt.handle(message, now())

    def _tick(self) -> None:
        """Check what sends no messages if it is time: at once if a deadline has passed, else at intervals, preferably
        with an empty inbox.
        """
        at, due, is_empty = time.monotonic(), self.attempt.due(), self.inbox.empty()
        tick_at = self._ticked_at + max(_MIN_TICK_S if is_empty else _TICK_S, self._tick_s)
        if at < tick_at and (due is None or at < due):
            return
        self._ticked_at = at
        self.recorder.flush()
        if not is_empty and not self._marked:  # silence must be judged even if the inbox is never empty
            self._marked = True
            self.inbox.put(inbox.ReadMark(at))
        self._look(at if is_empty else None)

    def _look(self, read_until: float | None) -> None:
        connected, fault = self.worker_group.connected, self.worker_fault()
        self.attempt.tick(now(), connected=connected, worker_fault=fault, read_until=read_until)

    def _why_lost(self, address: str) -> str:
        """Return why the driver's own worker process has ended; "" for other workers, or if it still runs.

        Waits only once, because many workers of another cluster may be lost together.
        """
        self._why_lost_until = self._why_lost_until or time.monotonic() + _WHY_LOST_S
        while (fault := self.worker_fault()) is None and time.monotonic() < self._why_lost_until:
            if all(rank.worker != address for rank in self.attempt.ranks):
                break
            time.sleep(0.01)
        return fault or ""


def now() -> Moment:
    """Return the time."""
    return Moment(time.monotonic(), time.time_ns())
