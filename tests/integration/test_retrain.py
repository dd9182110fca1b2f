"""`ddptrain retrain` with real processes: what several starts do together, and what survives a kill in each stage."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords, Stage
from ddptrain.results.lookup import list_runs
from tests.conftest import PATIENCE_S, Cli, Finished, Running
from tests.servers.seaweed import seaweed

WORKLOAD = """
import json, os, time
import torch


def main(ctx, loss: float = 1.0, epochs: int = 3, wait_for: str = ""):
    model = torch.nn.Linear(2, 1)
    resumed = ctx.resume(model=model)
    first = int(resumed.epoch) + 1 if resumed else 1
    print("begins with epoch", first, flush=True)
    for epoch in range(first, epochs + 1):
        ctx.checkpoint(model=model, step=epoch, epoch=epoch, metrics={"val/loss": loss})
        if epoch == 2 and wait_for:
            print("waiting", flush=True)
            while not os.path.exists(wait_for) and not ctx.preempted:
                time.sleep(0.02)
"""

SCRIPT = """
import json, os, pathlib
pathlib.Path("out").mkdir(exist_ok=True)
if os.environ["RANK"] == "0":
    pathlib.Path("out/model.bin").write_bytes(b"weights")
    pathlib.Path("metrics.json").write_text(json.dumps({"val/loss": 0.5}))
"""

# The command, which kills itself: at a stage's message, or once the record says that the stage is complete.
KILLED = """
import os, signal, sys
from ddptrain.__main__ import main
from ddptrain.retrain.start import StageOutput
from ddptrain.model_registry.retrainings import RetrainRecords

stage, moment = sys.argv[1:3]


