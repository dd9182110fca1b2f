"""The programs in examples/, and what `ddptrain init` writes, do what they are there to show."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.conftest import PATIENCE_S, Cli

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return told


def test_what_init_writes_trains_and_goes_on(run_cli: Cli, warm_cluster: str) -> None:
    assert run_cli("init", "demo").rc == 0
    demo = run_cli.folder / "demo"
    done = run_cli("train", "train.yaml", "--run-id", "mine", "--set", "params.epochs=3", cwd=demo)
    assert done.rc == 0, done.stderr
    told = record(demo / "runs" / "mine")
    assert told["status"] == "succeeded" and told["world_size"] == 2
    assert told["checkpoints"] == ["step-96"] and told["best"]["metric"] == "val/loss"
    assert told["last_metrics"]["val/accuracy"] > 0.5
    longer = ("--set", "params.epochs=4", "--allow-changes", "--resume", "mine")
    assert run_cli("train", "train.yaml", *longer, "--cluster", warm_cluster, cwd=demo).rc == 0
    assert record(demo / "runs" / "mine")["checkpoints"][0] == "step-128"


@pytest.mark.long
def test_migrated_notebook_brings_its_logs_and_its_model_home(run_cli: Cli) -> None:
    out = run_cli.folder / "out"
    done = run_cli(EXAMPLES / "migrate_from_dask_pytorch_ddp.py", out, program=(sys.executable,), timeout_s=110)
    assert done.rc == 0, done.stderr
    for rank in (0, 1):
        logs = [json.loads((out / "logs" / f"worker-{rank}" / f"epoch-{epoch}.json").read_text()) for epoch in range(3)]
        assert [log["epoch"] for log in logs] == [0, 1, 2] and logs[2]["loss"] < logs[0]["loss"]
    assert (out / "model.pkl").stat().st_size > 10_000
    assert "INFO - rank 1, epoch 2: loss" in done.stderr


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed (pip install 'ddptrain[huggingface]')",
)


@pytest.fixture
def cluster_with_transformers(run_cli: Cli) -> Iterator[str]:
    """The address of a cluster."""
    up = run_cli("cluster", "up", "--name", "hf", "--ranks", "2", "--gpus", "0", "--json")
    assert up.rc == 0, up.stderr
    yield json.loads(up.stdout)["address"]
    assert run_cli("cluster", "down", "hf", "--now").rc == 0


@pytest.mark.long
@pytest.mark.slow
@needs_transformers
def test_hugging_face_trainer_saves_by_its_evaluation_is_preempted_and_goes_on(
    run_cli: Cli, cluster_with_transformers: str
) -> None:
    cluster = cluster_with_transformers
    undisturbed = run_cli(*hugging_face("whole", cluster), timeout_s=200)
    assert undisturbed.rc == 0, undisturbed.stderr
    runs = run_cli.folder / "runs"
    whole = record(runs / "whole")
    steps = 3 * STEPS_PER_EPOCH
    assert whole["checkpoints"] == [f"step-{n}" for n in (steps, 54, 27)] and whole["best"]["metric"] == "eval_loss"
    assert whole["best"]["value"] == whole["result"]["eval_loss"], "the last evaluation, of the weights that are saved"
    lines = [json.loads(line) for line in (runs / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert {line["rank"] for line in lines} == {0}

    running = run_cli.start(*hugging_face("cut", cluster))
    metrics = runs / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.read_text()):  # the first numbers, of step 5
        assert time.monotonic() < deadline and running.popen.poll() is None, running.stderr
        time.sleep(0.02)
    os.kill(running.popen.pid, signal.SIGTERM)
    cut = running.finish()
    assert cut.rc == 75, cut.stderr
    saved = record(runs / "cut")["checkpoints"][0]
    step = int(saved.removeprefix("step-"))
    assert 5 <= step < steps
    resumed = run_cli("train", EXAMPLES / "huggingface.yaml", "--cluster", cluster, "--resume", "cut")
    assert resumed.rc == 0, resumed.stderr
    assert [each["outcome"] for each in record(runs / "cut")["attempts"]] == ["preempted", "succeeded"]
    expected, found = (weights(runs / run / "checkpoints" / f"step-{steps}") for run in ("whole", "cut"))
    assert expected == found, "the same data, optimizer, learning rates and random numbers"


STEPS_PER_EPOCH = 27  # 418 windows, 8 a rank


def hugging_face(run: str, cluster: str) -> tuple[str | Path, ...]:
    return ("train", EXAMPLES / "huggingface.yaml", "--run-id", run, "--cluster", cluster)


def weights(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}


@needs_transformers
def test_hugging_face_callback_saves_where_another_callback_ends_the_training() -> None:
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from ddptrain import HuggingFaceCallback

    class Context:
        rank, local_rank, device, resume_folder = 0, 0, torch.device("cpu"), None

        def __init__(self) -> None:
            self.saved: list[tuple[int, bool, dict[str, float]]] = []

        def progress(self, *_: object, **__: object) -> None: ...

        def checkpoint(self, *, step: int, last: bool, metrics: dict[str, float], **_: object) -> bool:
            self.saved.append((step, last, metrics))
            return last or step % 2 == 0

    context = Context()
    callback = HuggingFaceCallback(context)  # type: ignore[arg-type]
    args = TrainingArguments(output_dir="unused", use_cpu=True, eval_strategy="steps", report_to=[])
    parts: dict[str, Any] = dict.fromkeys(("model", "optimizer", "lr_scheduler"))
    state, control = TrainerState(max_steps=10), TrainerControl()
    callback.on_train_begin(args, state, control, **parts)
    for step in (1, 2, 3):
        state.global_step, state.epoch = step, step / 10
        control.should_evaluate = step == 2
        callback.on_step_end(args, state, control, **parts)
        if step == 2:
            callback.on_evaluate(args, state, control, metrics={"eval_loss": 0.5, "epoch": 0.2, "note": "x"}, **parts)
    callback.on_train_end(args, state, control, **parts)
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 0.4}, **parts)  # after the training: nothing new
    assert context.saved == [(1, False, {}), (2, False, {"eval_loss": 0.5}), (3, False, {}), (3, True, {})]
