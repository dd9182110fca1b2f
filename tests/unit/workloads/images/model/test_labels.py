import json
from pathlib import Path
from typing import Any

import pytest
from torchvision.models._meta import _IMAGENET_CATEGORIES

from ddptrain.errors import UsageError
from ddptrain.workloads.images.listing import Labels, outputs_of, read_labels

# Folders of Stanford Dogs, and ImageNet's outputs for them.
DOGS = {
    "n02085620-Chihuahua": 151,
    "n02110185-Siberian_husky": 250,
    "n02110627-affenpinscher": 252,
    "n02115641-dingo": 273,
}


def read(folder: Path, labels: Any, n_outputs: int | None = None) -> Labels:
    (folder / "labels.json").write_text(labels if isinstance(labels, str) else json.dumps(labels))
    return read_labels(folder / "labels.json", n_outputs)


def test_folders_are_found_by_their_ids_whatever_the_names(tmp_path: Path) -> None:
    labels: dict[int, Any] = dict(enumerate(_IMAGENET_CATEGORIES))
    for folder, output in DOGS.items():
        labels[output] = [folder.partition("-")[0], _IMAGENET_CATEGORIES[output]]
    found = read(tmp_path, labels, 1000)
    assert outputs_of([*DOGS], found) == [*DOGS.values()]
    assert outputs_of(["n02085620", "tench"], found) == [151, 0]
    assert found.names == tuple(_IMAGENET_CATEGORIES)


def test_folders_are_found_by_equal_names(tmp_path: Path) -> None:
    found = read(tmp_path, {"1": "dog", "0": "Cat, tabby", "2": ["n02012849", "crane"]})
    assert found.names == ("Cat, tabby", "dog", "crane")
    assert outputs_of(["crane", "dog", "Cat, tabby"], found) == [2, 1, 0]


def test_all_folders_without_an_output_of_their_own_are_named_at_once(tmp_path: Path) -> None:
    labels = {0: "crane", 1: "crane", 2: ["n02088364", "beagle"], 3: "pug"}
    with pytest.raises(UsageError) as refused:
        outputs_of(["crane", "beagle", "Pug", "n02088364-Beagle", "n02085620-x"], read(tmp_path, labels))
    told = str(refused.value)
    assert told.startswith(f"{tmp_path}/labels.json does not determine the output of each class: ")
    assert "crane: outputs 0, 1 have this label" in told and "\n" not in told
    assert "Pug: no label has its name or id, did you mean pug?" in told
    assert "n02085620-x: no label has its name" in told
    assert "beagle, n02088364-Beagle: all have the label of output 2" in told


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        ("{0: 'tench'}", "no labels in .*labels.json: Invalid JSON: .*; expected JSON as"),
        ('["tench"]', "Input should be an object"),
        ('{"tench": 0}', "tench: Input should be a valid integer"),
        ('{"0": ""}', "0: String should have at least 1 character"),
        ('{"0": ["tench", "n01440764"]}', "0: Input should be .*; expected JSON as"),
        ('{"0": 7}', "0: Input should be a valid string"),
        ("{}", "labels.json are 0"),
        ('{"1": "tench", "2": "goldfish"}', "are 2, from output 1 to 2: expected one for each .*, from 0 to 1$"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, labels: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read(tmp_path, labels)


def test_labels_of_another_model_are_refused(tmp_path: Path) -> None:
    labels = {number: f"class {number}" for number in range(3)}
    assert len(read(tmp_path, labels, 3).names) == 3
    for others in (2, 4):
        with pytest.raises(UsageError, match=rf"are 3, from output 0 to 2: expected one .*, from 0 to {others - 1}$"):
            read(tmp_path, labels, others)


def test_a_labels_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read the labels .*missing.json: No such file"):
        read_labels(tmp_path / "missing.json")
