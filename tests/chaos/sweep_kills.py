"""`python -m tests.chaos.sweep_kills`: a sweep whose driver is killed again and again, and resumed to its very end.

The driver, or its whole process group, gets SIGKILL at a random moment after each start. At the end each trial must be
there once, with the point that it was given first and the value that follows from it, and no result may have changed.
With --store the results are in an S3 store (SeaweedFS, the dev extra), and each start is on another machine, as far as
files go: it has a state folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddptrain.errors import DdptrainError
from ddptrain.results.lookup import RunView
from ddptrain.results.remote.runs import open_runs_dir
from ddptrain.results.run_store import NeededFiles
from ddptrain.results.sweep_record import SweepRecord, TrialRecord, TrialState, find_sweep
from tests.servers.seaweed import seaweed

_ID, _STEPS, _FAILS_ABOVE = "kills", 12, 0.9
_WORKLOAD = f"""
import time
import torch


def main(ctx, x: float = 0.5, seed: int = 0):
    model = torch.nn.Linear(1, 1)
    resumed = ctx.resume(model=model)
    for step in range((resumed.step if resumed else 0) + 1, {_STEPS} + 1):
        if x > {_FAILS_ABOVE} and step == 4:
            raise ValueError(f"x is {{x}}")
        time.sleep(0.15)
        loss = x + 1 / step
        ctx.log({{"loss": loss}}, step=step)
        ctx.checkpoint(model=model, step=step, metrics={{"loss": loss}}, last=step == {_STEPS})
"""


@dataclass(slots=True)
class Kills:
    """What has been seen so far. points: of each trial, when it was seen first. told: results that were final."""

    place: str
    seed: int
    points: dict[int, object] = field(default_factory=dict)
    told: dict[int, tuple[object, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    signals: Counter[str] = field(default_factory=Counter)

    def look(self) -> SweepRecord | None:
        """Compare the record of the sweep, as a killed driver left it, with what was seen before."""
        try:
            found = find_sweep(self.place, _ID)
        except DdptrainError:  # killed before it wrote the first record
            return None
        if found is None:
            return None
        record = found.record
        for trial in record.trials:
            if self.points.setdefault(trial.number, trial.params) != trial.params:
                self.problems.append(f"trial {trial.number} has another point than before: {trial.params}")
            if trial.state.is_final:
                before = self.told.setdefault(trial.number, _result(trial))
                if before != _result(trial):
                    self.problems.append(f"the result of trial {trial.number} has changed: {before}, {_result(trial)}")
        if missing := self.told.keys() - {trial.number for trial in record.trials}:
            self.problems.append(f"results are lost after a kill: trials {sorted(missing)}")
        return record


def main() -> int:
    """Kill and resume; print what came out, and return 0 if it is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--longest", type=float, default=14.0, metavar="S", help="from a start to its kill, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", action="store_true", help="keep the results in an S3 store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddptrain-kills-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "mine.py").write_text(_WORKLOAD)
        (folder / "store").mkdir()
        if options.store:
            os.environ.update(stack.enter_context(seaweed(folder / "store", "bucket")))
        os.environ.update(_machine(folder, "reader"))
        kills = Kills("s3://bucket/runs" if options.store else str(folder / "runs"), options.seed)
        _write_config(folder, kills, options.trials)
        began = time.monotonic()
        output = _kill_and_resume(kills, folder, options.kills, options.longest)
        return _report(kills, options.trials, output, time.monotonic() - began)


def _machine(folder: Path, name: str) -> dict[str, str]:
    """The variables of a machine that shares nothing but the results with others."""
    return {"XDG_STATE_HOME": str(folder / name / "state"), "XDG_CACHE_HOME": str(folder / name / "cache")}


def _write_config(folder: Path, kills: Kills, trials: int) -> None:
    sweep = {
        "space": {"params.x": {"uniform": [0, 1]}},
        "trials": trials,
        "search": "random",
        "prune": {"asha": {"reduction_factor": 2}},
        "metric": "loss",
        "parallel": 2,
        "seed": kills.seed,
    }
    config = {
        "workload": "mine:main",
        "cluster": {"ranks": 1},
        "checkpoint": {"every_steps": 1, "keep": 1, "metric": "loss"},
        "results": {"dir": kills.place},
        "sweep": sweep,
    }
    (folder / "mine.yaml").write_text(json.dumps(config))  # JSON is YAML


