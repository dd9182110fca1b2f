"""Runs in an object store: a real S3 server, real drivers, and machines that share nothing but the bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from tests.conftest import Cli, Finished
from tests.integration.test_restart import WORKLOAD
from tests.servers.seaweed import bucket_of, seaweed
from tests.support.command import wait_until

RUNS = "s3://bucket/some/runs"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with seaweed(tmp_path_factory.mktemp("seaweed"), "bucket") as environment:
        yield environment


class Machine:
    """A machine of its own as far as files go: it reaches the store, and keeps its copies in `home`."""

    def __init__(self, cli: Cli, s3: dict[str, str], name: str, cluster: str | None = None) -> None:
        self.cli, self.s3, self.home = cli, s3, cli.folder / name
        self.cluster = {"ranks": 2, "wait_s": 90.0, **({"address": cluster} if cluster else {})}
        self.bucket = bucket_of(s3, "bucket")
        self.env = {
            **s3,
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }
        (cli.folder / "work.py").write_text(WORKLOAD)

    def config(self, place: str = RUNS, **params: object) -> Path:
        path = self.cli.folder / "steps.yaml"
        content = {"workload": "work:steps", "params": params, "cluster": self.cluster, "results": {"dir": place}}
        path.write_text(json.dumps({**content, "checkpoint": {"metric": "train/loss"}}))
        return path

    def __call__(self, *args: str | Path) -> Finished:
        return self.cli(*args, env=self.env)

    def read(self, path: str) -> bytes:
        """The content of a file of a run in the store; b"" while there is none."""
        try:
            return bytes(self.bucket.get(f"some/runs/{path}").bytes())
        except FileNotFoundError:
            return b""

    def record(self, run: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.read(f"{run}/run.json"))
        return record

    def weights(self, run: str, step: int = 4) -> dict[str, bytes]:
        data = self.read(f"{run}/checkpoints/step-{step}/model.safetensors")
        return {name: value.tobytes() for name, value in load(data).items()}

    def working_folders(self) -> list[Path]:
        return list((self.home / "state" / "ddptrain" / "runs").glob("*/*"))


def test_run_of_a_killed_driver_is_resumed_elsewhere_with_the_same_weights(
    run_cli: Cli, s3: dict[str, str], warm_cluster: str
) -> None:
    first, second = (Machine(run_cli, s3, name, warm_cluster) for name in ("first", "second"))
    go = str(run_cli.folder / "go")
    undisturbed = first("train", first.config(), "--run-id", "undisturbed")
    assert undisturbed.rc == 0, undisturbed.stderr
    assert f"results {RUNS}/undisturbed" in undisturbed.stderr + undisturbed.stdout
    assert first.working_folders() == []

    running = run_cli.start(
        "train", first.config(die_in=3, how="wait", wait_for=go), "--run-id", "night", env=first.env
    )
    wait_until(lambda: bool(first.read("night/checkpoints/step-2/checkpoint.json")), "checkpoint in the store")
    (run_cli.folder / "home").touch()
    running.wait_for("waiting")
    # Uploaded every ten seconds.
    wait_until(lambda: b"attempt 1 begins" in first.read("night/logs/rank-0.log"), "log in the store")
    locked = second("train", second.config(die_in=3, how="wait", wait_for=go), "--resume", "night")
    assert locked.rc == 6 and f"run {RUNS}/night is held by process {running.popen.pid}" in locked.stderr
    os.kill(running.popen.pid, signal.SIGKILL)
    running.finish()
    shutil.rmtree(first.home)

    resumed = second("train", second.config(die_in=3, how="wait", wait_for=go), "--resume", "auto")
    assert resumed.rc == 0, resumed.stderr
    assert (
        "continuing run night" in resumed.stderr and "resuming with the checkpoint of step 2, epoch 2" in resumed.stderr
    )
    assert second.weights("night") == first.weights("undisturbed")
    record = second.record("night")
    assert record["status"] == "succeeded" and record["checkpoints"] == ["step-4", "step-3", "step-2"]
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["failed", "succeeded"]
    text = second.read("night/logs/rank-0.log").decode()
    assert "attempt 1 begins with epoch 1" in text and "attempt 2 begins with epoch 3" in text
    events = second.read("night/events.jsonl").splitlines()
    assert json.loads(events[-1])["run_dir"] == f"{RUNS}/night"
    looks_right_from_anywhere(Machine(run_cli, s3, "third"))


def looks_right_from_anywhere(reader: Machine) -> None:
    listed = json.loads(reader("results", "list", "--runs-dir", RUNS, "--json").stdout)
    assert [(run["run_id"], run["status"]) for run in listed] == [("night", "succeeded"), ("undisturbed", "succeeded")]
    shown = reader("results", "show", f"{RUNS}/night")
    assert f"{RUNS}/night" in shown.stdout and "step-4, step-3, step-2" in shown.stdout
    logs = reader("results", "logs", "night", "--rank", "1", "--runs-dir", RUNS)
    assert "attempt 2 begins with epoch 3" in logs.stdout
    drawn = reader("results", "compare", "night", "--runs-dir", RUNS, "--metric", "train/loss")
    assert drawn.rc == 0 and "train/loss" in drawn.stdout, drawn.stderr
    assert not list(reader.home.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("s3://none/runs", "cannot keep runs in s3://none/runs: there is no bucket none; create it first"),
        ("s5://bucket/runs", "cannot keep runs or models in s5://bucket/runs: give a path, or a bucket of S3, "),
    ],
)
def test_place_that_is_none_is_one_line_before_anything_starts(
    run_cli: Cli, s3: dict[str, str], place: str, says: str
) -> None:
    machine = Machine(run_cli, s3, "first")
    ended = machine("train", machine.config(place))
    assert (ended.rc, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"ddptrain: error: {says}") and ended.stderr.count("\n") == 1
