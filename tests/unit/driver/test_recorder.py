"""What is told of a run, and when it is left out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddptrain.driver.fault import Fault, FaultKind
from ddptrain.driver.recorder import LossSpikes, Recorder, metric_problem, other_versions
from ddptrain.protocol import events
from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, RankRecord
from ddptrain.results.run_writer import RunWriter


class Heard:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] in ("status", "notice", "message"):
            self.lines.append(event["message"])

    def on_end(self, run: Run) -> None:
        pass


def test_ranks_of_which_one_has_failed_are_recorded_and_not_said_to_train(tmp_path: Path) -> None:
    heard = Heard()
    with RunWriter.create(tmp_path, "a-run", "n", "", "w") as writer:
        writer.update(attempts=(AttemptRecord(),))
        telling = Recorder(writer, [heard])
        telling.fault(Fault(0, FaultKind.EXCEPTION, 1, "no", type="ValueError"))
        telling.training((RankRecord(rank=0, host="here"),))
        assert writer.record.attempts[0].ranks[0].host == "here"
        assert heard.lines == []
        telling.attempt_over()
        telling.training(())
        assert heard.lines == ["training"]


def saved(step: int, epoch: float | None = None, **metrics: float) -> events.CheckpointSaved:
    return events.CheckpointSaved(1, step, "staging", (), epoch, metrics)


@pytest.mark.parametrize(
    ("metric", "checkpoint", "logged", "is_told"),
    [
        ("acc", saved(5, 1.0, loss=1.0), ["loss"], True),
        ("acc", saved(5, 0.5, loss=1.0), [], True),
        ("acc", saved(5), [], True),
        ("acc", saved(5, 1.0), ["acc"], True),  # logged, and not given to the checkpoint
        ("acc", saved(5, 0.5), [], False),  # an epoch's middle
        ("acc", saved(5, 1.0, acc=float("nan")), [], False),
        (None, saved(5, 1.0, loss=1.0), [], False),
        ("val/loss", saved(5, 1.0), ["loss"], False),  # the default, to a workload that has no metrics
        ("val/loss", saved(5, 1.0), ["val/loss"], True),
        ("val/loss", saved(5, 1.0, loss=1.0), [], True),
    ],
)
def test_metric_that_no_checkpoint_has_is_told(
    metric: str | None, checkpoint: events.CheckpointSaved, logged: list[str], is_told: bool
) -> None:
    assert (metric_problem(metric, checkpoint, logged) != "") == is_told


def test_missing_metric_is_told_once_at_the_first_checkpoint_with_the_metrics_there_are(tmp_path: Path) -> None:
    heard = Heard()
    with RunWriter.create(tmp_path, "a-run", "n", "", "w") as writer:
        telling = Recorder(writer, [heard], "accuracy")
        telling.rank_numbers(1, [events.Metrics(1, {"train/loss": 1.0, "lr": 0.1})])
        for step in (5, 10):
            telling.rank_event(0, saved(step, 1.0, loss=1.0, Accuracy=0.5))
        (line,) = heard.lines
        assert line.startswith("checkpoint.metric is accuracy, and the checkpoint of step 5 has no such metric: ")
        assert "Given to ctx.checkpoint: Accuracy, loss; logged with ctx.log: lr, train/loss. Did you mean Accu" in line
        quiet = Heard()
        recorder = Recorder(writer, [quiet], "loss")
        recorder.rank_event(0, saved(5, 1.0, loss=1.0))
        recorder.rank_event(0, saved(6, 1.0))
        assert quiet.lines == []


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {"torch": "2.9.0"}, ""),
        ({"torch": "2.9.0", "numpy": "1"}, {"torch": "2.9.0", "numpy": "2"}, ""),
        (
            {"python": "3.11.9", "torch": "2.8.0", "ddptrain": "0.1.0"},
            {"python": "3.11.9", "torch": "2.9.0", "ddptrain": "0.2.0"},
            (
                "the run was trained with ddptrain 0.1.0, torch 2.8.0 so far and continues with ddptrain 0.2.0, "
                "torch 2.9.0: results may differ"
            ),
        ),
    ],
)
def test_a_resume_names_versions_that_are_others(before: dict[str, str], now: dict[str, str], expected: str) -> None:
    assert other_versions(before, now) == expected


def spikes(values: Sequence[float]) -> list[int]:
    watch, found = LossSpikes(), []
    for step, value in enumerate(values):
        if (spike := watch.add(events.Metrics(1, {"train/loss": value}, step))) is not None:
            found.append(spike.step or 0)
    return found


def test_loss_that_falls_or_is_noisy_has_no_spikes() -> None:
    draw = random.Random(0)
    falling = [5.0 / (1 + step) ** 0.5 for step in range(400)]
    noisy = [draw.gauss(2.0, 0.5) for _ in range(2_000)]
    skewed = [draw.expovariate(1.0) for _ in range(300)]
    assert spikes(falling) == spikes(noisy) == spikes(skewed) == []
    assert spikes([math.nan] * 200) == []


def test_jump_of_the_loss_is_a_spike_once_and_three_times_at_most() -> None:
    flat = [2.0 + 0.01 * (step % 5) for step in range(1_000)]
    for step in (100, 102, 400, 600, 800):
        flat[step] = 4.0
    assert spikes(flat) == [100, 400, 600]
    assert spikes(flat[80:120]) == [], "too few values before it"
    assert spikes([value + 1.0 if step > 500 else value for step, value in enumerate([1.0] * 1_000)]) == [501]
