import os
from pathlib import Path

import pytest
import torch

from ddptrain.errors import UsageError
from ddptrain.workloads.images.listing import GivenImage, find_images
from ddptrain.workloads.images.model import SavedConfig, SavedModel, build
from ddptrain.workloads.images.predict import Classifier, ImageResult, choose_device, default_batch_size
from tests.unit.workloads.images_runs import COLOURS, description, model_of_colours, picture

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved() -> SavedModel:
    config = description()
    return SavedModel(model_of_colours(config).eval(), SavedConfig.restored(config), tuple(COLOURS), "step-3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in a folder of no particular layout, among other files."""
    folder = tmp_path / "pictures"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b-red.png", "a-green.JPG", "deep/er/c-blue.gif", ".hidden/red.png", ".d-red.png"):
        (folder / name).write_bytes(picture(name.partition("-")[2].partition(".")[0] or "red"))
    (folder / "notes.txt").write_text("none")
    (folder / "deep" / "circle").symlink_to(folder)
    return folder


def given(*arguments: object) -> list[GivenImage]:
    return [*find_images(map(str, arguments))]


def results(saved: SavedModel, *arguments: object, batch_size: int = 16, top: int = 1) -> list[ImageResult]:
    return [*Classifier(saved, top, CPU).results(find_images(map(str, arguments)), batch_size)]


# --- what is given ---


def test_folders_are_entered_whatever_their_layout(folder: Path) -> None:
    found = [one.name for one in given(folder)]
    assert found == [f"{folder}/{name}" for name in ("a-green.JPG", "b-red.png", "deep/er/c-blue.gif")]


def test_names_are_told_as_they_were_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert [one.name for one in given("deep/er", "./b-red.png", "notes.txt")] == [
        "deep/er/c-blue.gif",
        "./b-red.png",
        "notes.txt",
    ]


def test_what_is_missing_is_told_in_its_place(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = given("nowhere.png", tmp_path / "empty", folder, "s3://b/x.png")
    troubles = [one for one in found if one.problem]
    assert [(one.name.rpartition("/")[2], one.problem.partition(" (")[0]) for one in troubles] == [
        ("nowhere.png", "no such file or folder"),
        ("empty", "no images in it"),
        ("x.png", "predict takes files and folders; download it first"),
    ]


def test_nothing_at_all_is_an_error_of_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^nowhere: no such file or folder$"):
        given("nowhere")
    with pytest.raises(UsageError) as refused:
        given(*(f"nowhere{number}" for number in range(12)))
    assert str(refused.value).splitlines()[-2:] == ["  nowhere7: no such file or folder", "  and 4 more"]


# --- what they show ---


def test_each_image_gets_its_classes_the_most_probable_first(saved: SavedModel, folder: Path) -> None:
    found = results(saved, folder, top=9)
    assert [result.predictions[0].name for result in found] == ["green", "red", "blue"]
    for result in found:
        shares = [one.probability for one in result.predictions]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0.8 and sum(shares) == pytest.approx(1, abs=1e-5)
        assert {one.name for one in result.predictions} == set(COLOURS)
    assert [len(result.predictions) for result in results(saved, folder, top=2)] == [2, 2, 2]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_broken_files_are_told_and_the_rest_is_done_in_order(saved: SavedModel, folder: Path, batch_size: int) -> None:
    (folder / "a-cut.png").write_bytes(picture("red")[:60])
    (folder / "b-text.png").write_text("no image")
    os.mkfifo(folder / "c-fifo.png")
    found = results(saved, folder, "nowhere.png", folder / "b-red.png", batch_size=batch_size)
    assert [(Path(one.file).name, one.predictions[0].name if one.predictions else "") for one in found] == [
        ("a-cut.png", ""),
        ("a-green.JPG", "green"),
        ("b-red.png", "red"),
        ("b-text.png", ""),
        ("c-fifo.png", ""),
        ("c-blue.gif", "blue"),
        ("nowhere.png", ""),
        ("b-red.png", "red"),
    ]
    errors = {Path(one.file).name: one.error for one in found if one.error}
    assert errors.keys() == {"a-cut.png", "b-text.png", "c-fifo.png", "nowhere.png"}
    assert errors["b-text.png"].startswith("not an image of a known format")
    assert errors["c-fifo.png"] == "is not a regular file"


def test_outputs_that_are_no_numbers_are_told(folder: Path) -> None:
    config = description()
    model = build(config).eval()
    torch.nn.init.constant_(model.get_parameter("head.bias"), float("nan"))
    diverged = SavedModel(model, SavedConfig.restored(config), tuple(COLOURS), "step-3")
    assert {one.error for one in results(diverged, folder)} == {
        "the model returns NaN for it; did its training diverge?"
    }


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(UsageError, match="--device cuda: torch finds no GPU on this machine; use --device cpu"):
        choose_device("cuda")
    assert default_batch_size(CPU) < default_batch_size(torch.device("cuda"))


@pytest.mark.gpu
def test_a_gpu_sees_what_the_cpu_sees(saved: SavedModel, folder: Path) -> None:
    on_gpu = [*Classifier(saved, 3, torch.device("cuda")).results(find_images([str(folder)]), 16)]
    assert [one.predictions[0].name for one in on_gpu] == ["green", "red", "blue"]
    saved.model.to(CPU)
