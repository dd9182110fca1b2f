"""Images and tables that ranks log."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddptrain.rank.media import png
from ddptrain.tracking import protocol as items
from tests.unit.rank.ranks import Rank, make_rank, rank
from tests.unit.tracking.trackers import House, Recorder

__all__ = ["make_rank", "rank"]

# --- Pictures and tables of a rank: files in the run directory, and the same to trackers where there are any ---


def saved(rank: Rank) -> dict[str, bytes]:
    """The files that were handed over, by path."""
    return {path: staged.read_bytes() for path, staged in rank.saved().items()}


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


_RED = np.array([[[255, 0, 0], [0, 128, 0]]], np.uint8)  # one row of two pixels


def test_pictures_are_named_by_step_and_rank_and_counted_where_there_are_several(rank: Rank) -> None:
    for value in (0, 255):
        rank.context.log_image("val/examples", torch.full((3, 2, 2), value, dtype=torch.uint8), step=25)
    rank.context.log_image("val/examples", _RED)
    files = saved(rank)
    assert list(files) == [
        "images/val/examples/step-25-rank-0.png",
        "images/val/examples/step-25-rank-0-1.png",
        "images/val/examples/rank-0.png",
    ]
    assert [int(pixels(data).max()) for data in files.values()] == [0, 255, 255]


@pytest.mark.parametrize("name", ["../x", "/etc", "", "a/"])
def test_name_that_leads_elsewhere_is_refused(rank: Rank, name: str) -> None:
    with pytest.raises(ValueError, match="take a name such as"):
        rank.context.log_image(name, _RED)
    with pytest.raises(ValueError, match="take a name such as"):
        rank.context.log_table(name, ["a"], [[1]])
    assert saved(rank) == {}


def test_table_is_kept_as_csv_with_pictures_beside_it(rank: Rank) -> None:
    rows = [[_RED, "a,b", torch.tensor(0.5), None], [torch.zeros(1, 2, 2), 'say "x"', np.int64(3), True]]
    rank.context.log_table("predictions", ["image", "label", "score", "right"], rows, step=7)
    files = saved(rank)
    assert files["tables/predictions/step-7-rank-0.csv"].decode().splitlines() == [
        "image,label,score,right",
        'images/predictions/step-7-rank-0.png,"a,b",0.5,',
        'images/predictions/step-7-rank-0-1.png,"say ""x""",3,True',
    ]
    assert len(files) == 3


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([[1, 2, 3]], ValueError, "has 2 columns, row 0 has 3 values"),
        ([[1, object()]], TypeError, "'b' is <object"),
    ],
)
def test_table_that_is_none_is_refused_in_words(rank: Rank, rows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rank.context.log_table("t", ["a", "b"], rows)


def test_trackers_get_what_the_run_directory_has(rank: Rank, tmp_path: Path) -> None:
    class Reader(Recorder):
        def log(self, item: items.Item) -> None:
            super().log(item)
            for image in [item] if isinstance(item, items.Image) else []:
                self.options = {"read": image.path.read_bytes()}

    house = House(tmp_path)
    reader = Reader()
    rank.context._tracked.manager = house.open(reader)
    rank.context.log({"loss": 0.5}, step=1, epoch=0.1)
    rank.context.log_image("examples", _RED, step=1, caption="red")
    rank.context.log_table("predictions", ["image", "score"], [[_RED, 0.5]], step=1)
    rank.context.checkpoint(model=torch.nn.Linear(1, 1), step=1)
    (rank.folder / "staging" / "file-0").unlink()  # the driver has taken it home
    rank.context.close()
    house.close()
    logged, image, table, checkpoint = reader.items
    assert logged == items.Numbers(logged.time_ns, {"loss": 0.5}, 1, 0.1)
    assert isinstance(image, items.Image)
    assert (image.name, image.caption, image.step) == ("examples", "red", 1)
    assert np.array_equal(pixels(reader.options["read"]), _RED)
    assert isinstance(table, items.Table)
    assert (table.columns, table.rows[0][1]) == (("image", "score"), 0.5)
    assert isinstance(table.rows[0][0], items.Image)
    assert isinstance(checkpoint, items.Checkpoint)
    assert checkpoint.step == 1
    assert not (tmp_path / "lent").exists()


# --- Pictures as PNG files: which shapes and types count as pictures, pixel by pixel ---


GREY = [[0, 128], [255, 1]]


def pixels_images(image: Any) -> tuple[str, Any]:
    """Mode and pixels of the file."""
    opened = Image.open(io.BytesIO(png(image)))
    assert opened.format == "PNG"
    return opened.mode, np.asarray(opened).tolist()


@pytest.mark.parametrize(
    ("image", "mode", "expected"),
    [
        (np.array(GREY, np.uint8), "L", GREY),
        (torch.tensor([GREY], dtype=torch.uint8), "L", GREY),
        (np.array([[[1, 2, 3]], [[4, 5, 6]]], np.uint8), "RGB", [[[1, 2, 3]], [[4, 5, 6]]]),
        (torch.tensor([[[1], [4]], [[2], [5]], [[3], [6]]], dtype=torch.uint8), "RGB", [[[1, 2, 3]], [[4, 5, 6]]]),
        (np.array([[-1.0, 0.0, 0.5, 1.0, 2.0, np.nan, np.inf]]), "L", [[0, 0, 128, 255, 255, 0, 255]]),
        (torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True), "L", [[128]]),
        (Image.new("CMYK", (1, 1)), "RGB", [[[255, 255, 255]]]),
        (Image.new("LA", (1, 1), (9, 8)), "RGBA", [[[9, 9, 9, 8]]]),
    ],
)
def test_picture_has_the_pixels_of_its_source(image: Any, mode: str, expected: Any) -> None:
    assert pixels_images(image) == (mode, expected)


@pytest.mark.parametrize(
    ("image", "error", "told"),
    [
        ([[1]], TypeError, "an image is a tensor, a numpy array or a PIL image, not list"),
        (np.zeros((2, 2), np.int64), TypeError, "an image is of uint8, or of floats from 0 to 1, not of int64"),
        (np.zeros(3), ValueError, "an array that is an image has the shape [H, W, 3], [H, W, 1] or [H, W], not [3]"),
        (np.zeros((2, 2, 5)), ValueError, "not [2, 2, 5]"),
        (np.zeros((2, 0)), ValueError, "not [2, 0]"),
        (
            torch.zeros(2, 2, 3),
            ValueError,
            "a tensor that is an image has the shape [3, H, W], [1, H, W] or [H, W], not [2, 2, 3]",
        ),
    ],
)
def test_what_is_no_picture_is_refused_with_its_shape(image: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error) as refused:
        png(image)
    assert str(refused.value).endswith(told)
