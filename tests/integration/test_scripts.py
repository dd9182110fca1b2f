"""Scripts that know nothing of ddptrain run as under torchrun, and examples do what their first lines say."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished

SCRIPTS = Path(__file__).with_name("scripts")
EXAMPLES = Path(__file__).parents[2] / "examples"
# The DDP tutorial's script, torch elastic's ImageNet, and minGPT-ddp: each in miniature.
SHAPES = [
    (EXAMPLES / "torchrun_script.py", ["--epochs", "2", "--snapshot", "snapshot.pt"]),
    pytest.param(SCRIPTS / "imagenet.py", ["-j", "1", "--epochs", "2"], marks=pytest.mark.long),
    pytest.param(SCRIPTS / "mingpt" / "main.py", ["trainer.max_epochs=2"], marks=pytest.mark.long),
]


def run_json(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "runs").glob("*/run.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def losses(said: Finished, logs: str) -> list[list[str]]:
    """What each rank has said of its losses."""
    assert said.rc == 0, said.stdout + said.stderr
    texts = [path.read_text() for path in sorted(Path().glob(logs))]
    return [[line for line in text.splitlines() if "loss" in line] for text in texts]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("script", "args"), SHAPES, ids=lambda value: value.stem if isinstance(value, Path) else "")
def test_script_has_the_losses_that_it_has_under_torchrun(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_cluster: str, script: Path, args: Sequence[str]
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--standalone", "--nproc-per-node", "2", "--redirects", "3", "--log-dir", "../logs"]
    said = run_cli(*options, script, *args, program=(sys.executable, "-m", "torch.distributed.run"), cwd=theirs)
    expected = losses(said, "logs/*/*/*/stdout.log")
    assert [len(lines) >= 2 for lines in expected] == [True, True]
    where = ("--ranks", "2", "--cluster", warm_cluster)
    found = losses(run_cli("run", *where, script, "--", *args, cwd=ours), "ours/runs/*/logs/rank-?.log")
    assert found == expected
    assert {path.name for path in ours.iterdir()} == {"runs", *(path.name for path in theirs.iterdir())}


def test_script_finds_itself_as_under_torchrun(run_cli: Cli, tmp_path: Path, warm_cluster: str) -> None:
    args: list[str | Path] = [
        "--set",
        "failure.max_restarts=2",
        SCRIPTS / "probe.py",
        "--a",
        "--",
        tmp_path,
    ]
    said = run_cli("run", "--cluster", warm_cluster, "--ranks", "2", *args)
    assert said.rc == 0, said.stdout + said.stderr
    told = json.loads((tmp_path / "probe-1.json").read_text())
    assert told.pop("env") == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert told == {
        "argv": [str(SCRIPTS / "probe.py"), "--a", "--", str(tmp_path)],
        "path": str(SCRIPTS),
        "beside": "beside",
        "file": str(SCRIPTS / "probe.py"),
        "package": None,
        "cwd": str(tmp_path),
        "pickled": 3,
        "fork": [2, 4],
        "spawn": [2, 4],
        "loaded": 285,
        "sharded": "DTensor",
    }
    assert run_json(tmp_path)["name"] == "probe"


def test_detached_script_is_stopped_and_resumed_in_its_run_directory(
    run_cli: Cli, tmp_path: Path, warm_cluster: str
) -> None:
    command = ["run", "--ranks", "2", "--cluster", warm_cluster, "--resume", "auto"]
    script: list[str | Path] = [SCRIPTS / "resumes.py", "--", tmp_path / "saved"]
    begun = run_cli(*command, "--detach", *script)
    assert begun.rc == 0, begun
    run = begun.stdout.strip()
    following = run_cli.start("results", "logs", run, "--follow")
    for rank in (0, 1):
        following.wait_for(f"[rank {rank}] ready, restarts 0")
    stopped = run_cli("stop", run)
    assert stopped.rc == 0 and run_json(tmp_path)["status"] == "preempted", stopped
    assert following.finish().rc == 0

    resumed = run_cli(*command, *script)
    assert resumed.rc == 0 and f"continuing run {run}, which was preempted" in resumed.stderr, resumed
    assert f"[rank 1] resumed from step 7 restarts 1 run {run}" in resumed.stdout
    record = run_json(tmp_path)  # there is one run directory
    assert (record["status"], [each["attempt"] for each in record["attempts"]]) == ("succeeded", [1, 2])
    changed = run_cli(*command[:-1], run, *script, "--lr", "0.1")
    assert changed.rc == 2 and "has succeeded: there is nothing to resume" in changed.stderr


def test_script_of_a_file_takes_arguments_and_may_ask_for_its_context(
    run_cli: Cli, tmp_path: Path, warm_cluster: str
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(SCRIPTS / "ends.py", folder / "ends.py")
    (folder / "c.yaml").write_text("workload: {script: ends.py, args: [--lr, 0.1, silently]}\ncluster: {ranks: 2}\n")
    said = run_cli("train", "project/c.yaml", "--cluster", warm_cluster)
    assert said.rc == 0, said.stdout + said.stderr
    assert "[rank 1] argv ['--lr', '0.1', 'silently']" in said.stdout
    record = run_json(tmp_path)
    assert (record["name"], record["workload"], record["last_metrics"]) == ("ends", "ends.py", {"mine": 0.5})


@pytest.mark.long
def test_minimal_example_trains_and_its_return_value_is_kept(run_cli: Cli, tmp_path: Path) -> None:
    said = run_cli("train", EXAMPLES / "minimal.yaml")
    assert said.rc == 0, said.stdout + said.stderr
    record = run_json(tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = {row["rank"]: row["train/loss"] for row in rows if row["epoch"] == 3}
    assert record["result"]["loss"] == pytest.approx(last[0]) and sorted(last) == [0, 1]
    assert record["last_metrics"]["train/loss"] == pytest.approx((last[0] + last[1]) / 2)
    assert len((EXAMPLES / "minimal_function.py").read_text().splitlines()) < 40
    assert re.search(r'result +\{"loss": ', run_cli("results", "show", "latest").stdout)
