"""Whatever becomes of W&B, training ends as it would have, and soon, with every row in the run directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished
from tests.servers.wandb_backend import Backend, wandb_backend
from tests.servers.wandb_training import Training, wait_until_rows

OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
FINISH_S = 5.0  # configured; the default's bound is 35 s for 30 s
START_S = 40.0  # of a tracker, on a machine that is busy with other tests
MARGIN_S = 20.0


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as there:
        yield there


@pytest.fixture
def training(tmp_path: Path, run_cli: Cli) -> Training:
    return Training(tmp_path, run_cli)


def warnings_of(ended: Finished, rank: int) -> list[str]:
    """What the person is told of a rank's W&B, but for where the run is."""
    said = [f"ddptrain: rank {rank}: wandb", f"[rank {rank}] ddptrain: W&B"]
    lines = (ended.stderr + ended.stdout).splitlines()
    return [line for line in lines if any(line.startswith(start) for start in said) and "wandb: http" not in line]


@pytest.mark.slow
def test_server_that_refuses_breaks_or_hangs_at_the_start(backend: Backend, training: Training) -> None:
    backend.faults = {"rank_0": "unauthorized", "rank_1": "broken", "rank_2": "hang"}
    ended = training.train(
        {**backend.environment, "WANDB_INIT_TIMEOUT": "3"}, ranks=3, mode="process", finish_timeout_s=3 + START_S
    )
    ended_at = time.time()
    training.assert_unharmed(ended, ranks=3)
    assert training.s_beyond_training(ended_at) < 3 + START_S + MARGIN_S
    runs = training.offline()
    assert [run.name for run in runs] == ["rank_0", "rank_1", "rank_2"]
    for run in runs:
        assert [row["step"] for row in run.history if "train/loss" in row] == [*range(1, 41)]
    for rank in range(3):
        assert len(warnings_of(ended, rank)) == 1, ended


def test_server_that_dies_in_mid_run_and_a_core_that_is_killed(backend: Backend, training: Training) -> None:
    params = {"wait_at": 20, "kill_core_of": 1, "pause": 0.02}
    running = training.start(backend.environment, mode="process", finish_timeout_s=FINISH_S, params=params)
    deadline = time.monotonic() + 90
    while sum(event["event"] == "tracked" for event in training.events()) < 2:
        assert running.popen.poll() is None and time.monotonic() < deadline, running.stderr
        time.sleep(0.05)
    wait_until_rows(training, 2, least=20)
    backend.die()
    (training.folder / "go").touch()
    ended = running.finish()
    ended_at = time.time()
    training.assert_unharmed(ended, ranks=2)
    assert training.s_beyond_training(ended_at) < FINISH_S + MARGIN_S
    for rank in range(2):
        assert len(warnings_of(ended, rank)) == 1, ended

    with wandb_backend() as restored:
        synced = training.cli("results", "sync", "latest", env=restored.environment)
        assert synced.rc == 0, synced.stderr
        rows = {run.name: [row["step"] for row in run.history if "train/loss" in row] for run in restored.runs.values()}
    assert rows == {"rank_0": [*range(1, 41)], "rank_1": [*range(1, 21)]}, "what the core had taken was not lost"


def test_killed_rank_loses_a_second_at_most(training: Training) -> None:
    params = {"steps": 3000, "pause": 0.02}
    running = training.start(OFFLINE, mode="process", params=params)
    running.wait_for("ddptrain: training")
    wait_until_rows(training, 2)
    seen = training.offline()[1].history[-1]["_timestamp"]
    time.sleep(1.5)
    (pid,) = [event["pid"] for event in training.events() if event["event"] == "rank_started" and event["rank"] == 1]
    os.kill(pid, signal.SIGKILL)
    ended = running.finish()
    assert ended.rc == 1
    last = training.metrics(1)[-1]
    run = training.offline()[1]
    assert run.name == "rank_1"
    assert run.exit_code is None
    # A second where the processor is free, and more where the rank's rows have to wait for it.
    assert run.history[-1]["_timestamp"] > max(seen, last["time_s"] - 4.0)
    other = training.offline()[0]
    assert other.exit_code == 1, "the other rank's run says that it failed"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, to mount a small disk")
def test_full_disk_for_trackers(training: Training) -> None:
    small = training.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(small)], check=True)
    try:
        ended = training.train({**OFFLINE, "WANDB_DIR": str(small)}, ranks=1, finish_timeout_s=START_S)
        ended_at = time.time()
        training.assert_unharmed(ended, ranks=1)
        assert training.s_beyond_training(ended_at) < START_S + MARGIN_S
    finally:
        subprocess.run(["umount", str(small)], check=True)
