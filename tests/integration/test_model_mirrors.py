"""Mirrors of the registry: W&B's test backend, a real MLflow server, a mirror of the user, and what survives a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from tests.conftest import Cli, Finished
from tests.servers.ports import free_ports
from tests.servers.wandb_backend import Backend, wandb_backend

# Kills the command that has called it; the second time it only writes what it was given.
KILLS = """
import json, os, pathlib, signal, time
import torch


def main(ctx):
    ctx.checkpoint(model=torch.nn.Linear(2, 1), step=1, epoch=1, metrics={"val/loss": 1.0})


def mirror(model):
    killed = pathlib.Path(model.options["folder"], "killed")
    if not killed.exists():
        killed.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    found = [[each.number, each.aliases, sorted(each.files)] for each in model.versions]
    pathlib.Path(model.options["folder"], "found.json").write_text(json.dumps([model.name, model.reason, found]))
    model.tell("mirrored")
"""

DIES = """
import os
from mlflow import MlflowClient
from ddptrain.model_registry.mirrors import mlflow_mirror


def mirror(model):
    MlflowClient.create_model_version = lambda *given, **named: os._exit(9)
    mlflow_mirror.mirror(model)
"""


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    found = ModelRegistry.open(str(tmp_path / "models"))
    for number in (1, 2):
        record = VersionRecord("", 0, "", f"names-{number}", "petnames", 5, {"val/loss": 2.5}, ())
        files: dict[str, Path | bytes] = {
            "run.json": b'{"name": "pets"}',
            "output/weights": f"weights {number}".encode(),
        }
        found.add_version("names", files, record)
    return found


def succeeded(done: Finished) -> Finished:
    assert done.rc == 0, done.stderr
    return done


# --- W&B ---


def aliases(backend: Backend) -> dict[int, set[str]]:
    """Version -> the aliases of its artifact; each version has one artifact."""
    found = {each.metadata["version"]: set(each.aliases) - {"latest"} for each in backend.artifacts.values()}
    assert len(found) == len(backend.artifacts)
    return found


@pytest.mark.slow
def test_wandb_has_an_artifact_for_each_version_with_its_aliases(registry: ModelRegistry, run_cli: Cli) -> None:
    with wandb_backend() as backend:
        env = {**backend.environment, "HOME": str(run_cli.folder)}
        done = succeeded(run_cli("models", "promote", "names", "1", "--mirror", "wandb", env=env))
        assert done.stderr.startswith("W&B has the versions of names with an alias: http")
        assert aliases(backend) == {1: {"champion", "version-1"}}
        succeeded(run_cli("models", "promote", "names", "2", "--mirror", "wandb", env=env))
        assert aliases(backend) == {1: {"previous", "version-1"}, 2: {"champion", "version-2"}}
        rolled_back = ("models", "rollback", "names", "--reason", "too slow")
        succeeded(run_cli(*rolled_back, env={**env, "DDPTRAIN_MODEL_MIRRORS": "wandb"}))
        assert registry.state("names").aliases == {"champion": 1}
        assert aliases(backend) == {1: {"champion", "previous", "version-1"}, 2: {"version-2"}}, "W&B keeps previous"

        first = next(each for each in backend.artifacts.values() if each.metadata["version"] == 1)
        assert (first.type, first.name, first.state) == ("model", "names", "COMMITTED")
        assert first.files == {"run.json": b'{"name": "pets"}', "output/weights": b"weights 1"}
        assert first.metadata["run_id"] == "names-1" and first.metadata["metrics"] == {"val/loss": 2.5}
        assert "latest" in first.aliases, "the champion"
        assert {run.project for run in backend.runs.values()} == {"pets"}, "that of the run that trained it"
        assert [run.job_type for run in backend.runs.values()] == ["model-registry"] * 3
        assert not backend.unknown

        backend.held = "CreateArtifact"  # it is silent from now on
        started = time.monotonic()
        done = succeeded(
            run_cli("models", "promote", "names", "2", "--mirror", "wandb", "--mirror-timeout", "8", env=env)
        )
        assert time.monotonic() - started < 8 + 10
        assert "warning: mirror wandb is not up to date: " in done.stderr
        backend.held = ""
    done = succeeded(run_cli("models", "promote", "names", "2", "--mirror", "wandb", "--mirror-timeout", "8", env=env))
    assert "warning: mirror wandb is not up to date: " in done.stderr
    assert registry.state("names").aliases == {"champion": 2, "previous": 1}


# --- MLflow ---


class MlflowServer:
    """A client of the REST API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/{path}", headers={"Content-Type": "application/json"})
        request.data = json.dumps(body).encode() if body else None
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else {}

    def aliases(self) -> dict[str, str]:
        """Alias -> our number of the version that it leads to."""
        model = self.get("api/2.0/mlflow/registered-models/get?name=names")["registered_model"]
        ours = {each["version"]: self.tags(each)["ddptrain.version"] for each in self.versions()}
        return {each["alias"]: ours[each["version"]] for each in model.get("aliases", ())}

    def versions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("api/2.0/mlflow/model-versions/search").get("model_versions", [])
        return found

    def tags(self, of: dict[str, Any]) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in of["tags"]}

    def runs(self) -> list[dict[str, Any]]:
        experiment = self.get("api/2.0/mlflow/experiments/get-by-name?experiment_name=ddptrain-models")["experiment"]
        asked = {"experiment_ids": [experiment["experiment_id"]], "max_results": 100}
        found: list[dict[str, Any]] = self.get("api/2.0/mlflow/runs/search", asked).get("runs", [])
        return found


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A real server that keeps everything in the folder."""
    folder.mkdir()
    (port,) = free_ports(1)
    stores = [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1", *stores]
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    server = MlflowServer(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                server.get("health")
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_mlflow_server_has_the_versions_with_their_aliases(
    registry: ModelRegistry, run_cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    with mlflow_server(tmp_path / "mlflow") as server:
        env = {"MLFLOW_TRACKING_URI": server.url}
        promote = ("models", "promote", "names")
        done = succeeded(run_cli(*promote, "1", "--mirror", "dies:mirror", env=env))
        assert "warning: mirror dies:mirror is not up to date: its process ended with 9" in done.stderr
        assert server.versions() == [] and len(server.runs()) == 1

        done = succeeded(run_cli(*promote, "1", "--mirror", "mlflow", env=env))
        assert done.stderr.strip() == "MLflow has version 1 of names as version 1"
        (version,) = server.versions()
        (run,) = server.runs()
        assert run["info"]["run_id"] == version["run_id"], "the upload was continued"
        assert version["source"] == f"{run['info']['artifact_uri']}/model"
        assert server.tags(version)["ddptrain.version"] == "1" and len(server.tags(version)["ddptrain.sha256"]) == 64
        assert [(each["key"], each["value"], each["step"]) for each in run["data"]["metrics"]] == [("val/loss", 2.5, 5)]
        files = {path.name: path.read_bytes() for path in (tmp_path / "mlflow/artifacts").rglob("*") if path.is_file()}
        assert files == {"run.json": b'{"name": "pets"}', "weights": b"weights 1"}
        assert server.aliases() == {"champion": "1"}

        succeeded(run_cli(*promote, "2", env=env))
        alias = ("models", "alias", "names@staging")
        succeeded(run_cli(*alias, "1", "--mirror", "mlflow", env=env))
        assert server.aliases() == {"champion": "2", "previous": "1", "staging": "1"}
        succeeded(run_cli(*alias, "--delete", "--mirror", "mlflow", env=env))
        succeeded(run_cli("models", "rollback", "names", "--mirror", "mlflow", env=env))
        assert server.aliases() == {"champion": "1"}
        assert len(server.versions()) == len(server.runs()) == 2
    done = succeeded(run_cli(*promote, "2", "--mirror", "mlflow", env=env))
    assert "warning: mirror mlflow is not up to date: MlflowException: " in done.stderr
    assert "Connection refused" in done.stderr or "Max retries exceeded" in done.stderr


# --- retrain ---


def test_retrain_that_is_killed_in_a_mirror_calls_it_again(tmp_path: Path, warm_cluster: str, run_cli: Cli) -> None:
    (tmp_path / "mine.py").write_text(KILLS)
    (tmp_path / "data").write_text("1")
    config = {
        "workload": "mine:main",
        "cluster": {"address": warm_cluster, "ranks": 1},
        "data": {"sources": ["data"]},
        "retrain": {"model": "mine"},
        "models": {"mirrors": [{"name": "mine:mirror", "options": {"folder": str(tmp_path)}}, "mine:missing"]},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config))  # JSON is YAML
    assert run_cli("retrain", "mine.yaml").rc == -signal.SIGKILL
    assert not (tmp_path / "found.json").exists()
    done = succeeded(run_cli("retrain", "mine.yaml"))
    assert "retrain mine promoted: version 1 is the champion" in done.stdout
    assert "ddptrain: mirrored\n" in done.stderr
    assert "mirror mine:missing is not up to date: AttributeError: module 'mine' has no attribute" in done.stderr
    name, reason, ((number, its_aliases, files),) = json.loads((tmp_path / "found.json").read_text())
    assert (name, reason, number, its_aliases) == ("mine", "retraining 1", 1, ["champion"])
    assert "run.json" in files and "checkpoints/step-1/model.safetensors" in files
    history = ModelRegistry.open(str(tmp_path / "models")).history("mine")
    assert [change.action for change in history] == ["created", "promoted"]
