"""The trials of the row sweep under Ray: Ray Tune chooses the points, and each trial is a TorchTrainer of Ray Train.

It runs with the Python of an environment that has Ray (tests/bench/peers.py), not with that of ddptrain, and with
RAY_TRAIN_V2_ENABLED=0: with Train v2 each trial takes longer, as Ray Tune starts a controller of its own for it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray  # type: ignore[import-not-found]
from ray import train, tune
from ray.train.torch import TorchTrainer  # type: ignore[import-not-found]
from trial import train_steps  # type: ignore[import-not-found]


def _rank(config: dict[str, Any]) -> None:
    train.report({"loss": train_steps(config["learning_rate"], config["steps"])})


def main() -> int:
    """Search; return 0 if each trial has a result."""
    given = json.loads(sys.argv[1])
    ranks, parallel, trials = given["ranks"], given["parallel"], given["trials"]
    # Ray's CPUs are only counted: one for each worker of a trainer, and one for the trainer itself.
    ray.init(num_cpus=(ranks + 1) * parallel, include_dashboard=False)
    tuner = tune.Tuner(
        TorchTrainer(_rank, scaling_config=train.ScalingConfig(num_workers=ranks)),
        param_space={"train_loop_config": {"learning_rate": tune.loguniform(0.001, 0.1), "steps": given["steps"]}},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=trials, max_concurrent_trials=parallel),
        run_config=train.RunConfig(storage_path=given["folder"]),
    )
    results = tuner.fit()
    ray.shutdown()
    found = [result for result in results if result.error is None and "loss" in (result.metrics or {})]
    print(f"{len(found)} trials have a result")
    return int(len(found) != trials)


if __name__ == "__main__":
    sys.exit(main())
