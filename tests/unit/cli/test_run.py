"""`ddptrain run` makes a configuration of what torchrun would be told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddptrain.cli.main import main


def resolved(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    assert main(["run", "--dry-run", *args]) == 0
    config: dict[str, object] = yaml.safe_load(capsys.readouterr().out)
    return config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "My Script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_is_named_after_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(capsys, "My Script.py")["name"] == "my-script"
    assert resolved(capsys, "-m", "package.module")["name"] == "module"
    assert resolved(capsys, "-m", "package.__main__")["name"] == "package"


def test_what_follows_the_script_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--", "--ranks", "1e-3"], ["--ranks", "1e-3"]):
        config = resolved(capsys, "--ranks", "2", "My Script.py", *args)
        assert config["workload"] == {"script": "My Script.py", "args": ["--ranks", "1e-3"]}
    second = resolved(capsys, "My Script.py", "--", "--", "x")
    assert second["workload"] == {**config["workload"], "args": ["--", "x"]}  # type: ignore[dict-item]


def test_dry_run_checks_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--cluster", "nothere", "My Script.py"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and 'there is no cluster "nothere"' in said.err


def test_script_that_is_not_there_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["run", "my script.py"]) == 2
    said = 'ddptrain run: there is no such file, got the text "my script.py" (did you mean My Script.py?)'
    assert said in capsys.readouterr().err
    assert main(["run", "elsewhere/x.py"]) == 2
    assert f"(looked for in {folder})" in capsys.readouterr().err
    assert main(["run", "-m", "not a module"]) == 2
    assert not (folder / "runs").exists()


def test_configuration_given_as_a_script_is_told_how_it_is_trained(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    for name, typed in (("train.yaml", "train.yaml"), ("My Train.YML", "'My Train.YML'")):
        (folder / name).write_text("workload: petnames\n")
        for option in ((), ("--dry-run",)):
            assert main(["run", *option, name]) == 2
            assert f"{name} is a configuration, not a script: ddptrain train {typed}\n" in capsys.readouterr().err
    assert main(["run", "--dry-run", "-m", "package.yaml"]) == 0
    assert not (folder / "runs").exists()
