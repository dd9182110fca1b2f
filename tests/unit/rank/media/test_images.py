"""Pictures as PNG files: which shapes and types count as pictures, pixel by pixel."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddptrain.rank.media import png

GREY = [[0, 128], [255, 1]]


def pixels(image: Any) -> tuple[str, Any]:
    """Mode and pixels of the file."""
    opened = Image.open(io.BytesIO(png(image)))
    assert opened.format == "PNG"
    return opened.mode, np.asarray(opened).tolist()


@pytest.mark.parametrize(
    ("image", "mode", "expected"),
    [
        (np.array(GREY, np.uint8), "L", GREY),
        (torch.tensor(GREY, dtype=torch.uint8), "L", GREY),
        (np.array(GREY, np.uint8)[:, :, None], "L", GREY),
        (torch.tensor([GREY], dtype=torch.uint8), "L", GREY),
        (np.array([[[1, 2, 3]], [[4, 5, 6]]], np.uint8), "RGB", [[[1, 2, 3]], [[4, 5, 6]]]),
        (torch.tensor([[[1], [4]], [[2], [5]], [[3], [6]]], dtype=torch.uint8), "RGB", [[[1, 2, 3]], [[4, 5, 6]]]),
        (np.array([[True, False]]), "L", [[255, 0]]),
        (np.array([[-1.0, 0.0, 0.5, 1.0, 2.0, np.nan, np.inf]]), "L", [[0, 0, 128, 255, 255, 0, 255]]),
        (torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True), "L", [[128]]),
        (Image.new("L", (2, 1), 7), "L", [[7, 7]]),
        (Image.new("CMYK", (1, 1)), "RGB", [[[255, 255, 255]]]),
        (Image.new("LA", (1, 1), (9, 8)), "RGBA", [[[9, 9, 9, 8]]]),
        (np.array([[[1, 2, 3, 4]]], np.uint8), "RGBA", [[[1, 2, 3, 4]]]),
    ],
)
def test_picture_has_the_pixels_of_its_source(image: Any, mode: str, expected: Any) -> None:
    assert pixels(image) == (mode, expected)


@pytest.mark.parametrize(
    ("image", "error", "told"),
    [
        ([[1]], TypeError, "an image is a tensor, a numpy array or a PIL image, not list"),
        (np.zeros((2, 2), np.int64), TypeError, "an image is of uint8, or of floats from 0 to 1, not of int64"),
        (np.zeros(3), ValueError, "an array that is an image has the shape [H, W, 3], [H, W, 1] or [H, W], not [3]"),
        (np.zeros((3, 2, 2)), ValueError, "[H, W, 3], [H, W, 1] or [H, W], not [3, 2, 2]"),
        (np.zeros((2, 2, 2)), ValueError, "not [2, 2, 2]"),
        (np.zeros((2, 2, 5)), ValueError, "not [2, 2, 5]"),
        (np.zeros((2, 0)), ValueError, "not [2, 0]"),
        (np.zeros((1, 2, 2, 3)), ValueError, "not [1, 2, 2, 3]"),
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
