"""A function that is started again, or resumed, and begins at its first step."""

from __future__ import annotations

from tests.contract.conftest import Project, lines

# The first attempt is killed after its checkpoint of step 3 is in the run directory.
TRAIN = """
    import os, time, pathlib, torch

    def train(ctx, resumes=False, goes_back=False):
        model = ctx.prepare(torch.nn.Linear(1, 1))
        resumed = ctx.resume(model=model) if resumes else None
        start = resumed.step if resumed and not goes_back else 0
        for step in range(start + 1, 5):
            if not resumes:
                ctx.log({"loss": 1.0}, step=step)
            ctx.checkpoint(model=model, step=step)
            if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                while not list(pathlib.Path.cwd().glob("runs/*/checkpoints/step-3/checkpoint.json")):
                    time.sleep(0.02)
                os._exit(3)
"""
AGAIN = {"failure": {"max_restarts": 1}}


def warnings(project: Project) -> list[str]:
    found = lines(project.run_directories()[-1] / "events.jsonl")
    return [line["message"] for line in found if line["event"] == "note" and line["level"] == "warning"]


def test_forgotten_ctx_resume_is_named_with_the_line_to_add(project: Project, shared_cluster: str) -> None:
    config = project.function(TRAIN, **AGAIN)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert "from step 3" not in done.stderr, "it does not continue there"
    assert "starting the ranks again, with the checkpoint of step 3 (restart 1 of 1)" in done.stderr
    (warning,) = warnings(project)
    assert "begins at step 1, although the run has a checkpoint of step 3" in warning
    assert "resumed = ctx.resume(model=model, optimizer=optimizer)" in warning
    assert f"rank 0: {warning}" in done.stderr


def test_resumed_function_says_where_it_continues(project: Project, shared_cluster: str) -> None:
    config = project.function(TRAIN, params={"resumes": True}, **AGAIN)
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert "rank 0: continues from step 3" in done.stderr
    assert warnings(project) == []


def test_steps_that_run_backwards_after_a_resume_are_named(project: Project, shared_cluster: str) -> None:
    config = project.function(TRAIN, params={"resumes": True, "goes_back": True}, **AGAIN)
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    (warning,) = warnings(project)
    assert "step 1 follows step 3" in warning and "resumed.step + 1" in warning
