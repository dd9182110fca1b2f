"""The data that a run holds out, and evaluations use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.storage.store import Listed
from ddptrain.workloads.held_out import FILE, digest_of
from ddptrain.workloads.images import listing as images
from ddptrain.workloads.images.manifest import TRAIN, UNUSED, VAL, Manifest
from ddptrain.workloads.images.model import SavedConfig
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.train import class_outputs, comparable_classes
from ddptrain.workloads.petnames import names
from tests.unit.workloads.images_runs import description, picture

# --- The data of an evaluation: what a run held out, or another source; their digest; classes that models share ---


def pets(val: str = "2", url: str = "/pets", version: str = "b", unused: str = "") -> Manifest:
    """Two images of each of three classes; those with a number in `val` validate."""
    keys = ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "pug/1.png", "pug/2.png"]
    parts = [UNUSED if key == unused else VAL if key[4] in val else TRAIN for key in keys]
    images = [(Listed(key, 10 + at, version if at == 1 else ""), at // 2, parts[at]) for at, key in enumerate(keys)]
    return Manifest.of(url, ("cat", "dog", "pug"), images)


MANIFEST = pets()


def run_with_names(folder: Path, held_out: Any) -> Path:
    (folder / "artifacts").mkdir(parents=True)
    (folder / "artifacts" / "names.json").write_text(json.dumps({"train": ["bella"], "held_out": held_out}))
    return folder


def prepared(module: Any, folder: Path, **request: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    lines: list[str] = []
    prepare = getattr(module, "prepare_held_out", None) or module.prepare
    prepare({"params": {}, "run": "", "data": None, **request}, folder, lines.append)
    told: dict[str, Any] = json.loads((folder / FILE).read_bytes())
    assert lines[-1].startswith(f"{told['n']} {told['noun']} ") and lines[-1].endswith(" to evaluate on")
    return told


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    expected = "d8497d9d82770a70729261095aa98f7ef5154d7af499f8037b6ca250296785a6"
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) == expected


# --- Names ---


def test_names_that_a_run_held_out_are_used_whatever_their_order(tmp_path: Path) -> None:
    told = prepared(names, tmp_path / "a", run=str(run_with_names(tmp_path / "run", ["rex", "luna"])))
    again = prepared(names, tmp_path / "b", run=str(run_with_names(tmp_path / "other", ["luna", "rex"])))
    assert told == again and (told["n"], told["noun"]) == (2, "names")
    assert names.read_names(tmp_path / "a") == ["luna", "rex"]
    changed = prepared(names, tmp_path / "c", run=str(run_with_names(tmp_path / "third", ["luna", "max"])))
    assert changed["digest"] != told["digest"]


def test_names_of_another_source_are_all_used(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("Rex\nLuna\nRex\n")
    told = prepared(names, tmp_path / "a", data=str(tmp_path / "own.txt"))
    assert told["n"] == 2 and names.read_names(tmp_path / "a") == ["luna", "rex"]


@pytest.mark.parametrize(
    ("held_out", "message"), [([], "held out no names"), ("rex", "held out no names"), ([3], "held out no names")]
)
def test_run_without_held_out_names_is_an_error(held_out: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{message}.*--data"):
        prepared(names, tmp_path / "a", run=str(run_with_names(tmp_path / "run", held_out)))


def test_run_without_a_list_of_names_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read the names.*--data"):
        prepared(names, tmp_path / "a", run=str(tmp_path))


# --- Images ---


def test_images_that_a_run_held_out_are_described_by_name_class_size_and_version() -> None:
    told = images.describe_held_out(MANIFEST)
    assert (told.n, told.noun) == (3, "images")
    assert images.describe_held_out(pets(unused="dog/1.png")) == told  # another training
    for changed in (pets(version="X"), pets(unused="pug/2.png"), pets(url="/other")):
        assert images.describe_held_out(changed).digest != told.digest


def test_manifest_of_an_evaluation_only_validates() -> None:
    whole = images.evaluated_only(MANIFEST)
    assert (whole.train.tolist(), whole.val.tolist()) == ([], [1, 3, 5])
    assert images.evaluated_only(MANIFEST, ["cat", "pug"]).val.tolist() == [1, 5]
    assert images.evaluated_only(pets(val="")).val.tolist() == [0, 1, 2, 3, 4, 5]


def test_other_folder_is_used_as_a_whole_whatever_the_params_select(tmp_path: Path) -> None:
    for name, count in (("blue", 3), ("red", 2)):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "own" / name / f"{number}.png").write_bytes(picture(name))
    params = {"subset": 1, "train_pct": 0.5}
    told = prepared(images, tmp_path / "a", data=str(tmp_path / "own"), params=params)
    assert told["n"] == 5
    manifest = images.evaluated_only(Manifest.read(tmp_path / "a"))
    assert (len(manifest.train), len(manifest.val)) == (0, 5)
    settings = images.evaluated_params(ImagesParams(source="/elsewhere"), str(tmp_path / "own"))
    assert manifest.location(settings).url == str(tmp_path / "own")


def test_val_folder_of_a_split_source_is_evaluated_on(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for name in ("blue", "red"):
            (tmp_path / "own" / part / name).mkdir(parents=True)
            for number in range(count):
                (tmp_path / "own" / part / name / f"{number}.png").write_bytes(picture(name))
    params = {"source": "/nowhere"}
    told = prepared(images, tmp_path / "a", data=str(tmp_path / "own"), params=params)
    assert told["n"] == 4
    kept = images.evaluated_only(Manifest.read(tmp_path / "a"))
    assert {kept.keys[index].partition("/")[0] for index in kept.val} == {"val"}


def test_params_of_the_training_are_used_for_its_own_images() -> None:
    params = ImagesParams(source="/a", seed=3)
    assert images.evaluated_params(params, None) is params
    changed = images.evaluated_params(params, "/c")
    assert (changed.source, changed.seed) == ("/c", 3)


def test_run_without_held_out_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data"):
        images.held_out_images(tmp_path)
    (tmp_path / "inputs").mkdir()
    pets(val="").write(tmp_path / "inputs")
    with pytest.raises(UsageError, match=r"held out no images \(params.train_pct\).*--data"):
        images.held_out_images(tmp_path)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([["cat", "dog", "pug"]], ["cat", "dog", "pug"]),
        ([["cat", "dog", "pug"], ["dog", "cat"]], ["cat", "dog"]),
        ([["cat", "dog", "pug"], ["dog", "cat", "pug", "bird"]], ["cat", "dog", "pug"]),
        ([["cat", "dog", "pug"], ["bird", "fish"]], ["cat", "dog", "pug"]),  # the second one cannot be scored
        ([["bird", "fish"]], ["cat", "dog", "pug"]),
        ([], ["cat", "dog", "pug"]),
    ],
)
def test_classes_that_all_models_know_are_compared(models: list[list[str]], expected: list[str]) -> None:
    assert comparable_classes(("cat", "dog", "pug"), models) == expected


def test_each_class_has_the_output_that_the_model_gave_it() -> None:
    config = SavedConfig.restored(description(outputs=[2, 0, 1]))
    assert class_outputs(["red", "pug", "blue"], config) == [1, 0, 2]
