"""What a mirror is given, and which function it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.model_registry.mirrors.mirror_process import digest, load, mirrored_model
from ddptrain.model_registry.records import ModelFile, VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.protocol.model_mirror import MirroredModel, MirrorRequest


def request(mirror: str = "wandb", where: str = "", removed_alias: str = "", folder: str = "") -> MirrorRequest:
    return MirrorRequest(mirror, where, "names", "why", removed_alias, {"a": 1}, 60.0, [folder])


def model_of(registry: ModelRegistry, removed_alias: str = "") -> MirroredModel:
    return mirrored_model(request(where=registry.where, removed_alias=removed_alias), 50.0, print)


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    found = ModelRegistry.open(str(tmp_path / "models"))
    for number in range(1, 5):
        record = VersionRecord("", 0, "", f"run-{number}", "petnames", 1, {"val/loss": 2.0}, ())
        found.add_version("names", {"weights": b"%d" % number}, record)
    return found


def test_versions_with_an_alias_are_given_and_the_champion_is_the_first(registry: ModelRegistry) -> None:
    registry.promote("names", 1)
    registry.promote("names", 3)
    registry.set_alias("names", "archive", 4)
    registry.set_alias("names", "staging", 1)
    model = model_of(registry, "gone")
    assert [(each.number, each.aliases) for each in model.versions] == [
        (3, ("champion",)),
        (1, ("previous", "staging")),
        (4, ("archive",)),
    ]
    assert (model.name, model.reason, model.removed_alias, model.options) == ("names", "why", "gone", {"a": 1})
    first = model.versions[0]
    assert first.record["run_id"] == "run-3" and first.record["metrics"] == {"val/loss": 2.0}
    assert (first.open() / first.files[0]).read_bytes() == b"3"
    assert len({each.sha256 for each in model.versions}) == 3


def test_alias_that_is_set_again_is_not_removed(registry: ModelRegistry) -> None:
    registry.set_alias("names", "staging", 1)
    assert model_of(registry, "staging").removed_alias == ""


def test_digest_is_of_paths_and_contents_in_any_order() -> None:
    one, two = ModelFile("a", 1, "0" * 64), ModelFile("b", 2, "1" * 64)
    assert digest([one, two]) == digest([two, one])
    assert digest([one]) != digest([ModelFile("b", 1, "0" * 64)])
    assert digest([one]) != digest([ModelFile("a", 1, "1" * 64)])
    # printf '%064d a\n' 0 | sha256sum
    assert digest([one]) == "91e460489a857829a50ee83f663bfa4fd038ac6b3067f34b7eb9ac95c70f3175"


def test_function_of_the_user_is_found_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mirror_of_mine.py").write_text(
        "class Mine:\n    @staticmethod\n    def mirror(model): ...\nnumber = 3\n"
    )
    folder = str(tmp_path)
    assert load(request("mirror_of_mine:Mine.mirror", folder=folder)).__name__ == "mirror"
    with pytest.raises(UsageError, match="mirror_of_mine:number is not a function"):
        load(request("mirror_of_mine:number", folder=folder))
    with pytest.raises(AttributeError):
        load(request("mirror_of_mine:missing", folder=folder))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_built_in_mirror_can_be_imported(name: str) -> None:
    assert load(request(name)).__name__ == "mirror"
