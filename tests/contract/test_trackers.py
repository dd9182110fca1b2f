"""W&B against a stand-in for its server: what is recorded offline gets there later, once."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.contract.conftest import Project, pids_of
from tests.servers.wandb_backend import Backend, wandb_backend
from tests.support.command import Cli

TRAIN = """
    import torch
    from PIL import Image

    def train(ctx):
        model = torch.nn.Linear(2, 1)
        for step in range(1, 5):
            ctx.log({"loss": 1 / step}, step=step)
            ctx.checkpoint(model=model, step=step, metrics={"loss": 1 / step})
        ctx.log_image("shown", Image.new("RGB", (4, 4)), step=4)
        ctx.log_table("worst", ["image", "name", "score"], [[Image.new("RGB", (4, 4)), "rex", 0.5]], step=4)
"""
STEPS = [1, 2, 3, 4]


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as started:
        yield started


def train(project: Project, cluster: str, env: dict[str, str], mode: str = "rank0") -> Path:
    """Train, and return the run directory."""
    wandb = {"mode": mode, "log_every": 1, "checkpoints": True}
    name = project.function(TRAIN, cluster={"ranks": 2}, checkpoint={"keep": 2}, tracking={"wandb": wandb})
    where = ["--cluster", cluster] if cluster else []
    project("train", name, *where, env={"WANDB_API_KEY": "", "HOME": str(project.folder), **env}, rc=0)
    return project.run_directories()[-1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, running_cluster: tuple[str, dict[str, str]]) -> Path:
    """The directory of a run that was recorded offline; to be copied."""
    folder = tmp_path_factory.mktemp("recorded")
    address, tls = running_cluster
    return train(Project(folder, Cli(folder)), address, {"WANDB_MODE": "offline", **tls})


@pytest.fixture
def offline(project: Project, recorded: Path) -> Path:
    """A copy of that run, in another place than it was recorded in."""
    return shutil.copytree(recorded, project.folder / "elsewhere" / recorded.name)


def assert_complete(backend: Backend, run_id: str, table_name: str = "") -> None:
    run = backend.runs[run_id]
    assert [row["step"] for row in run.history if "loss" in row] == STEPS
    assert run.exits[-1] == 0
    assert any(file.startswith("media/images/shown") for file in run.files)
    if not table_name:
        return
    table = backend.artifact(table_name)
    assert (table.run, table.state, table.metadata) == (run_id, "COMMITTED", {"step": 4})
    (text,) = (data for file, data in table.files.items() if file.endswith(".table.json"))
    ((image, *values),) = json.loads(text)["data"]
    assert values == ["rex", 0.5]
    assert table.files[image["path"]].startswith(b"\x89PNG")


def checkpoints(backend: Backend) -> dict[str, set[str]]:
    """The files of each checkpoint that the server has, by the alias of its step."""
    sent = [each for each in backend.artifacts.values() if each.type == "model" and each.state == "COMMITTED"]
    return {alias: set(each.files) for each in sent for alias in each.aliases if alias != "latest"}


def test_offline_run_gets_to_the_server_wherever_it_was_moved(
    project: Project, offline: Path, backend: Backend
) -> None:
    run = offline
    staged = [path for path in (run / "tracking").rglob("*") if path.is_file() and "staging" in path.parts]
    assert not staged, "an offline log holds numbers and images, and refers to no files outside of it"
    done = project("results", "sync", run, env=backend.environment, rc=0)
    assert done.stdout == f"{run.name}: 1 sent to W&B\n"
    assert_complete(backend, backend.run.id)

    asked = len(backend.asked)
    done = project("results", "sync", run, env=backend.environment, rc=0)
    assert (done.stdout, len(backend.asked)) == (f"{run.name}: nothing to send to W&B\n", asked)
    shown = project("results", "show", run, rc=0).stdout
    assert f"{backend.url}/stub-entity/work/runs/{backend.run.id}" in shown
    assert "not sent" not in shown
    assert not backend.unknown


def test_online_run_has_its_tables_and_checkpoints_as_artifacts(
    project: Project, shared_cluster: str, backend: Backend
) -> None:
    run = train(project, shared_cluster, backend.environment, mode="process")
    first = project.record()["tracking"]["wandb"]["id"]
    assert sorted(backend.runs) == [first, f"{first}-1"]
    assert_complete(backend, first, f"worst_{run.name}")
    assert_complete(backend, f"{first}-1", f"worst_{run.name}_rank_1")
    sent = checkpoints(backend)
    assert sent.keys() <= {f"step-{step}" for step in STEPS} and sent["step-4"] == {"model.safetensors", "state.pt"}
    (newest,) = (each for each in backend.artifacts.values() if "latest" in each.aliases and each.type == "model")
    assert "step-4" in newest.aliases
    assert not [path for path in run.rglob("*") if "sending" in path.name], "nothing of it is left"


@pytest.mark.long
def test_what_could_not_be_sent_is_sent_by_the_next_call(project: Project, offline: Path, backend: Backend) -> None:
    run = offline
    backend.fault = "unauthorized"
    done = project("results", "sync", run, env=backend.environment, rc=4)
    assert f"{run.name}: 1 of 1 W&B runs not sent: " in done.stdout and "it is unauthorized" in done.stdout
    assert "not sent" in project("results", "show", run, rc=0).stdout
    backend.fault = ""
    done = project("results", "sync", run, env=backend.environment, rc=0)
    assert_complete(backend, backend.run.id)


def test_sync_that_is_ended_by_sigterm_leaves_no_process_and_no_folder(
    project: Project, offline: Path, backend: Backend
) -> None:
    backend.fault = "hang"
    temporary = project.folder / "temporary"
    temporary.mkdir()
    syncing = project.start("results", "sync", offline, env={**backend.environment, "TMPDIR": str(temporary)})
    syncing.wait_for("waiting for http")
    children = psutil.Process(syncing.popen.pid).children(recursive=True)
    assert any("wandb" in " ".join(child.cmdline()) for child in children)
    syncing.popen.send_signal(signal.SIGTERM)
    assert syncing.finish(20).rc == 143
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert not [*temporary.iterdir()]
    assert not pids_of(str(temporary))


@pytest.mark.long
def test_server_that_does_not_answer_is_named_and_waited_for_until_the_limit(
    project: Project, offline: Path, backend: Backend
) -> None:
    run = offline
    backend.die()
    done = project("results", "sync", run, "--timeout", "8", env=backend.environment, rc=4)
    assert f"{run.name}: waiting for {backend.url} to take the data, for 3 s at most (--timeout)" in done.stderr
    assert f"{run.name}: 1 of 1 W&B runs not sent: " in done.stdout


def requirement() -> str:
    """What pyproject.toml asks of wandb."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (wandb,) = (text for text in project["dependencies"] if text.startswith("wandb"))
    return str(wandb)


def test_every_newer_version_of_wandb_can_be_installed() -> None:
    assert re.fullmatch(r"wandb>=[\d.]+", requirement())


@pytest.mark.long
def test_oldest_version_of_wandb_records_and_sends(project: Project, backend: Backend) -> None:
    uv, packages = str(Path(sys.executable).with_name("uv")), str(project.folder / "packages")
    install = [uv, "pip", "install", "--no-deps", "--target", packages, requirement().replace(">=", "==")]
    subprocess.run(install, check=True, timeout=300)
    old = {"PYTHONPATH": packages}
    train(project, "", {**old, "WANDB_MODE": "offline"})
    project("results", "sync", "latest", env={**old, **backend.environment}, rc=0)
    assert_complete(backend, backend.run.id)
    train(project, "", {**old, **backend.environment}, mode="shared")
    assert len(backend.runs[project.record()["tracking"]["wandb"]["id"]].clients) == 2
