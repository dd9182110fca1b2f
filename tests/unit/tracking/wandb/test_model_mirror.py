"""The mirror `wandb` without a server: what becomes an artifact, and when it only tells why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.protocol.model_mirror import MirroredModel, MirroredVersion
from ddptrain.tracking.wandb import model_mirror
from ddptrain.tracking.wandb.credentials import KEY, TOKEN_FILE

RECORD = {
    "run_id": "pets-1",
    "workload": "petnames",
    "step": 5,
    "epoch": None,
    "metrics": {"val/loss": 2.5},
    "code": "",
}


def version(folder: Path, number: int = 3) -> MirroredVersion:
    return MirroredVersion(number, ("champion",), "ab" * 32, RECORD, ("run.json", "output/weights"), lambda: folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/weights").write_bytes(b"1234")
    (tmp_path / "run.json").write_text(
        '{"name": "pets", "tracking": {"wandb": {"project": "animals", "entity": "zoo"}}}'
    )
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "no API key in WANDB_API_KEY or ~/.netrc"),
        ({KEY: "k" * 40, "WANDB_MODE": "offline"}, "WANDB_MODE is offline"),
        ({KEY: "k" * 40, "WANDB_MODE": "Disabled"}, "WANDB_MODE is disabled"),
    ],
)
def test_without_a_server_it_only_tells_why(
    environ: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (KEY, TOKEN_FILE, "WANDB_MODE", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environ, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    model_mirror.mirror(MirroredModel("pets", (version(tmp_path),), tell=told.append))
    assert told == [f"W&B does not get the versions of pets: {why}"]


def test_artifact_has_the_files_and_what_is_known_of_the_version(folder: Path) -> None:
    artifact = model_mirror._artifact(MirroredModel("pets", ()), version(folder))
    assert (artifact.name, artifact.type) == ("pets", "model")
    assert sorted(artifact.manifest.entries) == ["output/weights", "run.json"]
    assert artifact.metadata == {
        "version": 3,
        "sha256": "ab" * 32,
        "run_id": "pets-1",
        "workload": "petnames",
        "step": 5,
        "metrics": {"val/loss": 2.5},
    }


@pytest.mark.parametrize(
    ("options", "run_json", "project", "entity"),
    [
        ({"project": "own", "entity": "me"}, None, "own", "me"),
        ({}, None, "animals", "zoo"),
        ({"project": "own", "entity": None}, None, "own", "zoo"),
        ({}, '{"name": "pets"}', "pets", None),
        ({}, "[]", "names", None),
        ({}, "{", "names", None),
    ],
)
def test_project_is_that_of_the_options_or_of_the_run(
    options: dict[str, Any], run_json: str | None, project: str, entity: str | None, folder: Path
) -> None:
    if run_json is not None:
        (folder / "run.json").write_text(run_json)
    made = model_mirror._run_options(MirroredModel("names", (version(folder),), options=options), folder)
    assert (made.settings["project"], made.settings["entity"]) == (project, entity)
    assert made.settings["run_name"] == "names champion 3" and made.config["versions"] == {"3": ["champion"]}
