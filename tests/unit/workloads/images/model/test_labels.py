import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from torchvision.models._meta import _IMAGENET_CATEGORIES

from ddptrain.errors import UsageError
from ddptrain.workloads.images.model.label_file import MAX_BYTES, parse_labels, read_labels
from ddptrain.workloads.images.model.labels import Label, Labels, matches

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

# As in imagenet1000_clsidx_to_labels.txt, where torchvision's name is another or lacks its synonyms.
AS_IN_THE_FILE = {
    0: "tench, Tinca tinca",
    134: "crane",
    153: "Maltese dog, Maltese terrier, Maltese",
    230: "Shetland sheep dog",
    235: "German shepherd, German shepherd dog, German police dog, alsatian",
    248: "Eskimo dog, husky",
    264: "Cardigan, Cardigan Welsh corgi",
    286: "cougar, puma, catamount, mountain lion, painter, panther, Felis concolor",
    287: "lynx, catamount",
    361: "skunk, polecat, wood pussy",
    639: "maillot, tank suit",
    986: "yellow lady's slipper, yellow lady-slipper, Cypripedium calceolus, Cypripedium parviflorum",
}
NAMES = [AS_IN_THE_FILE.get(output, name) for output, name in enumerate(_IMAGENET_CATEGORIES)]


@pytest.fixture(scope="module")
def imagenet() -> Labels:
    """The file that is passed around: a dict as Python writes it."""
    text = "{" + ",\n ".join(f"{output}: {name!r}" for output, name in enumerate(NAMES)) + "}"
    return parse_labels(text.encode(), "imagenet1000_clsidx_to_labels.txt")


def labels_of(*texts: str) -> Labels:
    return Labels("labels.txt", tuple(Label(output, text) for output, text in enumerate(texts)))


def match(classes: Sequence[str], labels: Labels) -> tuple[int, ...]:
    """The output of each class."""
    return tuple(found.label.output for found in matches(classes, labels))


def test_every_folder_of_stanford_dogs_finds_its_output(imagenet: Labels) -> None:
    assert match(STANFORD_DOGS, imagenet) == DOG_OUTPUTS


def test_every_folder_of_stanford_dogs_finds_its_output_by_the_short_names_of_torchvision() -> None:
    assert match(STANFORD_DOGS, labels_of(*_IMAGENET_CATEGORIES)) == DOG_OUTPUTS


def test_what_the_reader_should_look_at_is_told(imagenet: Labels) -> None:
    assert [found.remark for found in matches(STANFORD_DOGS, imagenet) if found.remark] == [
        "Shetland_sheepdog is taken for 230 'Shetland sheep dog'",
        "Cardigan is taken for 264 'Cardigan, Cardigan Welsh corgi', not for 474 'cardigan'",
    ]


