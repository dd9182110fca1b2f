import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ddptrain.cli.models.generate import generate
from ddptrain.workloads.petnames import generate as sampler
from ddptrain.workloads.petnames.generate import Generated

app = typer.Typer()
app.command()(generate)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Stands in for the sampling: records its arguments, and gives two names of those asked for."""
    seen: dict[str, object] = {}

    def fake(
        run_dir: Path, count: int, prefix: str, temperature: float, seed: int | None, keep_known: bool
    ) -> Generated:
        seen.update(count=count, prefix=prefix, temperature=temperature, seed=seed, keep_known=keep_known)
        return Generated(("Luna", "Mr. Fox"), "step-9", 5, 1050, 3, 4, 0, limit_reached=count > 2)

    run_dir = tmp_path / "petnames-20260101-000000-abcd"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    monkeypatch.setattr(sampler, "generate_names", fake)
    monkeypatch.setattr("ddptrain.results.run_store.find_run", lambda runs_dir, run: run_dir)
    return seen


def test_names_go_to_stdout_one_a_line(made: dict[str, object]) -> None:
    result = CliRunner().invoke(app, ["latest", "--count", "2", "--seed", "5"])
    assert result.exit_code == 0
    assert result.stdout == "Luna\nMr. Fox\n"
    assert result.stderr == "generate: 3 names of the training list were replaced\n"


def test_giving_up_and_a_random_seed_are_said_on_stderr(made: dict[str, object]) -> None:
    result = CliRunner().invoke(app, ["latest", "--count", "50"])
    assert result.stdout == "Luna\nMr. Fox\n"
    assert "the seed was 5" in result.stderr
    assert "only 2 of 50 names: gave up after 1,050 attempts" in result.stderr


def test_json_is_one_object(made: dict[str, object]) -> None:
    printed = json.loads(CliRunner().invoke(app, ["latest", "--json"]).stdout)
    assert printed["names"] == ["Luna", "Mr. Fox"]
    assert (printed["run_id"], printed["seed"], printed["limit_reached"]) == ("petnames-20260101-000000-abcd", 5, True)
