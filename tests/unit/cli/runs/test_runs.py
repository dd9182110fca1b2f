"""`ddptrain results` list, edit, compare and export, as the user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ddptrain.cli.main import app
from ddptrain.errors import UsageError
from ddptrain.protocol.events import Metrics
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in the folder runs of the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, factor in (("pets-1", 1.0), ("pets-2", 0.5)):
        config = f"name: pets\nparams: {{layers: {name[-1]}}}\n"
        with RunWriter.create(Path("runs"), name, "pets", config, "petnames", world_size=1) as writer:
            for step in (1, 2, 3):
                values = {"val/loss": factor * 4 / step, "samples": step * 10}
                writer.add_metrics([Metrics(step * 10**9, values, step)], 0)
            writer.finish(RunStatus.SUCCEEDED, 0)
    return tmp_path / "runs"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["results", *arguments], catch_exceptions=False)


def test_runs_are_tagged_and_listed(runs: Path) -> None:
    assert call("edit", "pets-1", "+good", "-h2", "old").stdout == "good old\n"
    assert call("edit", "pets-1", "-old", "--runs-dir", "runs").stdout == "good\n"
    assert call("edit", "pets-1").stdout == "good\n" and call("edit", "pets-2").stdout == "no tags\n"
    assert call("edit", "pets-2", "--note", "larger").stdout == call("edit", "pets-2").stdout == "no tags\nlarger\n"
    assert json.loads(call("edit", "pets-1", "--json").stdout) == {"tags": ["good"], "note": ""}
    header, *rows = call("list", "--sort", "run").stdout.splitlines()
    assert header.split()[-3:] == ["TAGS", "RESULT", "NOTE"] and "good" in rows[0] and rows[1].endswith("larger")
    assert [row["run_id"] for row in json.loads(call("list", "--where", "'good' in tags", "--json").stdout)] == [
        "pets-1"
    ]
    shown = json.loads(call("show", "pets-2", "--json").stdout)
    assert (shown["tags"], shown["note"]) == ([], "larger") and sum(shown["time_use_s"].values()) == shown["duration_s"]
    assert call("edit", "pets-2", "--note", "").stdout == "no tags\n"


def test_a_run_is_tagged_while_its_driver_works(runs: Path) -> None:
    with RunWriter.create(runs, "live-1", "live", "", "petnames", world_size=1) as writer:
        assert call("edit", "live-1", "+now").stdout == "now\n"
        writer.finish(RunStatus.SUCCEEDED, 0)
    assert call("edit", "live-1").stdout == "now\n"


def test_a_condition_selects_and_the_parameters_are_in_the_record(runs: Path) -> None:
    (runs / "pets-2" / "config.yaml").unlink()  # not needed
    where = ["--where", "val/loss < 1 and params.layers == 2"]
    assert call("list", *where, "--columns", "run,val/loss,best(val/loss)").stdout.splitlines() == [
        "RUN     val/loss  best(val/loss)",
        "pets-2  0.66667   0.66667",
    ]
    result = call("list", "--where", "val/los < 1")
    assert "no run matches, of 2 runs in runs" in result.stderr and "did you mean val/loss?" in result.stderr
    with pytest.raises(UsageError, match="--where: cannot read"):
        call("list", "--where", "val/loss <")


def test_runs_are_compared(runs: Path) -> None:
    result = call("compare", "pets-1", "pets-2", "--plot", "x.png")
    assert "params    A  B\n  layers  1  2" in result.stdout and "B pets-2: 0.6667" in result.stdout
    assert result.stdout.endswith("picture: x.png\n") and Path("x.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(call("compare", "pets-1", "pets-2", "--json", "--align", "step").stdout)
    assert data["x"] == "step" and data["series"][0]["x"] == [1, 2, 3]
    for arguments in (
        ["pets-1", "--metric", "x"],
        ["pets-1", "pets-2", "--metric", "x"],
        ["pets-1", "pets-2", "--plot", "x.abc"],
    ):
        with pytest.raises(UsageError):
            call("compare", *arguments)


def test_runs_are_exported(runs: Path) -> None:
    assert call("export", "pets-1", "pets-2", "-o", "out").stdout == "out/metrics.csv\nout/runs.csv\n"
    assert len(Path("out/metrics.csv").read_text().splitlines()) == 7
    files = json.loads(call("export", "latest", "--format", "tensorboard", "-o", "tb", "--json").stdout)["written"]
    assert [Path(file).parent.name for file in files] == ["pets-2"]
    with pytest.raises(UsageError, match="only MLflow has a server"):
        call("export", "latest", "-o", "http://127.0.0.1:9")