@pytest.mark.parametrize(
    ("folder", "output"),
    [
        ("German_shepherd", 235),
        ("german-shepherd", 235),
        ("GermanShepherd", 235),
        ("alsatian", 235),
        ("German police dog", 235),
        ("Maltese", 153),
        ("Cardigan", 264),
        ("cardigan", 474),
        ("Cardigan Welsh Corgi", 264),
        ("Brabançon_griffon", 262),
        ("polecat", 358),  # the usual name of one goes before a synonym of another
        ("tank_suit", 639),
        ("maillot, tank suit", 639),
        ("yellow_lady_s_slipper", 986),
    ],
)
def test_exact_names_go_before_loose_ones(imagenet: Labels, folder: str, output: int) -> None:
    assert match([folder], imagenet) == (output,)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("crane", "crane: ambiguous, it may be 134 'crane', 517 'crane'"),
        ("n02012849-crane", "n02012849-crane: ambiguous, it may be 134 'crane', 517 'crane'"),
        ("maillot", "maillot: ambiguous, it may be 638 'maillot', 639 'maillot, tank suit'"),
        ("CARDIGAN", "CARDIGAN: ambiguous, it may be 264 'Cardigan, Cardigan Welsh corgi', 474 'cardigan'"),
        ("catamount", "catamount: ambiguous, it may be 286 'cougar, puma, "),
        ("horse", "horse: no label has this name; closest: 603 'horse cart'"),
        ("apple", "apple: no label has this name; closest: 956 'custard apple'"),
        ("Beegle", "Beegle: no label has this name; closest: 162 'beagle'"),
        ("n02085620", "n02085620: the labels have no WordNet ids"),
        ("☃", "☃: no label has this name\n"),
    ],
)
def test_names_that_are_not_certain_are_refused(imagenet: Labels, folder: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        match([folder], imagenet)
    assert message in str(refused.value)


def test_all_problems_are_told_at_once(imagenet: Labels) -> None:
    with pytest.raises(UsageError) as refused:
        match(["crane", "beagle", "horse", "n02088364-Beagle", "pug"], imagenet)
    lines = str(refused.value).splitlines()
    assert lines[0] == "the labels of imagenet1000_clsidx_to_labels.txt do not determine the output of each class:"
    assert [line.strip().partition(":")[0] for line in lines[1:-1]] == ["crane", "horse", "beagle, n02088364-Beagle"]
    assert "all of them are 162 'beagle'" in lines[3]
    assert "put WordNet ids" in lines[-1]


def test_ids_decide_where_the_labels_have_them() -> None:
    labels = parse_labels(
        b'{"0": ["n02012849", "crane"], "1": ["n03126707", "crane"], "2": ["n02113186", "Cardigan"]}', "x"
    )
    assert match(["n03126707-crane", "n02012849", "n02113186-dog"], labels) == (1, 0, 2)
    assert match(["cardigan"], labels) == (2,)
    with pytest.raises(UsageError, match="n02085620-crane: no label has the id n02085620; closest: 0 'crane'"):
        match(["n02085620-crane"], labels)


@pytest.mark.parametrize(
    "text",
    [
        "{0: 'tench, Tinca tinca',\n 1: \"devil's needle\"}",
        "{1: \"devil's needle\", 0: 'tench, Tinca tinca',}",
        '{"0": "tench, Tinca tinca", "1": "devil\'s needle"}',
        '["tench, Tinca tinca", "devil\'s needle"]',
        "('tench, Tinca tinca', \"devil's needle\")",
        "tench, Tinca tinca\n\ndevil's needle\n",
        "\ufefftench, Tinca tinca\r\ndevil's needle\r\n",
        "0: tench, Tinca tinca\n1: devil's needle",
        "1: \"devil's needle\"\n0: 'tench, Tinca tinca'",
    ],
)
def test_labels_are_read_in_each_form(text: str) -> None:
    labels = parse_labels(text.encode(), "x")
    assert labels.names == ("tench, Tinca tinca", "devil's needle")
    assert labels.by_id == {}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"1": ["n01443537", "goldfish"], "0": ["n01440764", "tench"]}),
        json.dumps([["n01440764", "tench"], ["n01443537", "goldfish"]]),
        "n01440764 tench\nn01443537 goldfish",
        "n01440764\ttench\nn01443537\tgoldfish",
        "{0: ('n01440764', 'tench'), 1: ('n01443537', 'goldfish')}",
    ],
)
def test_ids_are_read_in_each_form(text: str) -> None:
    assert parse_labels(text.encode(), "x").labels == (
        Label(0, "tench", "n01440764"),
        Label(1, "goldfish", "n01443537"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("{}", "neither a list nor a mapping"),
        ("{1: 'tench', 2: 'goldfish'}", "output 0 has no label, and they are counted from 0 without a gap"),
        ("{0: 'tench', 2: 'goldfish'}", "output 1 has no label"),
        ("{0: 'tench', 0: 'goldfish'}", "0 is there twice"),
        ('{"0": "tench", "0": "goldfish"}', "0 is there twice"),
        ("{0: 'tench', '0': 'goldfish'}", "output 0 is there twice"),
        ("0: tench\n0: goldfish", "0 is there twice"),
        ('{"tench": 0}', "the key 'tench' is not the number of an output"),
        ("{True: 'tench'}", "the key 'True' is not the number of an output"),
        ("{[0]: 'tench'}", "a key is a list"),
        ("{0: 'tench'", "line 1: it is neither JSON nor a dict of Python"),
        ("{0: 'tench', 1: __import__('os').system('true')}", "line 1: \"__import__('os').system('true')\" is neither"),
        ("{0: 'tench', **{1: 'goldfish'}}", "line 1: it unpacks another dict"),
        ("{0: 'tench', 1: ''}", 'output 1 has the text "" for a label'),
        ("{0: 'tench', 1: 7}", "output 1 has 7 for a label"),
        ("{0: 'tench', 1: ['a', 'b', 'c']}", "output 1 has a list for a label"),
        ("{0: 'a\\x1b[2J'}", "output 0: 'a\\\\u001b[2J' is not a label"),
        ("n02119789 1 kit_fox", "has a number of its own"),
        ("n01440764 tench\nn01440764 goldfish", "outputs 0 and 1 have the same id n01440764"),
        ("[" * 100_000, "neither JSON nor a dict of Python"),
        ("-" * 100_000 + "\n", "not a label"),
        ("{" + "-" * 200_000 + "1: 'a'}", "neither JSON nor a dict of Python"),
        ("\n".join(map(str, range(100_001))), "it has 100,001 labels, more than 100,000"),
        (" " * (MAX_BYTES + 1), "it has more than 4,194,304 bytes"),
    ],
)
def test_labels_that_are_not_certain_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_labels(text.encode(), "labels.txt")
    assert str(refused.value).startswith("no labels in labels.txt: ")
    assert message in str(refused.value)


def test_other_bytes_than_text_are_refused() -> None:
    with pytest.raises(UsageError, match="byte 1 is not UTF-8"):
        parse_labels(b"t\xff", "labels.txt")


def test_labels_come_from_a_file_or_a_url(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("tench\ngoldfish\n")
    assert read_labels(str(path), n_outputs=2).names == ("tench", "goldfish")
    asked: list[str] = []

    def read(url: str) -> bytes:
        asked.append(url)
        return b"tench"

    assert read_labels("https://me:secret@host/labels.txt", read).source == "https://<left out>@host/labels.txt"
    assert asked == ["https://me:secret@host/labels.txt"]


def test_labels_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("tench\ngoldfish\n")
    with pytest.raises(UsageError, match=r"labels.txt are 2, but the model has 1,000 outputs"):
        read_labels(str(path), n_outputs=1000)


def test_a_labels_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no labels file .*missing.txt"):
        read_labels(str(tmp_path / "missing.txt"))
    with pytest.raises(UsageError, match="is not a labels file"):
        read_labels(str(tmp_path))
