"""Training that is tracked with W&B, online against a stub of its backend and offline: all rows, and no secrets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ddptrain import Run
from tests.conftest import Cli
from tests.servers.wandb_backend import API_KEY, Backend, wandb_backend
from tests.servers.wandb_runs import plain
from tests.servers.wandb_training import Training

STEPS = [*range(1, 41)]


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as there:
        yield there
    assert not there.unknown


@pytest.fixture
def training(tmp_path: Path, run_cli: Cli) -> Training:
    return Training(tmp_path, run_cli)


@contextmanager
def watched_arguments() -> Iterator[list[str]]:
    """Collects, while the block runs, the command lines of this process's descendants that hold the key."""
    found: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    found.extend(word for word in process.cmdline() if API_KEY in word)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def test_shared_mode_is_one_run_with_a_client_of_each_rank(backend: Backend, training: Training) -> None:
    # The key comes from the configuration here, whose file may name it.
    shell = {name: value for name, value in backend.environment.items() if name != "WANDB_API_KEY"}
    with watched_arguments() as leaks:
        secrets = {"WANDB_API_KEY": API_KEY, "SECRET_TOKEN": "hush-hush"}
        ended = training.train(shell, mode="shared", env=secrets, params={"steps": 40})
    training.assert_unharmed(ended, ranks=2)
    assert not leaks
    run = backend.run
    assert (run.project, run.name, run.state) == ("pets", training.run_dir.name, "finished")
    assert len(run.exits) == 1, "the primary alone finishes it"
    assert len(run.clients) == 2
    for rank in range(2):
        (stream,) = [
            stream for stream in run.clients.values() if any(f"rank_{rank}/train/loss" in row for row in stream.history)
        ]
        assert [row[f"rank_{rank}/step"] for row in stream.history if f"rank_{rank}/train/loss" in row] == STEPS
        assert bool(plain(stream.config)) is (rank == 0), "the primary alone has the configuration"
    assert run.settings["params"]["steps"] == 40
    assert run.settings["run_id"] == training.run_dir.name
    assert "hush-hush" not in str(run.config)
    assert backend.keys == {API_KEY}
    artifact = backend.artifact(f"train_predictions_{training.run_dir.name}")
    assert artifact.state == "COMMITTED"
    told = training.record["tracking"]["wandb"]
    assert told["mode"] == "shared"
    assert told["url"].endswith(f"/{run.id}")
    assert told["url"] in training.cli("results", "show", "latest").stdout


@pytest.mark.long
@pytest.mark.slow
def test_failed_attempts_and_a_resumed_one_go_on_in_one_run_that_says_so(backend: Backend, training: Training) -> None:
    params = {"fail_at": [15, 25]}
    first = training.train(backend.environment, params=params, failure={"max_restarts": 1})
    assert first.rc == 1, first.stderr
    run = backend.run
    assert (run.exits, run.state) == ([1, 1], "failed")
    second = training.train(backend.environment, "--resume", "latest", params=params, failure={"max_restarts": 1})
    assert second.rc == 0, second.stderr
    assert backend.run is run
    assert (run.exits, run.state) == ([1, 1, 0], "finished")
    # Each attempt begins with the step after its checkpoint, and no row of it is lost.
    steps = [row["step"] for row in run.history if "train/loss" in row]
    assert steps == [*range(1, 16), *range(11, 26), *range(21, 41)]
    attempts = [row["attempt"] for row in run.history if "train/loss" in row]
    assert attempts == [1] * 15 + [2] * 15 + [3] * 20, "so that rows which come again can be told from those that count"
    counted = Run.find("latest", training.run_dir.parent).metrics()
    assert [row["step"] for row in counted if row["rank"] == 0 and "train/loss" in row] == STEPS
    plotted = json.loads(training.cli("results", "compare", "latest", "--json", "--metric", "train/loss").stdout)
    assert all(curve["x"] == STEPS for curve in plotted["series"])
    losses = [row["train/loss"] for row in counted if row["rank"] == 0 and "train/loss" in row]
    assert run.summary["train/loss"] == {"min": min(losses), "last": losses[-1]}
    training.assert_key_is_nowhere(first, second)


@pytest.mark.long
def test_without_a_key_ranks_record_offline_with_all_that_a_later_sync_needs(training: Training) -> None:
    ended = training.train({"WANDB_ERROR_REPORTING": "false"}, mode="shared")
    training.assert_unharmed(ended, ranks=2)
    (line,) = [line for line in ended.stderr.splitlines() if "offline" in line]
    assert "one run for each rank" in line, "ranks cannot share one offline, and it says so"
    runs = training.offline()
    assert [run.name for run in runs] == ["rank_0", "rank_1"]
    assert len({run.run["run_group"] for run in runs}) == 1
    for run in runs:
        assert [row["step"] for row in run.history if "train/loss" in row] == STEPS
        assert run.exit_code == 0
        assert not run.of("artifact"), "the sync logs tables from the run directory"
    training.assert_key_is_nowhere(ended)
