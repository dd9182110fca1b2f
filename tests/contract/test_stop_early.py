"""stop_early ends training on all ranks after the same epoch, with a checkpoint: the run has succeeded."""

from __future__ import annotations

import json
import re

import pytest

from tests.contract.conftest import Project, lines

CODE = """
    import torch


    def train(ctx, loop="epochs", fails_at=0, metric="val/loss", saves=True):
        model = torch.nn.Linear(1, 1)
        resumed = ctx.resume(model=model) if saves else None
        first = int(resumed.epoch) + 1 if resumed else 1
        for epoch in ctx.epochs(20) if loop == "epochs" else range(first, 21):
            value = 1.0 / epoch if epoch < 4 else 0.5 + ctx.rank  # the best is that of epoch 3
            ctx.log({metric: value}, step=10 * epoch, epoch=epoch)
            if saves:
                ctx.checkpoint(model=model, step=10 * epoch, epoch=epoch, metrics={"other": 1.0})
            if epoch == fails_at and resumed is None and ctx.rank == 0:
                raise ValueError("no luck")
        print(f"epochs: {epoch}")
        return epoch
"""
EARLY = {"stop_early": {"patience": 3}, "checkpoint": {"every_epochs": 5, "metric": "val/loss"}}


def notices(project: Project) -> list[str]:
    (folder,) = project.run_directories()[-1:]
    return [line["message"] for line in lines(folder / "events.jsonl") if line["event"] == "notice"]


def test_epochs_end_on_all_ranks_after_a_checkpoint(project: Project, shared_cluster: str) -> None:
    config = project.function(CODE, **EARLY)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert "[rank 0] epochs: 6" in done.stdout and "[rank 1] epochs: 6" in done.stdout
    record = project.record()
    assert (record["status"], record["result"], record["checkpoints"][0]) == ("succeeded", 6, "step-60")
    why = "the last 3 values of val/loss are no improvement on 0.333333 at epoch 3, step 30"
    assert len([text for text in notices(project) if why in text]) == 1
    assert why in project("results", "show", "latest", rc=0).stdout


def test_loop_of_the_code_ends_in_its_checkpoint(project: Project, shared_cluster: str) -> None:
    config = project.function(CODE, params={"loop": "own"}, **EARLY)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    record = project.record()
    assert (record["status"], record["checkpoints"][0]) == ("succeeded", "step-60")
    assert "epochs:" not in done.stdout, "the code after the loop does not run"


def test_epochs_end_after_a_checkpoint_in_their_middle(project: Project, shared_cluster: str) -> None:
    code = """
        import torch

        def train(ctx):
            for epoch in ctx.epochs(20):
                for step in range(7 * epoch - 6, 7 * epoch + 1):
                    ctx.checkpoint(model=torch.nn.Linear(1, 1), step=step)
                ctx.log({"val/loss": 1.0}, step=step, epoch=epoch)
            return epoch
    """
    config = project.function(code, stop_early={"patience": 2}, checkpoint={"every_steps": 5})
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    record = project.record()
    assert (record["result"], record["checkpoints"][0]) == (4, "step-25")


def test_patience_is_kept_over_a_resume(project: Project, shared_cluster: str) -> None:
    config = project.function(CODE, params={"fails_at": 5}, **EARLY)
    command = "train", config, "--cluster", shared_cluster, "--ranks", "2"
    project(*command, rc=1)
    done = project(*command, "--resume", "auto", rc=0)
    assert "[rank 0] epochs: 6" in done.stdout, "two of three values were before the resume"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"metric": "val_loss"}, "rank 0 has never logged val/loss (did you mean val_loss?), but other, val_loss"),
        ({"loop": "own", "saves": False}, "the code calls neither ctx.epochs nor ctx.checkpoint"),
    ],
)
def test_metric_without_effect_is_named_at_the_end(
    project: Project, shared_cluster: str, params: dict[str, object], text: str
) -> None:
    config = project.function(CODE, params=params, **EARLY)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert len(re.findall(re.escape(f"stop_early had no effect: {text}"), done.stderr)) == 1
    assert "[rank 0] epochs: 20" in done.stdout


def test_petnames_ends_early(project: Project, shared_cluster: str) -> None:
    project.write("names.txt", "".join(f"Ann{letter}\n" for letter in "abcdefghijklmnopqrstuvwxyz"))
    params = {"names": "names.txt", "epochs": 9, "hidden_size": 4, "layers": 1, "val_fraction": 0.2}
    early = {"patience": 1, "min_delta": 100.0}
    path = project.write("pets.yaml", json.dumps({"workload": "petnames", "params": params, "stop_early": early}))
    project("train", path, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert json.loads((project.run_directories()[-1] / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 2.0
    done = project("evaluate", "latest", "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert "val/loss" in done.stdout and "stop_early" not in done.stderr


def test_trials_of_a_sweep_end_early(project: Project, shared_cluster: str) -> None:
    sweep = {"space": {"params.loop": ["epochs", "own"]}, "search": "grid", "metric": "val/loss"}
    config = project.function(CODE, sweep=sweep, **EARLY)
    project("sweep", config, "--cluster", shared_cluster, "--ranks", "1", "--sweep-id", "s", rc=0)
    trials = [json.loads(path.read_text()) for path in project.folder.glob("runs/s/**/run.json")]
    ended = [(trial["status"], trial["checkpoints"][0]) for trial in trials if trial.get("kind") != "sweep"]
    assert ended == [("succeeded", "step-60")] * 2


def test_jump_of_the_loss_is_a_note(project: Project, shared_cluster: str) -> None:
    code = """
        def train(ctx):
            for step in range(1, 301):
                loss = 3.0 / step**0.5 + 0.01 * (step % 7)
                ctx.log({"train/loss": 9.0 if step in (150, 151, 152) and ctx.rank == 0 else loss}, step=step)
    """
    config = project.function(code)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert len(re.findall("train/loss jumps to 9 at step 150", done.stderr)) == 1
    assert done.stderr.count("train/loss jumps") == 1
    assert "train/loss jumps to 9 at step 150" in project("results", "show", "latest", rc=0).stdout
    page = project.folder / "page.html"
    project("results", "report", "latest", "--output", page, rc=0)
    assert "train/loss jumps to 9 at step 150" in page.read_text()
