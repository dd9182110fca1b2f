"""The trials of the row sweep under Ray: Ray Tune chooses the points, and each trial is a TorchTrainer of Ray Train.

It runs with the Python of an environment that has Ray and this file's folder, not with that of ddptrain.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import tune
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train import report as report_of_rank
from ray.train.torch import TorchTrainer
from trial import train_steps


def _rank(config: dict[str, Any]) -> None:
    report_of_rank({"loss": train_steps(config["learning_rate"], config["steps"])})


def _trial(config: dict[str, Any]) -> None:
    """One trial of Ray Tune: as of Ray's guide, a function that fits a trainer and reports its last metrics."""
    name = tune.get_context().get_trial_id()
    trainer = TorchTrainer(
        _rank,
        train_loop_config={"learning_rate": config["learning_rate"], "steps": config["steps"]},
        scaling_config=ScalingConfig(num_workers=config["ranks"], resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=name, storage_path=config["folder"], checkpoint_config=CheckpointConfig()),
    )
    metrics = trainer.fit().metrics or {}
    tune.report({"loss": metrics.get("loss", float("nan"))})


def main() -> int:
    """Search; return 0 if each trial has a result."""
    given = json.loads(sys.argv[1])
    ranks, parallel, trials = given["ranks"], given["parallel"], given["trials"]
    # Ray's CPUs are only counted: one for each worker of a trainer, and one for the trial, which starts them.
    ray.init(num_cpus=(ranks + 1) * parallel, include_dashboard=False)
    space = {"learning_rate": tune.loguniform(0.001, 0.1), "steps": given["steps"], "ranks": ranks}
    tuner = tune.Tuner(
        tune.with_resources(_trial, {"CPU": 1}),
        param_space={**space, "folder": given["folder"]},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=trials, max_concurrent_trials=parallel, reuse_actors=False
        ),
        run_config=tune.RunConfig(name="tune", storage_path=given["folder"]),
    )
    results = tuner.fit()
    ray.shutdown()
    found = [result for result in results if result.error is None and "loss" in (result.metrics or {})]
    print(json.dumps({"trials": len(found)}))
    return int(len(found) != trials)


if __name__ == "__main__":
    sys.exit(main())
