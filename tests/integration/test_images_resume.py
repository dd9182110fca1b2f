"""Image runs that are killed in the middle of an epoch, fed from a real S3 server: they end as if nothing had been."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.conftest import PATIENCE_S, Cli, Running
from tests.servers.faultproxy import FaultProxy, fault_proxy
from tests.servers.images_on_s3 import ImageBucket, images_on_s3
from tests.support.command import wait_until

BATCH = 8  # images in a step of both ranks
STEPS = 30  # 120 images to train on, twice
SLOW_S = 1.0  # an image: no run ends before it is killed, whoever has the processor meanwhile


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[ImageBucket]:
    with images_on_s3(tmp_path / "s3", per_class=30, size=(32, 24)) as made:
        yield made


@pytest.fixture
def proxy(bucket: ImageBucket) -> Iterator[FaultProxy]:
    with fault_proxy(bucket.signed.port) as made:
        yield made


class Runs:
    """Runs of one configuration, on a cluster that is up: a checkpoint after every fourth of an epoch's 15 steps."""

    def __init__(self, cli: Cli, cluster: str, source: str, options: dict[str, Any]) -> None:
        self.folder = cli.folder / "runs"
        self.cli = cli
        feeding = {"loader_workers": 1, "requests": 1, "augmentation": "crop", "image_size": 16, "batch_size": 4}
        training = {"architecture": "small_cnn", "epochs": 2, "base_lr": 0.01}
        config = {
            "workload": "images",
            "params": {"source": source, "source_options": options} | feeding | training,
            "cluster": {"address": cluster, "ranks": 2},
            "failure": {"grace_s": 2.0},
            "checkpoint": {"every_epochs": None, "every_steps": 4},
        }
        self.config = cli.folder / "pictures.yaml"
        self.config.write_text(json.dumps(config))

    def start(self, *more: str) -> Running:
        return self.cli.start("train", self.config, *more)

    def wait_for_step(self, running: Running, run: str, step: int) -> None:
        """Until a checkpoint of that step, or a later one, is home."""
        latest = self.folder / run / "checkpoints" / "latest"
        deadline = time.monotonic() + PATIENCE_S
        while not latest.exists() or self.saved(run) < step:
            assert running.popen.poll() is None, running.stderr
            assert time.monotonic() < deadline, f"no checkpoint of step {step}"
            time.sleep(0.02)

    def wait_until_heard(self, run: str) -> None:
        """Until every rank's steps are home that the newest checkpoint holds: a rank's lines come by themselves."""
        wait_until(lambda: all((rank, self.saved(run)) in self.steps(run) for rank in range(2)))

    def saved(self, run: str) -> int:
        """The step of the newest checkpoint."""
        return int((self.folder / run / "checkpoints" / "latest").read_text().removeprefix("step-"))

    def record(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / run / "run.json").read_text())
        return found

    def ranks(self, run: str) -> list[psutil.Process]:
        """Those of the attempt that is under way."""
        return [psutil.Process(rank["pid"]) for rank in self.record(run)["attempts"][-1]["ranks"]]

    def weights(self, run: str) -> str:
        file = self.folder / run / "checkpoints" / f"step-{STEPS}" / "model.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def steps(self, run: str) -> dict[tuple[int, int], tuple[float, float]]:
        """(rank, step) -> loss and share of hits, newest where a step was taken twice."""
        file = self.folder / run / "metrics.jsonl"
        whole, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")  # the last may be in the writing
        lines = map(json.loads, whole.splitlines())
        return {
            (line["rank"], line["step"]): (line["train/loss"], line["train/correct"])
            for line in lines
            if "train/loss" in line
        }


@pytest.mark.slow
def test_run_whose_driver_and_worker_of_a_loader_are_killed_in_an_epoch_ends_bit_equal(
    run_cli: Cli, warm_cluster: str, bucket: ImageBucket, proxy: FaultProxy
) -> None:
    runs = Runs(run_cli, warm_cluster, bucket.url, bucket.signed_options(proxy.url))
    undisturbed = runs.start("--run-id", "undisturbed").finish()
    assert undisturbed.rc == 0, undisturbed.stderr
    proxy.reset()
    proxy.inject(latency_s=SLOW_S, quick=5 * BATCH)

    night = runs.start("--run-id", "night")
    runs.wait_for_step(night, "night", 4)
    runs.wait_until_heard("night")
    ranks = runs.ranks("night")
    there = [*ranks, *ranks[0].children(), *ranks[1].children()]
    assert len(there) >= 4, "each rank has a worker that reads images"
    os.kill(night.popen.pid, signal.SIGKILL)
    night.finish()
    _, left = psutil.wait_procs(there, timeout=PATIENCE_S)
    assert left == []

    proxy.inject(latency_s=SLOW_S, quick=13 * BATCH)
    resumed = runs.start("--resume", "night", "--set", "failure.max_restarts=1")
    runs.wait_for_step(resumed, "night", 16)
    runs.ranks("night")[1].children()[0].kill()
    proxy.inject()
    ended = resumed.finish()
    assert ended.rc == 0, ended.stderr
    assert "the run's list of images is used again: 150 images" in ended.stderr
    assert proxy.counts()["list"] == 1, "one listing for all attempts"
    outcomes = [attempt["outcome"] for attempt in runs.record("night")["attempts"]]
    assert outcomes == ["failed", "failed", "succeeded"]
    assert runs.weights("night") == runs.weights("undisturbed")
    told, expected = runs.steps("night"), runs.steps("undisturbed")
    assert len(expected) == 2 * STEPS
    assert told == expected
    stored = yaml.safe_load((runs.folder / "night" / "config.yaml").read_text())
    assert stored["params"]["source_options"]["secret_access_key"] == "<left out>", (
        "it came with the configuration again"
    )
