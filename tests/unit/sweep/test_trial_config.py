"""The configuration of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_data, load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.sweep.trial_config import best_yaml, trial_config


def resolved(folder: Path, space: dict[str, Any], **fields: Any) -> ResolvedConfig:
    sweep = {"space": space, "trials": 2, "ranks": 2}
    return load_mapping({"workload": "elsewhere:train", "sweep": sweep, **fields}, folder)


def test_the_point_is_set_and_the_rest_stays(tmp_path: Path) -> None:
    space = {"params.lr": [1, 2], "params.model.size": [8], "prepare.precision": ["bf16"], "env.MODE": ["a"]}
    config = resolved(
        tmp_path, space, params={"seed": 3, "model": {"layers": 1}}, env={"OTHER": "x"}, tracking={"wandb": {}}
    )
    point = {"params.lr": 2, "params.model.size": 8, "prepare.precision": "bf16", "env.MODE": "a"}
    trial = trial_config(config, point, 2, str(tmp_path / "runs" / "s"), "s").config
    assert trial.params == {"seed": 5, "model": {"layers": 1, "size": 8}, "lr": 2}
    assert (trial.prepare.precision, trial.env) == ("bf16", {"OTHER": "x", "MODE": "a", "WANDB_RUN_GROUP": "s"})
    assert (trial.cluster.ranks, trial.results.dir, trial.sweep) == (2, str(tmp_path / "runs" / "s"), None)
    assert config.config.params == {"seed": 3, "model": {"layers": 1}}


def test_a_script_gets_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    workload = {"script": "train.py", "args": ["--epochs", 3]}
    config = resolved(tmp_path, {"args.lr": [0.1]}, workload=workload)
    script = trial_config(config, {"args.lr": 0.1}, 0, str(tmp_path), "s").config.script
    assert script is not None and script.args == ["--epochs", "3", "--lr", "0.1"]


def test_values_that_begin_with_a_minus_are_not_taken_as_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    config = resolved(tmp_path, {"args.shift": [-1e-05]}, workload={"script": "train.py"})
    script = trial_config(config, {"args.shift": -1e-05}, 0, str(tmp_path), "s").config.script
    assert script is not None and script.args == ["--shift=-1e-05"]  # argparse takes -1e-05 alone as an option


@pytest.mark.parametrize(("default", "third"), [("5", 7), ("None", 2)])
def test_repeats_count_from_the_default_seed(tmp_path: Path, default: str, third: int) -> None:
    (tmp_path / "own.py").write_text(f"def train(ctx, lr=0.1, seed={default}): ...\n")
    config = resolved(tmp_path, {"params.lr": [1]}, workload="own:train")
    assert trial_config(config, {}, 0, str(tmp_path), "s").config.params == {}
    assert trial_config(config, {}, 2, str(tmp_path), "s").config.params == {"seed": third}


def test_repeats_of_no_seed_count_from_zero(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]}, params={"seed": None})
    assert trial_config(config, {}, 2, str(tmp_path), "s").config.params == {"seed": 2}


def test_the_best_configuration_has_the_sweeps_own_folders_and_no_secrets(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]}, env={"API_TOKEN": "hunter22hunter22"}, results={"dir": "there"})
    trial = trial_config(config, {"params.lr": 1}, 0, str(tmp_path / "s"), "s")
    text = best_yaml(config, trial, "The best.")
    assert text.startswith("# The best.\nworkload: elsewhere:train\n")
    assert "hunter22" not in text and "dir: there" in text and "sweep:" not in text
    retrain = load_data(text.encode(), "best.yaml")["retrain"]
    assert retrain == {"model": config.config.name, "gate": [{"metric": "val/loss"}]}


def test_the_best_configuration_keeps_the_section_retrain(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]}, retrain={"model": "m", "gate": {"metric": "accuracy"}})
    text = best_yaml(config, trial_config(config, {"params.lr": 1}, 0, str(tmp_path / "s"), "s"), "The best.")
    retrain = load_data(text.encode(), "best.yaml")["retrain"]
    assert retrain["model"] == "m" and [rule["metric"] for rule in retrain["gate"]] == ["accuracy"]


def test_wrong_points_are_refused(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]})
    with pytest.raises(ValueError, match="precision"):
        trial_config(config, {"prepare.precision": "fp7"}, 0, str(tmp_path), "s")