def dying(function, is_time):
    def call(self, *args, **kwargs):
        result = function(self, *args, **kwargs)
        if is_time(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


if moment == "told":
    StageOutput.stage = dying(StageOutput.stage, lambda name, *_: name == stage)
else:
    RetrainRecords.update = dying(RetrainRecords.update, lambda record: record.stage == stage)
sys.argv[1:] = sys.argv[3:]
sys.exit(main())
"""


# The command, whose registry cannot be reached any more once a stage's message has been shown.
CUT_OFF = """
import sys
from ddptrain.__main__ import main
from ddptrain.retrain.start import StageOutput
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreUnreachable

last, told, call, stage = sys.argv.pop(1), [], RemoteFolder._call, StageOutput.stage


def cut(self, work):
    if told:
        raise StoreUnreachable(f"{self.url} does not answer")
    return call(self, work)


def tell(self, name, *args, **kwargs):
    stage(self, name, *args, **kwargs)
    told.extend([name] if name == last else [])


RemoteFolder._call, StageOutput.stage = cut, tell
sys.exit(main())
"""


@pytest.fixture
def project(tmp_path: Path, warm_cluster: str) -> Path:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    (tmp_path / "cluster").write_text(warm_cluster)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("1")
    return tmp_path


def write_config(folder: Path, **fields: Any) -> Path:
    retrain = {"model": "mine", **fields.pop("retrain", {})}
    cluster = {"address": (folder / "cluster").read_text(), "ranks": 1}
    config = {"workload": "mine:main", "cluster": cluster, "data": {"sources": ["data"]}, "retrain": retrain}
    path = folder / "mine.yaml"
    path.write_text(json.dumps(config | fields))  # JSON is YAML
    return path


def registry(folder: Path) -> ModelRegistry:
    return ModelRegistry.open(str(folder / "models"))


def retrainings(folder: Path) -> list[RetrainRecord]:
    return list(reversed(RetrainRecords(registry(folder).folder, "mine").newest(50)))


def promotions(folder: Path) -> list[int]:
    return [change.version for change in registry(folder).history("mine") if change.action == "promoted"]


def last_object(done: Finished) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_promoted_then_unchanged_then_rejected(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    first = run_cli("retrain", config, "--output", "json")
    assert first.rc == 0, first.stderr
    end = last_object(first)
    assert (end["event"], end["status"], end["version"]) == ("retrain_finished", "promoted", 1)
    stages = [each["stage"] for each in end["stages"]]
    assert stages[:6] == ["lock", "check data", "train", "evaluate", "gate", "promote"]

    second = run_cli("retrain", config)
    assert second.rc == 0
    assert second.stdout.splitlines()[-1] == (
        "retrain mine unchanged: data, params and code are those of version 1, the champion"
    )

    third = run_cli("retrain", config, "--force", "--set", "params.loss=2.0")
    assert third.rc == 7
    assert third.stdout.splitlines()[-1] == (
        "retrain mine rejected: version 2 was rejected, version 1 stays the champion: "
        "val/loss 2 is worse than the champion's 1 by 1"
    )
    assert promotions(project) == [1]
    assert [each.version for each in registry(project).versions("mine")] == [1, 2]

    anyway = run_cli("retrain", config, "--force", "--set", "params.loss=3.0", "--promote-anyway", "a test of users")
    assert anyway.rc == 0
    change = registry(project).history("mine")[-1]
    assert (change.action, change.version) == ("promoted", 3)
    assert "rejected by the gate, promoted anyway: a test of users" in change.reason and change.user


def test_data_that_look_wrong_are_not_trained(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    for number in range(4):
        (project / "data" / f"{number}.csv").write_text("1")
    assert run_cli("retrain", config).rc == 0
    for number in range(4):
        (project / "data" / f"{number}.csv").unlink()
    done = run_cli("retrain", config)
    assert done.rc == 2
    assert done.stdout.splitlines()[-1] == (
        "retrain mine failed: the training data have shrunk from 5 to 1 files, to less than half; "
        "nothing was trained. If the data are right, add --force"
    )
    assert len(list_runs(project / "runs")) == 1
    forced = run_cli("retrain", config, "--force")
    assert forced.rc == 0 and "training anyway" in forced.stderr


STAGES = (Stage.CHECK_DATA, Stage.TRAIN, Stage.EVALUATE, Stage.GATE, Stage.PROMOTE, Stage.NOTIFY)


def test_start_after_a_kill_in_each_stage_continues(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    for stage in STAGES:
        for moment in ("told", "recorded"):
            if (stage, moment) == (Stage.NOTIFY, "told"):
                continue  # without a message there is nothing to tell
            killed = run_cli("retrain", config, program=(*run_cli.program(KILLED), stage, moment))
            assert killed.rc == -signal.SIGKILL, killed.stderr
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    assert "retrain mine promoted: version 1 is the champion" in done.stdout
    (record,) = [each for each in retrainings(project) if each.status == "promoted"]
    assert (record.version, record.starts) == (1, 11)  # the first one was killed before it had a record
    (run,) = list_runs(project / "runs")
    assert run.run_id == record.run_id and len(run.record.attempts) == 1, "trained once"
    assert promotions(project) == [1] and len(registry(project).versions("mine")) == 1
    registry(project).verify(registry(project).version("mine", 1))
    assert run_cli("retrain", config).stdout.startswith("retrain mine unchanged")


def test_registry_that_disappears_in_each_stage(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    for stage in (Stage.LOCK, *STAGES[:-1]):
        cut_off = run_cli("retrain", config, program=(*run_cli.program(CUT_OFF), stage))
        text = cut_off.stdout + cut_off.stderr
        assert cut_off.rc == 4, text
        assert "does not answer" in text and "Traceback" not in text
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    assert promotions(project) == [1] and len(list_runs(project / "runs")) == 1
    assert run_cli("retrain", config).stdout.startswith("retrain mine unchanged")


def test_training_is_repeated_if_its_run_was_deleted(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    killed = run_cli("retrain", config, program=(*run_cli.program(KILLED), Stage.TRAIN, "recorded"))
    assert killed.rc == -signal.SIGKILL, killed.stderr
    (run,) = list_runs(project / "runs")
    shutil.rmtree(run.layout.root)
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    assert "training again" in done.stderr and promotions(project) == [1]


def begun(run_cli: Cli, config: Path) -> Running:
    """A start whose training waits after its second checkpoint, which is in the run directory."""
    running = run_cli.start("retrain", config)
    running.wait_for("waiting")
    deadline = time.monotonic() + PATIENCE_S
    while not list(config.parent.glob("runs/*/checkpoints/step-2/checkpoint.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return running


def test_training_that_was_killed_is_resumed(project: Path, run_cli: Cli) -> None:
    config = write_config(project, params={"wait_for": "go"})
    begun(run_cli, config).kill_group()
    (project / "go").touch()
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    assert "continuing retraining 1 after the stage check data (it was killed)" in done.stderr
    (run,) = list_runs(project / "runs")
    assert "begins with epoch 3" in run.layout.log(0).read_text()


def test_deadline_saves_and_the_next_start_continues(project: Path, run_cli: Cli) -> None:
    config = write_config(project, params={"wait_for": "go"}, retrain={"deadline": "5s"})
    stopped = run_cli("retrain", config)
    assert stopped.rc == 8, stopped.stderr
    assert stopped.stdout.splitlines()[-1] == (
        "retrain mine deadline: the deadline of 5 s was reached; the next start continues"
    )
    (project / "go").touch()
    done = run_cli("retrain", config, "--set", "retrain.deadline=1h")
    assert done.rc == 0, done.stderr
    (run,) = list_runs(project / "runs")
    assert run.layout.log(0).read_text().count("begins with epoch 1") == 1


def test_second_start_is_skipped_and_replace_takes_over(project: Path, run_cli: Cli) -> None:
    config = write_config(project, params={"wait_for": "go"})
    first = begun(run_cli, config)
    second = run_cli("retrain", config, "--output", "json")
    assert second.rc == 0
    assert last_object(second)["status"] == "skipped"
    assert f"is being retrained by process {first.popen.pid} on" in last_object(second)["reason"]
    (skip,) = RetrainRecords(registry(project).folder, "mine").skips()
    assert "is being retrained" in skip["reason"]

    heir = run_cli.start("retrain", config, "--set", "retrain.overlap=replace")
    ended = first.finish()
    assert ended.rc == 75, ended.stderr
    assert "retrain mine interrupted: " in ended.stdout
    (project / "go").touch()
    done = heir.finish()
    assert done.rc == 0, done.stderr
    assert promotions(project) == [1] and len(list_runs(project / "runs")) == 1


def test_scheduled_time_runs_once(project: Path, run_cli: Cli) -> None:
    config = write_config(project, retrain={"if_unchanged": "train"})
    slot = ("--slot", "2026-03-01T03:00:00Z")
    assert run_cli("retrain", config, *slot).rc == 0
    again = run_cli("retrain", config, *slot)
    assert again.rc == 0
    assert again.stdout.splitlines()[-1] == (
        "retrain mine skipped: the scheduled time 2026-03-01T03:00:00Z is done: "
        "retraining 1 of 2026-03-01T03:00:00Z promoted"
    )
    assert run_cli("retrain", config, "--slot", "2026-03-01T04:00:00+01:00").stdout == again.stdout
    assert len(list_runs(project / "runs")) == 1


def test_dry_run_changes_nothing(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    done = run_cli("retrain", config, "--dry-run")
    assert done.rc == 0 and done.stdout == "retrain mine skipped: dry run: it would train\n"
    assert not (project / "models").exists() and not (project / "runs").exists()


def test_damaged_champion_is_refused_and_replaced(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    assert run_cli("retrain", config).rc == 0
    weights = next((project / "models" / "mine" / "versions" / "1").rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused = run_cli("models", "promote", "mine", "1")
    assert refused.rc == 4 and weights.name in refused.stderr
    done = run_cli("retrain", config, "--force", "--set", "params.loss=5.0")
    assert done.rc == 0, done.stderr
    assert "the champion cannot be evaluated: version 1 of model mine is damaged" in done.stderr
    assert promotions(project) == [1, 2]


def test_script_declares_its_model_and_metrics(project: Path, run_cli: Cli) -> None:
    (project / "train.py").write_text(SCRIPT)
    workload = {"script": "train.py", "checkpoint": "out", "metrics": "metrics.json"}
    config = write_config(project, workload=workload)
    done = run_cli("retrain", config)
    assert done.rc == 0, done.stderr
    version = registry(project).version("mine", 1)
    assert version.metrics == {"val/loss": 0.5}
    assert (project / "models/mine/versions/1/output/model.bin").read_bytes() == b"weights"
    (project / "train.py").write_text("print('writes nothing')")
    stale = run_cli("retrain", config)
    assert stale.rc == 2
    assert "workload.metrics is metrics.json, which is still as it was before the run" in stale.stdout


def test_training_that_fails_begins_anew(project: Path, run_cli: Cli) -> None:
    config = write_config(project)
    broken = run_cli("retrain", config, "--set", "params.epochs=none")
    assert broken.rc in (1, 2)
    (project / "mine.py").write_text("def main(ctx): raise ValueError('a mistake')")
    failed = run_cli("retrain", config)
    assert failed.rc == 1
    assert failed.stdout.splitlines()[-1].startswith("retrain mine failed: ValueError: a mistake (run mine-")
    again = run_cli("retrain", config)
    assert again.rc == 1
    first, second = (each.run_id for each in retrainings(project) if each.status == "failed")
    assert first != second


def test_configuration_without_the_section(project: Path, run_cli: Cli) -> None:
    config = project / "x.yaml"
    config.write_text("workload: mine:main\n")
    done = run_cli("retrain", config)
    assert done.rc == 2 and "has no section retrain" in done.stderr


def test_models_and_runs_in_a_store(project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "store").mkdir()
    with seaweed(project / "store", "bucket") as environment:
        for name, value in {**environment, "XDG_CACHE_HOME": str(project / "cache")}.items():
            monkeypatch.setenv(name, value)
        places = {"models": {"dir": "s3://bucket/models"}, "results": {"dir": "s3://bucket/runs"}}
        config = write_config(project, params={"wait_for": "go"}, **places)
        first = run_cli.start("retrain", config)
        first.wait_for("waiting")
        assert "skipped: model mine is being retrained by process" in run_cli("retrain", config).stdout
        first.kill_group()
        (project / "go").touch()
        done = run_cli("retrain", config)
        assert done.rc == 0, done.stderr
        store = ModelRegistry.open("s3://bucket/models")
        assert [change.version for change in store.history("mine") if change.action == "promoted"] == [1]
        assert run_cli("retrain", config).stdout.startswith("retrain mine unchanged")
