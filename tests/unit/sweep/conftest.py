"""Sweeps without a cluster: a trial is a function that writes a run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.protocol.events import Metrics
from ddptrain.results.run_record import FailureRecord, RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.sweep import sweep as sweeps
from ddptrain.sweep.sweep import Capacity
from ddptrain.sweep.trial import MetricStream, Trial

# Logs values of `loss` for the params of a trial; returns the line of a failure, or "".
Workload = Callable[[dict[str, Any], "StubRun"], str]


class StubRun:
    """The run of one trial: what its only rank logs, and whether it was asked to end."""

    def __init__(self, writer: RunWriter, trial: Trial, display: MetricStream) -> None:
        self._writer, self._trial, self._display = writer, trial, display

    @property
    def asked_to_end(self) -> bool:
        return self._trial.pruned or bool(self._trial.stopped)

    def log(self, step: int, **values: float) -> None:
        event = Metrics(time.time_ns(), values, step)
        self._writer.add_metrics([event], 0)
        self._writer.flush()
        self._display.on_event({"event": "numbers", "rank": 0, "numbers": [event]})


class Sweeper:
    """Runs sweeps in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.parallel = folder, 1
        self.workload: Workload = lambda params, run: ""
        self.begun: list[tuple[dict[str, Any], bool]] = []  # the params of each run, and whether it was resumed
        monkeypatch.setattr(sweeps.Sweep, "_open", lambda sweep, stack: self._opened())
        monkeypatch.setattr(sweeps, "run_with", lambda shared: self._run)

    def config(self, *, params: dict[str, Any] | None = None, **sweep: Any) -> ResolvedConfig:
        space = {"params.lr": {"uniform": [0, 1]}}
        given = {name.rstrip("_"): value for name, value in sweep.items()}
        section = {"space": space, "trials": 4, "metric": "loss", "search": "random", **given}
        data: dict[str, Any] = {
            "params": params or {},
            "workload": "elsewhere:train",
            "name": "stub",
            "results": {"dir": str(self.folder)},
            "sweep": section,
        }
        return load_mapping(data, self.folder)

    def run(self, config: ResolvedConfig, *, resume: bool = False, sweep_id: str | None = "s") -> int:
        return sweeps.run_sweep(config, sweeps.SweepOptions(sweep_id, resume, "plain"))

    def _opened(self) -> Any:
        return None, None, Capacity(self.parallel, 1, None)

    def _run(self, config: ResolvedConfig, run_id: str, resume: bool, trial: Trial) -> int:
        params = config.config.params
        self.begun.append((params, resume))
        folder = Path(config.config.results.dir)
        if resume:
            writer = RunWriter.reopen(folder / run_id, config.yaml_text)
        else:
            writer = RunWriter.create(folder, run_id, "stub", config.yaml_text, "elsewhere:train")
        with writer:
            display = MetricStream(trial)
            display.on_event({"event": "ranks", "count": 1})
            run = StubRun(writer, trial, display)
            line = self.workload(params, run)
            if line:
                writer.finish(RunStatus.FAILED, 1, FailureRecord(kind="exception", type="ValueError", message=line))
            elif run.asked_to_end:
                writer.finish(RunStatus.PREEMPTED, 75, FailureRecord(kind="preempted", message="asked"))
            else:
                writer.finish(RunStatus.SUCCEEDED, 0)
        return 1 if line else 0


@pytest.fixture
def sweeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeper:
    return Sweeper(tmp_path / "runs", monkeypatch)
