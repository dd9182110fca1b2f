"""When a cluster counts as forgotten: by what its scheduler answers, not by how long the answer takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler import idle


class Watch(idle.IdleWatch):
    """Its scheduler answers with the next of `answers`, each after so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[float, bool]]) -> None:
        self.now, self.answers = 0.0, answers
        monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__(Target("tcp://127.0.0.1:1", None), timeout_s=6.0)

    def _is_used(self) -> bool:
        takes_s, used = self.answers.pop(0)
        self.now += takes_s
        return used


def test_one_answer_that_is_late_does_not_end_a_cluster_with_a_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, [(0.1, True), (7.0, False), (0.1, True), (7.0, False), (7.0, False)])
    over = []
    for _ in range(5):
        over.append(watch.is_over())
        watch.now += watch.pause_s
    assert over == [False, False, False, False, True], "the last question is one of a scheduler that is gone"
