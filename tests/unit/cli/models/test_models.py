"""`ddptrain models`: what each command prints and changes, and the exit codes of mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ddptrain.cli.main import app
from ddptrain.cli.trained import open_trained
from ddptrain.errors import DdptrainError, RunNotFound, UsageError
from ddptrain.results.run import Run

MANIFEST = {
    "step": 5,
    "epoch": 1.0,
    "world_size": 2,
    "metrics": {"val/loss": 2.5},
    "files": [{"name": "model.safetensors", "size_bytes": 7, "sha256": ""}],
}


def make_run(runs: Path, run_id: str, loss: float) -> Path:
    """A run directory as `train` leaves it, with one checkpoint."""
    from hashlib import sha256

    folder = Run(runs / run_id)
    checkpoint = folder.checkpoints_dir / "step-5"
    checkpoint.mkdir(parents=True)
    weights = f"{loss:07.3f}".encode()
    (checkpoint / "model.safetensors").write_bytes(weights)
    files = [{"name": "model.safetensors", "size_bytes": len(weights), "sha256": sha256(weights).hexdigest()}]
    (checkpoint / "checkpoint.json").write_text(json.dumps(MANIFEST | {"files": files, "metrics": {"val/loss": loss}}))
    (folder.checkpoints_dir / "best").write_text("step-5\n")
    record = {"run_id": run_id, "status": "succeeded", "workload": "petnames", "started_at": "2026-11-22T10:00:00Z"}
    folder.run_json.write_text(json.dumps(record))
    folder.config_yaml.write_text("workload: petnames\n")
    folder.artifacts_dir.mkdir()
    (folder.artifacts_dir / "names.json").write_text("{}")
    (folder.artifacts_dir / "picture.png").write_bytes(b"not needed to use the model")
    return folder.root


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "names-20261122-100000-aaaa", 2.5)
    make_run(tmp_path / "runs", "names-20261122-110000-bbbb", 2.25)
    return tmp_path


def models(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def lines(*arguments: str) -> list[str]:
    result = models(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def error_of(*arguments: str) -> DdptrainError:
    error = models(*arguments).exception
    assert isinstance(error, DdptrainError)
    return error


def test_promoted_run_becomes_a_version_and_the_champion(place: Path) -> None:
    assert lines("promote", "names", "names-20261122-100000-aaaa", "--reason", "first") == [
        "names: version 1 promoted; aliases: champion 1"
    ]
    folder = place / "models/names/versions/1"
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
        "artifacts/names.json",
        "checkpoints/best",
        "checkpoints/latest",
        "checkpoints/step-5/checkpoint.json",
        "checkpoints/step-5/model.safetensors",
        "claim.json",
        "config.yaml",
        "run.json",
        "version.json",
    ]
    assert lines("promote", "names", "latest") == ["names: version 2 promoted; aliases: champion 2, previous 1"]
    assert lines("promote", "names", "latest") == ["version 2 of names is the champion already"]
    assert lines("rollback", "names") == ["names: version 1 rolled back; aliases: champion 1"]
    assert lines("promote", "names", "2") == ["names: version 2 promoted; aliases: champion 2, previous 1"]
    assert [
        (each["action"], each["version"], each["reason"])
        for each in json.loads(models("show", "names", "--history", "--json").stdout)
    ] == [
        ("created", 1, ""),
        ("promoted", 1, "first"),
        ("created", 2, ""),
        ("promoted", 2, ""),
        ("rolled back", 1, ""),
        ("promoted", 2, ""),
    ]


def test_a_model_without_alias_stands_for_its_champion_if_there_is_no_such_run(place: Path) -> None:
    lines("promote", "pets", "names-20261122-100000-aaaa")
    folder, about = open_trained("pets")
    assert (about["model"], about["version"]) == ("pets", 1) and (folder / "run.json").is_file()
    assert open_trained("names-20261122-11")[1] == {"run_id": "names-20261122-110000-bbbb"}
    with pytest.raises(RunNotFound, match=r'no run "cats" in runs; .*; there is no model of that name either$'):
        open_trained("cats")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_a_version_has_no_programs_and_no_files_that_another_user_chose(place: Path) -> None:
    run = place / "runs" / "names-20261122-100000-aaaa"
    (run / "config.yaml").write_text("workload: own:train\nevaluate: evil:score\nenv: {LD_PRELOAD: /tmp/evil.so}\n")
    (place / "private").mkdir()
    (place / "private" / "manifest.json").write_text("{}")
    (run / "inputs").symlink_to(place / "private")
    for path in (run, run / "config.yaml"):
        os.chown(path, 65534, 65534)
    models("promote", "names", run.name)
    folder = place / "models/names/versions/1"
    assert (folder / "config.yaml").read_text() == "workload: own:train\n"
    assert not (folder / "inputs").exists()
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(place / "private" / "manifest.json")
    models("promote", "others", run.name)
    assert not (place / "models/others/versions/1/config.yaml").exists()
    assert (place / "models/others/versions/1/run.json").exists()


def test_list_and_show_name_the_champion(place: Path) -> None:
    lines("promote", "names", "names-20261122-100000-aaaa")
    lines("promote", "names", "latest")
    header, row = lines("list")
    assert header.split() == ["MODEL", "CHAMPION", "CREATED", "(UTC)", "METRICS", "OTHER", "ALIASES"]
    assert row.split()[:2] == ["names", "2"] and row.endswith("val/loss 2.25  previous 1")
    assert [line.split()[:2] for line in lines("show", "names")[1:]] == [["1", "previous"], ["2", "champion"]]
    shown = json.loads(models("show", "names@previous", "--json").stdout)
    assert (shown["version"], shown["run_id"], shown["metrics"]) == (1, "names-20261122-100000-aaaa", {"val/loss": 2.5})
    assert shown["parent"] is None and shown["url"].endswith("/models/names/versions/1")
    (only,) = json.loads(models("--json").stdout)
    assert (only["model"], only["champion"]["parent"], only["aliases"]) == ("names", 1, {"champion": 2, "previous": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["promote", "../x", "1"], '"../x" is not a model name'),
        (["promote", "names", "7"], "model names has no version 7; it has none"),
        (["promote", "names", "nothing"], 'no run "nothing" in runs'),
        (["promote", "names", "latest", "--checkpoint", "step-6"], "has no checkpoint step-6; it has step-5"),
        (["rollback", "names"], "model names has no previous version"),
        (["show", "names"], "there is no model names in"),
        (["show", "names", "--history"], "there is no model names in"),
        (["alias", "names@x"], "give a version, or --delete"),
        (["alias", "names", "1"], "names contains no alias"),
        (["alias", "names@champion", "1"], "champion is moved by promote and rollback only"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(place: Path, arguments: list[str], message: str) -> None:
    error = error_of(*arguments)
    assert message in str(error) and "\n" not in str(error)
    assert isinstance(error, UsageError)
    assert not (place / "models").exists()


def test_damaged_checkpoint_of_a_run_is_not_added(place: Path) -> None:
    (place / "runs/names-20261122-110000-bbbb/checkpoints/step-5/model.safetensors").write_bytes(b"1234567")
    assert "model.safetensors" in str(error_of("promote", "names", "latest"))
    assert not (place / "models").exists()


def test_models_dir_is_an_option_of_group_and_command_and_a_variable(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines("promote", "names", "latest", "--models-dir", "other")
    assert len(lines("--models-dir", "other", "list")) == 2
    assert models("list").stdout == "" and "no models in" in models("list").stderr
    monkeypatch.setenv("DDPTRAIN_MODELS_DIR", "other")
    assert len(lines("list")) == 2
