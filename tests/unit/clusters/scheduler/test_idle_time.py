"""When a cluster counts as forgotten: by what its scheduler answers, not by how long the answer takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler import idle_time


class Watch(idle_time.IdleWatch):
    """Its scheduler answers with the next of `answers`, each after so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[float, bool | None]]) -> None:
        self.now, self.answers = 0.0, answers
        monkeypatch.setattr(idle_time, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__(Target("tcp://127.0.0.1:1", None), timeout_s=6.0)

    def _is_used(self) -> bool | None:
        takes_s, used = self.answers.pop(0)
        self.now += takes_s
        return used


def test_one_answer_that_is_late_does_not_end_a_cluster_with_a_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, [(0.1, True), (7.0, False), (0.1, True), (7.0, False), (7.0, False)])
    over: list[bool] = []
    for _ in range(5):
        over.append(watch.is_over())
        watch.now += watch.pause_s
    assert over == [False, False, False, False, True]


def test_silence_is_not_idle_but_after_an_hour_the_scheduler_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(
        monkeypatch, [(0.1, False), (600.0, None), (0.1, False), (6.0, False), (0.1, False), *[(600.0, None)] * 8]
    )
    over: list[bool] = []
    while not over or not over[-1]:
        over.append(watch.is_over())
    assert over == [False, False, False, False, True]
    silent = 0
    while not watch.is_over():
        silent += 600
    assert 3000 <= silent <= 3600


@pytest.mark.parametrize(("timeout_s", "pause_s"), [(0.0, 5.0), (8.0, 2.0), (20.0, 5.0), (3600.0, 5.0)])
def test_cluster_is_looked_at_four_times_in_its_idle_time(timeout_s: float, pause_s: float) -> None:
    watch = idle_time.IdleWatch(Target("tcp://127.0.0.1:1", None), timeout_s)
    assert watch.pause_s == pause_s
    assert timeout_s or not watch.is_over()


@pytest.mark.parametrize(
    ("error", "used", "told"),
    [
        (TimeoutError("late"), None, "the scheduler at tcp://s does not answer: TimeoutError('late')"),
        (ConnectionRefusedError(), None, "the scheduler at tcp://s does not answer: ConnectionRefusedError()"),
        (
            ValueError("bad"),
            True,
            "the scheduler can't be asked whether a run is on it, so it is treated as used: ValueError('bad')",
        ),
    ],
)
def test_error_other_than_silence_counts_as_used_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, used: bool | None, told: str
) -> None:
    async def ask() -> bool:
        raise error

    watch = idle_time.IdleWatch(Target("tcp://s", None), 60.0)
    monkeypatch.setattr(watch, "_ask", ask)
    assert [watch._is_used(), watch._is_used()] == [used, used]
    watch._target = Target("tcp://t", None)
    watch._is_used()
    others = [told.replace("tcp://s", "tcp://t")] if "tcp://s" in told else []
    assert [record.getMessage() for record in caplog.records] == [told, *others]