def _kill_and_resume(kills: Kills, folder: Path, number: int, longest_s: float) -> str:
    """Start the sweep, and kill it so often; then let it run to its end. Returns what the last start printed."""
    draw = random.Random(kills.seed)
    while (killed := kills.signals.total()) < number:
        process = _start(kills, folder, f"machine-{killed}")
        try:
            output, _ = process.communicate(timeout=draw.uniform(0.2, longest_s))
        except subprocess.TimeoutExpired:
            what = draw.choice(["driver", "process group"])
            kill = os.kill if what == "driver" else os.killpg
            kill(process.pid, signal.SIGKILL)
            kills.signals[what] += 1
            process.communicate()
            record = kills.look()
            ended = sum(each.state.is_final for each in record.trials) if record else 0
            print(f"kill {killed + 1}: {ended} trials have a result", flush=True)
            continue
        kills.problems.append(
            f"a start ended by itself with {process.returncode} after {killed} kills: {output[-500:]}"
        )
        return str(output)
    process = _start(kills, folder, "last")
    output, _ = process.communicate()
    if process.returncode:
        kills.problems.append(f"the last start ended with {process.returncode}")
    return str(output)


def _start(kills: Kills, folder: Path, machine: str) -> subprocess.Popen[str]:
    resume = ["--resume"] if kills.look() is not None else []
    command = [sys.executable, "-m", "ddptrain", "sweep", "mine.yaml", "--sweep-id", _ID, "--output", "plain", *resume]
    (folder / machine).mkdir()
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **_machine(folder, machine)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _result(trial: TrialRecord) -> tuple[object, ...]:
    return trial.state, trial.value, trial.error


def _report(kills: Kills, trials: int, output: str, took_s: float) -> int:
    record = kills.look()
    assert record is not None
    if [trial.number for trial in record.trials] != list(range(trials)):
        kills.problems.append(f"the trials are {[trial.number for trial in record.trials]}")
    runs = open_runs_dir(f"{kills.place}/{_ID}")
    views = {view.run_id: view for view in runs.list(NeededFiles.METRICS)}
    kills.problems += [problem for trial in record.trials for problem in _problems(trial, views)]
    complete = [
        trial.value for trial in record.trials if trial.state is TrialState.COMPLETE and trial.value is not None
    ]
    best = record.find_best()
    if best is None or best.value != min(complete) or record.best != best.number:
        kills.problems.append(f"the best trial is {record.best}")
    if len(views) != trials:
        kills.problems.append(f"{len(views)} run directories for {trials} trials")
    attempts = [attempt for view in views.values() for attempt in view.record.attempts]
    resumed = sum(attempt.resumed_from is not None for attempt in attempts)
    states = Counter(str(trial.state) for trial in record.trials)
    print(f"{kills.signals.total()} kills ({dict(kills.signals)}) in {took_s:.0f} s")
    print(f"{len(record.trials)} trials: {dict(states)}; {len(attempts)} attempts, {resumed} from a checkpoint")
    if kills.problems:
        print(f"the last start printed:\n{output[-3000:]}")
    print("\n".join(["problems:", *kills.problems]) if kills.problems else "no problems")
    return int(bool(kills.problems))


def _problems(trial: TrialRecord, views: Mapping[str, RunView]) -> list[str]:
    """What is wrong with a trial at the end: its state, its value, its run."""
    x = trial.params["params.x"]
    if trial.run_ids != [f"{_ID}-{trial.number:04d}"] or trial.run_ids[0] not in views:
        return [f"trial {trial.number} has the runs {trial.run_ids}"]
    view = views[trial.run_ids[0]]
    wanted = {
        TrialState.COMPLETE: ("succeeded", x <= _FAILS_ABOVE and trial.value == x + 1 / _STEPS),
        TrialState.PRUNED: ("preempted", trial.step is not None and trial.value == x + 1 / trial.step),
        TrialState.FAILED: ("failed", x > _FAILS_ABOVE and trial.error == f"ValueError: x is {x}"),
    }
    status, is_right = wanted.get(trial.state, ("", False))
    found = [] if is_right else [f"trial {trial.number} (x {x}): {trial.state}, {trial.value}, {trial.error}"]
    # One that was pruned, and killed before a checkpoint was stored, has nothing to go on from when it is resumed.
    ends_cancelled = trial.state is TrialState.PRUNED and view.status == "cancelled" and not view.record.checkpoints
    if view.status != status and not ends_cancelled:
        found.append(f"trial {trial.number} is {trial.state}, but its run is {view.status}")
    return found


if __name__ == "__main__":
    sys.exit(main())
