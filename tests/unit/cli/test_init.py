"""`ddptrain init`: files to start from, never in the place of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.cli.main import main
from ddptrain.config.load import load_config


def test_files_are_written_and_make_a_valid_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my demo"
    assert main(["init", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"train.yaml", "train.py", ".gitignore", "ddptrain.schema.json"}
    config = load_config(folder / "train.yaml").config
    assert config.workload == "train:train" and config.name == "train"
    assert "my demo' && ddptrain train train.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workload", "name", "runs"),
    [
        ("function", "train.yaml", "train:train"),
        ("script", "train.yaml", "train.py"),
        ("images", "images.yaml", "images"),
        ("petnames", "petnames.yaml", "petnames"),
    ],
)
def test_each_workload_is_a_valid_configuration_with_a_schema(
    tmp_path: Path, workload: str, name: str, runs: str
) -> None:
    assert main(["init", str(tmp_path), "--workload", workload]) == 0
    assert load_config(tmp_path / name).config.workload_name == runs
    assert (tmp_path / name).read_text().startswith("# yaml-language-server: $schema=ddptrain.schema.json\n")
    assert "properties" in json.loads((tmp_path / "ddptrain.schema.json").read_text())
    assert (tmp_path / ".gitignore").is_file()


@pytest.mark.parametrize("name", ["train.yaml", "train.py", ".gitignore"])
def test_nothing_is_overwritten(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
    assert f"has {name} already" in capsys.readouterr().err


def test_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "demo")]) == 2
    assert "cannot write into" in capsys.readouterr().err
