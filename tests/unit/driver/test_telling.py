"""What is told of a run, and when it is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ddptrain.driver.cause import Fault, Kind
from ddptrain.driver.telling import Telling
from ddptrain.results.record import AttemptRecord, RankRecord
from ddptrain.results.writer import RunWriter


class Heard:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def status(self, text: str) -> None:
        self.lines.append(text)

    def notice(self, text: str, *, level: str) -> None:
        self.lines.append(text)

    def event(self, line: dict[str, Any]) -> None:
        """Not of interest."""


def test_ranks_of_which_one_has_failed_are_recorded_and_not_said_to_train(tmp_path: Path) -> None:
    heard = Heard()
    with RunWriter.create(tmp_path, "a-run", "n", "", "w") as writer:
        writer.update(attempts=(AttemptRecord(),))
        telling = Telling(writer, cast("Any", heard))
        telling.fault(Fault(0, Kind.EXCEPTION, 1, "no", type="ValueError"))
        telling.training((RankRecord(rank=0, host="here"),))
        assert writer.record.attempts[0].ranks[0].host == "here"
        assert heard.lines == ["rank 0 failed: ValueError: no"]
        telling.attempt_over(None)
        telling.training(())
        assert heard.lines[1:] == ["training"]
