"""Pixels of images: cropped, scaled and turned upright in one pass of pillow."""

from __future__ import annotations

import io
import math
import random
import warnings
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Augment = Literal["none", "flip", "crop"]
Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")  # no others: pillow runs programs to read some formats
MOST_PIXELS = 178_956_970  # pillow's own limit against decompression bombs
CENTRE = 224 / 256  # side of the centre crop relative to the shorter side
_AREA = (0.08, 1.0)  # of a random crop relative to the image; with _RATIO as in "Going deeper with convolutions"
_RATIO = (3 / 4, 4 / 3)
_ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class CorruptImage(ValueError):
    """The bytes are no readable image, or one that is too large; the message has the reason."""


def ignore_pillow_warnings() -> None:
    """Ignore pillow's warnings, in this process: about images that are large or odd, but can be read."""
    warnings.filterwarnings("ignore", module="PIL")


def decode_eval(data: bytes, size: int) -> NDArray[np.uint8]:
    """Return the centre of an image (224/256 of the shorter side), upright, uint8 [3, size, size].

    Raises CorruptImage.
    """
    pixels = np.frombuffer(decode_pixels(data, size, None, random.Random()), np.uint8)
    return np.ascontiguousarray(pixels.reshape(size, size, 3).transpose(2, 0, 1))


def decode_pixels(data: bytes, size: int, augment: Augment | None, draw: random.Random) -> bytes:
    """Return an upright image as the bytes of [size, size, 3], rows of RGB pixels; augment None crops the centre.

    Raises CorruptImage.
    """
    if not data:
        raise CorruptImage("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _square(image, size, augment, draw).tobytes()
    except MemoryError:
        raise
    except Exception as error:  # pillow's decoders raise arbitrary errors for damaged files
        raise CorruptImage(_reason(error)) from error


def _square(image: Image.Image, size: int, augment: Augment | None, draw: random.Random) -> Image.Image:
    """Crop and scale the image, turn it upright, and perhaps mirror it."""
    width, height = image.size
    box = _random_box(width, height, draw) if augment == "crop" else _centre_box(width, height)
    turn = _turn(image)
    # A JPEG can be decoded at 1/2, 1/4 or 1/8 size, as long as the box is not smaller than the result.
    image.draft(None, (_ceil(width * size / (box[2] - box[0])), _ceil(height * size / (box[3] - box[1]))))
    by_x, by_y = image.width / width, image.height / height
    box = (box[0] * by_x, box[1] * by_y, min(box[2] * by_x, image.width), min(box[3] * by_y, image.height))
    square = _smooth(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    if square.mode != "RGB":
        square = square.convert("RGB")
    if turn is not None:
        square = square.transpose(turn)
    if augment in ("flip", "crop") and draw.random() < 0.5:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return square


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the rotation that makes the image upright; None if its EXIF is damaged: the pixels may be intact."""
    try:
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # pillow raises arbitrary errors for damaged EXIF
        return None


def _smooth(image: Image.Image) -> Image.Image:
    """Return the image in a mode whose values can be interpolated."""
    if image.mode in ("RGB", "L"):
        return image
    if image.mode.startswith("I;16"):  # convert() would clip all values above 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _centre_box(width: int, height: int) -> Box:
    side = min(width, height) * CENTRE
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def _random_box(width: int, height: int, draw: random.Random) -> Box:
    """Return a box of random area, shape and position; the largest one of an allowed shape if ten draws did not fit.

    As in torchvision's RandomResizedCrop. Portrait and landscape shapes are equally likely, so EXIF may turn it later.
    """
    for _ in range(10):
        area = width * height * draw.uniform(*_AREA)
        ratio = math.exp(draw.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, upper, left + w, upper + h
    widest, highest = min(width, height * _RATIO[1]), min(height, width / _RATIO[0])
    x, y = (width - widest) / 2, (height - highest) / 2
    return x, y, x + widest, y + highest


def _ceil(number: float) -> int:
    return max(1, math.ceil(number - 1e-6))


def _reason(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"it has more than {MOST_PIXELS:,} pixels"
    if type(error).__name__ == "UnidentifiedImageError":
        return f"not an image of a known format ({', '.join(FORMATS)})"
    # These errors of pillow have a message that explains; others are clear only with their type.
    is_told = type(error) in (OSError, SyntaxError) and str(error)
    return str(error) if is_told else f"{type(error).__name__}: {error}"
