"""The configuration of one trial: that of the sweep with the values of a point. best.yaml is that of the best one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ddptrain.config.function_signature import default_params
from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.retraining import GateRule, RetrainConfig
from ddptrain.config.sections.sweeping import SweepConfig

_GROUP = "WANDB_RUN_GROUP"
_SLOTS_WAIT_S = 600.0  # a trial waits at least so long for slots that another run has taken


def ranks_of(config: RunConfig, sweep: SweepConfig) -> int:
    """Return the number of ranks of a trial."""
    if sweep.ranks is not None:
        return sweep.ranks
    return config.cluster.ranks if isinstance(config.cluster.ranks, int) else 1


def trial_config(
    resolved: ResolvedConfig, point: Mapping[str, Any], repeat: int, runs_dir: str, group: str
) -> ResolvedConfig:
    """Return the configuration of a repeat of a point, whose run directory is made in `runs_dir`.

    Raises pydantic's ValidationError if the values do not fit together.
    """
    config, sweep = resolved.config, resolved.config.sweep
    assert sweep is not None
    data = config.model_dump()
    data |= {"sweep": None, "results": {**data["results"], "dir": runs_dir}}
    ranks = ranks_of(config, sweep)
    cluster = data["cluster"]
    cluster |= {"ranks": ranks, "wait_s": max(config.cluster.wait_s, _SLOTS_WAIT_S)}
    if isinstance(cluster["gpus"], int) and cluster["gpus"] > 0:
        cluster["gpus"] = ranks
    if config.tracking.wandb.mode != "off" and _GROUP not in os.environ:
        data["env"].setdefault(_GROUP, group)
    for name, value in point.items():
        _set(data, name, value)
    if repeat:
        data["params"]["seed"] = _first_seed(resolved) + repeat
    return resolve(RunConfig.model_validate(data), resolved.path)


def _first_seed(resolved: ResolvedConfig) -> int:
    """Return params.seed, or its default in the workload's source; 0 for none."""
    defaults = default_params(resolved.config.workload_name, [*resolved.import_folders, *sys.path])
    return {**defaults, **resolved.recorded["params"]}.get("seed") or 0


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    section, _, key = name.partition(".")
    if section == "args":
        # After --NAME, argparse takes a value such as -x or -1e-05 as an option.
        option = [f"--{key}={value}"] if str(value).startswith("-") else [f"--{key}", str(value)]
        data["workload"]["args"] = [*data["workload"]["args"], *option]
    elif section == "params":
        *path, last = key.split(".")
        params = data["params"] = dict(data["params"])
        for part in path:
            params[part] = dict(params.get(part) or {})
            params = params[part]
        params[last] = value
    else:
        data[section] = {**data[section], key: value}


def best_yaml(resolved: ResolvedConfig, trial: ResolvedConfig, comment: str) -> str:
    """Return the configuration of the best trial for `train` and `retrain`; `comment` is its first line.

    If it has no section retrain, it gets one: the model has the name of the configuration, and the gate compares the
    metric of the sweep.
    """
    sweep = resolved.config.sweep
    assert sweep is not None
    whole, best = resolved.config, trial.config
    changes = {
        "sweep": None,
        "results": whole.results,
        "cluster": whole.cluster.model_copy(update={"ranks": best.cluster.ranks}),
        "tracking": whole.tracking,
        "retrain": whole.retrain
        or RetrainConfig(model=whole.name, gate=[GateRule(metric=sweep.metric, mode=sweep.mode)]),
    }
    return f"# {comment}\n{resolve(best.model_copy(update=changes), resolved.path).changes}"
