"""A run in a CI job: what its log, its summary and its files contain."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.conftest import PATIENCE_S, Cli
from tests.servers.seaweed import seaweed

WORKLOAD = """
def train(ctx, fail=False):
    for step in range(40):
        print(f"step {step} ##[error]injected")
        ctx.log({"train/loss": 1 / (step + 1)}, step=step)
    print("::error::injected")
    if fail and ctx.rank == 1:
        check(ctx)


def check(ctx):
    raise ValueError("50% of the data, or so")
"""


def job(folder: Path) -> dict[str, str]:
    """The environment of a step of GitHub Actions."""
    return {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(folder),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "DDPTRAIN_CI": "auto",
    }


def write(folder: Path, address: str) -> None:
    (folder / "work.py").write_text(WORKLOAD)
    (folder / "toy.yaml").write_text(
        json.dumps({"workload": "work:train", "cluster": {"ranks": 2, "address": address}})
    )


def wait_for(path: Path) -> None:
    """Return once the file exists; fails the test if it takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.05)


def commands(output: str) -> list[str]:
    """The lines that the runner would execute."""
    lines = re.split(r"[\r\n]+", output)
    return [line for line in lines if line.lstrip().startswith("::")]


def test_failure_is_annotated_at_the_line_and_reported_in_every_form(run_cli: Cli, warm_cluster: str) -> None:
    folder = run_cli.folder
    write(folder, warm_cluster)
    files = "--report", "out/report.md", "--report", "out/junit.xml"
    done = run_cli("train", "toy.yaml", "--set", "params.fail=true", *files, env=job(folder))
    assert done.rc == 1, done.stderr
    cause = r"rank 1 on \S+ failed first: ValueError: 50%25 of the data, or so"
    (annotation,) = commands(done.stderr)
    assert "\nlast lines of rank 1:\n[rank 1] " in done.stderr
    assert re.fullmatch(rf"::error file=work\.py,line=12,title=ddptrain%3A toy failed::{cause}", annotation)
    summary = (folder / "summary.md").read_text()
    assert re.match(
        r"## ❌ `toy`: failed\n\n`rank 1 on \S+ failed first: ValueError: 50% of the data, or so`\n\nat `work.py:12`\n",
        summary,
    )
    assert "| `train/loss` | 0.025 | █" in summary
    assert (folder / "out" / "report.md").read_text() == summary
    suite = ET.parse(folder / "out" / "junit.xml").getroot()[0]
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("toy", "3", "2")


def test_success_is_reported_and_json_stays_pure(run_cli: Cli, warm_cluster: str) -> None:
    folder = run_cli.folder
    write(folder, warm_cluster)
    done = run_cli("train", "toy.yaml", "--output", "json", env=job(folder))
    assert done.rc == 0, done.stderr
    assert commands(done.stdout) == commands(done.stderr) == []
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert objects[-1]["status"] == "succeeded"
    assert (folder / "summary.md").read_text().startswith("## ✅ `toy`: succeeded\n")


def test_wrong_configuration_is_annotated_and_reported(run_cli: Cli) -> None:
    folder = run_cli.folder
    (folder / "toy.yaml").write_text("workload: gc:collect\nrank: 2\n")
    done = run_cli("train", "toy.yaml", "--report", "junit.xml", env=job(folder))
    assert done.rc == 2
    assert commands(done.stderr) == [
        "::error file=toy.yaml,line=2,title=ddptrain%3A the configuration is wrong::rank: unknown key"
    ]
    assert [each.tag for each in ET.parse(folder / "junit.xml").getroot()[0].iter("error")] == ["error"]
    assert (folder / "summary.md").read_text().startswith("## ❌ `toy`: failed\n")


@pytest.mark.long
def test_detached_run_writes_its_files_and_nothing_for_the_job(run_cli: Cli, warm_cluster: str) -> None:
    folder = run_cli.folder
    write(folder, warm_cluster)
    done = run_cli("train", "toy.yaml", "--detach", "--report", "report.md", env=job(folder))
    assert done.rc == 0, done.stderr
    run_id = done.stdout.strip()
    run_cli("results", "logs", run_id, "--follow", env=job(folder))
    log = folder / "runs" / run_id / "driver.log"
    wait_for(folder / "report.md")
    assert (folder / "report.md").read_text().startswith("## ✅ `toy`: succeeded\n")
    assert commands(log.read_text()) == []
    assert not (folder / "summary.md").exists()


