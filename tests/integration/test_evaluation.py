"""`ddptrain evaluate`, fine-tuning and export with real ranks: uneven ranks, a crash, workers of other hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished
from tests.servers.dask_cluster import DaskCluster, up_cluster
from tests.unit.workloads.pictures import COLOURS, picture

__all__ = ["up_cluster"]

TINY = ("hidden_size=8", "layers=1", "epochs=1")
OWN = """
import os
import torch


def train(ctx, width: int = 3):
    ctx.checkpoint(model=torch.nn.Linear(width, 1), step=1, epoch=1, metrics={"val/loss": 1.0}, last=True)


def score(ctx, checkpoint):
    if checkpoint.weights()["weight"].shape[1] == 5:
        os._exit(3)  # as a crash of a library would
    model = torch.nn.Linear(checkpoint.params.get("width", 3), 1)
    checkpoint.load(model)
    n = 1 + ctx.rank  # uneven shares
    return {"val/loss": ctx.mean(float(ctx.rank), weight=n), "lost": float("nan")}
"""


def scores(done: Finished) -> dict[str, Any]:
    assert done.rc == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def colours(folder: Path, names: list[str], count: int) -> Path:
    """`count` images in all, one after the other of each class."""
    for number in range(count):
        name = names[number % len(names)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{number}.png").write_bytes(picture(name, (20 + number, 20)))
    return folder


@pytest.mark.long
def test_seven_images_give_the_same_scores_on_one_and_on_three_ranks(run_cli: Cli, warm_cluster: str) -> None:
    colours(run_cli.folder / "pets", [*COLOURS], 12)
    colours(run_cli.folder / "seven", [*COLOURS], 7)
    params = {"source": "pets", "architecture": "small_cnn", "image_size": 16, "epochs": 1, "loader_workers": 0}
    config = {"workload": "images", "name": "pets", "params": params}
    (run_cli.folder / "pets.yaml").write_text(json.dumps(config))
    on = ("--cluster", warm_cluster)
    assert run_cli("train", "pets.yaml", "--ranks", "2", "--run-id", "all", *on).rc == 0
    assert run_cli("train", "pets.yaml", "--ranks", "2", "--run-id", "two", "--set", "params.subset=2", *on).rc == 0
    one = scores(run_cli("evaluate", "all", "--data", "seven", "--ranks", "1", "--json", *on))
    three = scores(run_cli("evaluate", "all", "--data", "seven", "--ranks", "3", "--json", *on))
    assert one["held_out"] == three["held_out"] and one["held_out"]["n"] == 7
    assert three["scores"]["all"] == pytest.approx(one["scores"]["all"], rel=1e-6)
    recorded = json.loads((run_cli.folder / "runs/all/run.json").read_text())["last_metrics"]
    both = scores(run_cli("evaluate", "all", "--against", "two", "--ranks", "3", "--json", *on))
    own = scores(run_cli("evaluate", "all", "--ranks", "3", "--json", *on))
    assert own["scores"]["all"]["val/loss"] == pytest.approx(recorded["val/loss"], rel=1e-5)
    assert both["held_out"] == own["held_out"] and both["scores"].keys() == {"all", "two"}
    assert "are left out, because not all models know their classes: red" in both["notes"][0]
    assert sorted(path.name for path in (run_cli.folder / "runs").iterdir()) == ["all", "two"]


def trained_own(run_cli: Cli, cluster: str, *widths: int) -> tuple[str, str]:
    """Train the function with each width as the run w3, w4, w5; returns the options that name the cluster."""
    (run_cli.folder / "own.py").write_text(OWN)
    config = {"workload": "own:train", "evaluate": "own:score", "cluster": {"ranks": 2}}
    (run_cli.folder / "own.yaml").write_text(json.dumps(config))
    on = ("--cluster", cluster)
    for width in widths:
        done = run_cli("train", "own.yaml", "--run-id", f"w{width}", "--set", f"params.width={width}", *on)
        assert done.rc == 0, done.stderr
    return on


def test_function_is_scored_and_that_of_another_user_is_not_called(run_cli: Cli, warm_cluster: str) -> None:
    on = trained_own(run_cli, warm_cluster, 3, 4)
    found = scores(run_cli("evaluate", "w3", "--against", "w4", "--json", *on))
    assert found["scores"] == {"w3": {"val/loss": pytest.approx(2 / 3), "lost": None}}
    assert found["failures"]["w4"].startswith("RuntimeError: Error(s) in loading state_dict for Linear: size mismatch")
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "nobody", run_cli.folder / "runs" / "w3"], check=True)
        refused = run_cli("evaluate", "w3", *on)
        assert refused.rc == 2 and "its cluster, env, evaluate and options of stores are not used" in refused.stderr


def _can_unshare() -> bool:
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and mount namespaces")
def test_workers_that_see_no_files_of_the_driver_get_weights_and_checkpoints(
    run_cli: Cli, up_cluster: DaskCluster, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    hide = f'mount -t tmpfs none {project} && exec "$@"'
    up_cluster.add_worker("unshare", "--mount", "bash", "-c", hide, "-", scratch=tmp_path / "scratch")
    on = ("--cluster", up_cluster.address, "--ranks", "2")

    def train(run_id: str, *params: str) -> None:
        words = [word for param in (*TINY, *params) for word in ("--set", f"params.{param}")]
        done = run_cli("train", "petnames", "--run-id", run_id, *words, *on, cwd=project)
        assert done.rc == 0, done.stderr

    train("first")
    assert run_cli("models", "promote", "names", "first", cwd=project).rc == 0
    train("second", "weights=model:names@champion", "learning_rate=1e-9")
    assert "weights: model:names@1" in (project / "runs/second/config.yaml").read_text()
    found = scores(run_cli("evaluate", "second", "--against", "names", "--json", *on, cwd=project))
    assert found["scores"]["second"] == pytest.approx(found["scores"]["names@1"], rel=1e-4)
    assert run_cli("models", "export", "names", "out", cwd=project).rc == 0
    exported = (project / "out" / "model.safetensors").read_bytes()
    assert exported == next((project / "models/names/versions/1/checkpoints").glob("*/model.safetensors")).read_bytes()
    damaged = next((project / "models/names/versions/1/checkpoints").glob("*/model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    refused = run_cli("models", "export", "names", "again", cwd=project)
    assert refused.rc == 4 and "model.safetensors" in refused.stderr and not (project / "again").exists()
