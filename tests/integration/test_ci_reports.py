"""A run in a CI job: what its log, its summary and its files contain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.conftest import Cli
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


def test_section_that_is_missing_is_reported(run_cli: Cli) -> None:
    (run_cli.folder / "toy.yaml").write_text("workload: gc:collect\n")
    done = run_cli("retrain", "toy.yaml", "--report", "report.md", env=job(run_cli.folder))
    assert done.rc == 2
    (line,) = commands(done.stderr)
    assert line.startswith("::error title=ddptrain%3A toy failed::")
    assert "has no section retrain" in (run_cli.folder / "report.md").read_text()
