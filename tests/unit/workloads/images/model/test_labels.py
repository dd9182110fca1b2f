import json
from pathlib import Path
from typing import Any

import pytest
from torchvision.models._meta import _IMAGENET_CATEGORIES

from ddptrain.errors import UsageError
from ddptrain.workloads.images.listing import Labels, outputs_of, read_labels

# The folders of Stanford Dogs: ImageNet's dogs, in the order of its outputs (without the dalmatian), then three more.
_FOLDERS = """
n02085620-Chihuahua n02085782-Japanese_spaniel n02085936-Maltese_dog n02086079-Pekinese n02086240-Shih-Tzu
n02086646-Blenheim_spaniel n02086910-papillon n02087046-toy_terrier n02087394-Rhodesian_ridgeback
n02088094-Afghan_hound n02088238-basset n02088364-beagle n02088466-bloodhound n02088632-bluetick
n02089078-black-and-tan_coonhound n02089867-Walker_hound n02089973-English_foxhound n02090379-redbone n02090622-borzoi
n02090721-Irish_wolfhound n02091032-Italian_greyhound n02091134-whippet n02091244-Ibizan_hound
n02091467-Norwegian_elkhound n02091635-otterhound n02091831-Saluki n02092002-Scottish_deerhound n02092339-Weimaraner
n02093256-Staffordshire_bullterrier n02093428-American_Staffordshire_terrier n02093647-Bedlington_terrier
n02093754-Border_terrier n02093859-Kerry_blue_terrier n02093991-Irish_terrier n02094114-Norfolk_terrier
n02094258-Norwich_terrier n02094433-Yorkshire_terrier n02095314-wire-haired_fox_terrier n02095570-Lakeland_terrier
n02095889-Sealyham_terrier n02096051-Airedale n02096177-cairn n02096294-Australian_terrier n02096437-Dandie_Dinmont
n02096585-Boston_bull n02097047-miniature_schnauzer n02097130-giant_schnauzer n02097209-standard_schnauzer
n02097298-Scotch_terrier n02097474-Tibetan_terrier n02097658-silky_terrier n02098105-soft-coated_wheaten_terrier
n02098286-West_Highland_white_terrier n02098413-Lhasa n02099267-flat-coated_retriever n02099429-curly-coated_retriever
n02099601-golden_retriever n02099712-Labrador_retriever n02099849-Chesapeake_Bay_retriever
n02100236-German_short-haired_pointer n02100583-vizsla n02100735-English_setter n02100877-Irish_setter
n02101006-Gordon_setter n02101388-Brittany_spaniel n02101556-clumber n02102040-English_springer
n02102177-Welsh_springer_spaniel n02102318-cocker_spaniel n02102480-Sussex_spaniel n02102973-Irish_water_spaniel
n02104029-kuvasz n02104365-schipperke n02105056-groenendael n02105162-malinois n02105251-briard n02105412-kelpie
n02105505-komondor n02105641-Old_English_sheepdog n02105855-Shetland_sheepdog n02106030-collie n02106166-Border_collie
n02106382-Bouvier_des_Flandres n02106550-Rottweiler n02106662-German_shepherd n02107142-Doberman
n02107312-miniature_pinscher n02107574-Greater_Swiss_Mountain_dog n02107683-Bernese_mountain_dog n02107908-Appenzeller
n02108000-EntleBucher n02108089-boxer n02108422-bull_mastiff n02108551-Tibetan_mastiff n02108915-French_bulldog
n02109047-Great_Dane n02109525-Saint_Bernard n02109961-Eskimo_dog n02110063-malamute n02110185-Siberian_husky
n02110627-affenpinscher n02110806-basenji n02110958-pug n02111129-Leonberg n02111277-Newfoundland
n02111500-Great_Pyrenees n02111889-Samoyed n02112018-Pomeranian n02112137-chow n02112350-keeshond
n02112706-Brabancon_griffon n02113023-Pembroke n02113186-Cardigan n02113624-toy_poodle n02113712-miniature_poodle
n02113799-standard_poodle n02113978-Mexican_hairless n02115641-dingo n02115913-dhole n02116738-African_hunting_dog
"""
STANFORD_DOGS = _FOLDERS.split()
DALMATIAN = 251
DOG_OUTPUTS = (*range(151, DALMATIAN), *range(DALMATIAN + 1, 269), 273, 274, 275)


def read(folder: Path, labels: Any, n_outputs: int | None = None) -> Labels:
    (folder / "labels.json").write_text(labels if isinstance(labels, str) else json.dumps(labels))
    return read_labels(folder / "labels.json", n_outputs)


def test_folders_are_found_by_their_ids_whatever_the_names(tmp_path: Path) -> None:
    labels: dict[int, Any] = dict(enumerate(_IMAGENET_CATEGORIES))
    for folder, output in zip(STANFORD_DOGS, DOG_OUTPUTS, strict=True):
        labels[output] = [folder.partition("-")[0], _IMAGENET_CATEGORIES[output]]
    found = read(tmp_path, labels, 1000)
    assert outputs_of(STANFORD_DOGS, found) == [*DOG_OUTPUTS]
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