@pytest.mark.long
def test_run_in_an_object_store_is_reported_completely(run_cli: Cli, warm_cluster: str) -> None:
    folder = run_cli.folder
    write(folder, warm_cluster)
    with seaweed(folder, "bucket") as environment:
        home = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
        options = "--runs-dir", "s3://bucket/runs", "--run-id", "toy-1", "--set", "params.fail=true"
        done = run_cli("train", "toy.yaml", *options, env={**job(folder), **environment, **home})
    assert done.rc == 1, done.stderr
    summary = (folder / "summary.md").read_text()
    assert "run directory `s3://bucket/runs/toy-1`" in summary
    assert "Look further with `ddptrain results show s3://bucket/runs/toy-1`" in summary
    assert "ValueError: 50% of the data, or so\n```\n\n</details>" in summary.partition("Last lines of rank 1")[2]
    assert "| `train/loss` | 0.025 | █" in summary


RETRAINED = """
import torch

def main(ctx, loss: float = 1.0):
    if loss > 2:
        raise ValueError("the loss is too large")
    ctx.checkpoint(model=torch.nn.Linear(2, 1), step=1, epoch=1, metrics={"val/loss": loss})
"""


@pytest.mark.long
def test_retraining_is_compared_with_the_champion_and_its_failure_annotated(run_cli: Cli, warm_cluster: str) -> None:
    folder = run_cli.folder
    (folder / "mine.py").write_text(RETRAINED)
    config = {"workload": "mine:main", "cluster": {"ranks": 1, "address": warm_cluster}, "retrain": {"model": "mine"}}
    (folder / "mine.yaml").write_text(json.dumps(config))

    def retrain(loss: float) -> tuple[int, list[str], str, dict[str, str]]:
        options = "--force", "--set", f"params.loss={loss}", "--report", "report.md", "--report", "junit.xml"
        done = run_cli("retrain", "mine.yaml", *options, env=job(folder))
        cases = ET.parse(folder / "junit.xml").getroot()[0].iter("testcase")
        outcomes = {
            f"{case.get('classname')}: {case.get('name')}": (case[0].tag if len(case) else "") for case in cases
        }
        return done.rc, commands(done.stdout + done.stderr), (folder / "report.md").read_text(), outcomes

    rc, log, report, cases = retrain(1.0)
    assert (rc, log) == (0, [])
    assert report.startswith("## ✅ `mine` version 1: promoted\n\n`version 1 is the champion ")
    assert {name for name, outcome in cases.items() if outcome} == {"mine.stages: notify"}

    rc, log, report, cases = retrain(2.0)
    reason = "val/loss 2 is worse than the champion's 1 by 1"
    assert rc == 7
    assert [line.partition("::version")[0] for line in log] == ["::warning title=ddptrain%3A mine rejected"]
    assert "| `val/loss` | 2 | 1 | +1 (+100.0%) |" in report
    assert f"| ❌ | `{reason}` |" in report
    assert cases["mine.gate: val/loss"] == "failure"
    assert cases["mine: run"] == ""

    rc, log, report, cases = retrain(3.0)
    assert rc == 1
    place = "file=mine.py,line=6,title=ddptrain%3A mine failed"
    assert re.fullmatch(rf"::error {place}::ValueError: the loss is too large \(run mine-\S+\)", log[-1])
    assert re.search(r"\| ❌ \| train \|", report)
    assert (cases["mine: run"], cases["mine.ranks: rank 0"], cases["mine.stages: train"]) == ("failure",) * 3
    assert (folder / "summary.md").read_text().count("\n## ") == 2


def test_section_that_is_missing_is_reported(run_cli: Cli) -> None:
    (run_cli.folder / "toy.yaml").write_text("workload: gc:collect\n")
    done = run_cli("retrain", "toy.yaml", "--report", "report.md", env=job(run_cli.folder))
    assert done.rc == 2
    (line,) = commands(done.stderr)
    assert line.startswith("::error title=ddptrain%3A toy failed::")
    assert "has no section retrain" in (run_cli.folder / "report.md").read_text()
