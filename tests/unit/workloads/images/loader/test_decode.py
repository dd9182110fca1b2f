"""How images are decoded, here and in processes of their own."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ddptrain.workloads.images import decode as loader_decode
from ddptrain.workloads.images.decode import CorruptImage, decode_eval, decode_pixels

# --- decode ---


RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quarters(width: int = 64, height: int = 48) -> Image.Image:
    """Red and green above, blue and white below."""
    tiny = Image.new("RGB", (2, 2))
    for place, colour in zip([(0, 0), (1, 0), (0, 1), (1, 1)], [RED, GREEN, BLUE, WHITE], strict=True):
        tiny.putpixel(place, colour)
    return tiny.resize((width, height), Image.Resampling.NEAREST)


def photo(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def corners(planes: NDArray[np.uint8]) -> list[tuple[int, ...]]:
    """Upper left, upper right, lower left, lower right, each as a pure colour."""
    picked = [planes[:, y, x] for y, x in ((2, 2), (2, -3), (-3, 2), (-3, -3))]
    return [tuple(255 * (value > 127) for value in pixel.tolist()) for pixel in picked]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF"])
def test_every_format_becomes_planes_of_red_green_and_blue(form: str) -> None:
    planes = decode_eval(encoded(quarters(), form), 32)
    assert planes.shape == (3, 32, 32) and planes.dtype == np.uint8 and planes.flags.c_contiguous
    assert corners(planes) == [RED, GREEN, BLUE, WHITE]


def test_image_whose_exif_is_broken_is_seen_all_the_same() -> None:
    broken = PngInfo()
    broken.add_text("Raw profile type exif", "\nexif\n 8\nno hexadecimal number")
    assert corners(decode_eval(encoded(quarters(), pnginfo=broken), 32)) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_mode_becomes_colours(mode: str) -> None:
    grey = Image.fromarray(np.tile(np.linspace(0, 255, 64, dtype=np.uint8), (48, 1)))
    image = (
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
        if mode == "I;16"
        else grey.convert("RGB").convert(mode)
    )
    planes = decode_eval(encoded(image, "TIFF" if mode == "CMYK" else "PNG"), 32).astype(int)
    assert np.ptp(planes, axis=0).max() <= 3, "it is grey"
    assert planes[0, :, :6].mean() < 90 and planes[0, :, -6:].mean() > 165


@pytest.mark.parametrize(("width", "height", "size"), [(500, 375, 224), (375, 500, 224), (90, 30, 32), (1000, 750, 64)])
def test_centre_is_what_resizing_and_cropping_gives(width: int, height: int, size: int) -> None:
    image = photo(width, height)
    scale = size / (224 / 256) / min(width, height)
    scaled = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, upper = (scaled.width - size) / 2, (scaled.height - size) / 2
    cropped = scaled.crop((int(left), int(upper), int(left) + size, int(upper) + size))
    expected = np.asarray(cropped).transpose(2, 0, 1).astype(int)
    difference = np.abs(decode_eval(encoded(image), size).astype(int) - expected)
    assert difference.mean() < 8, "half a pixel aside, at the most"


def test_jpeg_decoded_at_a_fraction_looks_like_one_decoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(photo(1600, 1200), "JPEG", quality=95)

    def decoded(augment: loader_decode.Augment | None) -> Any:
        return np.frombuffer(decode_pixels(data, 64, augment, random.Random(3)), np.uint8).astype(int)

    fast = [decoded(None), decoded("crop")]
    monkeypatch.setattr(Image.Image, "draft", lambda *_: None)
    whole = [decoded(None), decoded("crop")]
    assert all(np.abs(one - other).mean() < 3 for one, other in zip(fast, whole, strict=True))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_upright_whatever_its_exif_says(orientation: int) -> None:
    inverse = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = quarters()
    if orientation in inverse:
        image = image.transpose(inverse[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, "JPEG", exif=exif, quality=95)
    assert corners(decode_eval(data, 32)) == [RED, GREEN, BLUE, WHITE]


def test_augmentation_hangs_on_its_draw_alone() -> None:
    data = encoded(photo(100, 80), "JPEG")

    def drawn(augment: loader_decode.Augment, seed: int) -> bytes:
        return decode_pixels(data, 32, augment, random.Random(seed))

    assert drawn("crop", 1) == drawn("crop", 1)
    assert len({drawn("crop", seed) for seed in range(20)}) == 20
    assert len({drawn("flip", seed) for seed in range(20)}) == 2
    assert {drawn("none", seed) for seed in range(5)} == {decode_eval(data, 32).transpose(1, 2, 0).tobytes()}


def test_random_boxes_have_the_areas_and_shapes_of_torchvision() -> None:
    draw = random.Random(0)
    boxes = [loader_decode._random_box(500, 375, draw) for _ in range(2000)]
    areas = [(right - left) * (lower - upper) / (500 * 375) for left, upper, right, lower in boxes]
    ratios = [(right - left) / (lower - upper) for left, upper, right, lower in boxes]
    assert all(0 <= box[0] < box[2] <= 500 and 0 <= box[1] < box[3] <= 375 for box in boxes)
    assert min(areas) > 0.07 and 0.4 < sum(areas) / len(areas) < 0.55
    assert min(ratios) > 0.74 and max(ratios) < 1.35
    largest = loader_decode._random_box(1000, 1, draw)
    assert largest == pytest.approx((499 + 1 / 3, 0, 500 + 2 / 3, 1)), "of an allowed shape"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>404</html>", "not an image of a known format"),
        (encoded(photo(100, 80), "JPEG")[:-200], "^image file is truncated"),
        (encoded(photo(100, 80))[:-2000], "^image file is truncated"),
        (encoded(photo(100, 80))[:60], "broken|truncated|no data"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
    ],
)
def test_what_is_no_whole_image_is_told(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptImage, match=reason):
        decode_eval(data, 32)


def test_image_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    header = encoded(Image.new("1", (1, 1)))
    many = header.replace(struct.pack(">II", 1, 1), struct.pack(">II", 14_000, 14_000))
    many = many[:29] + struct.pack(">I", zlib.crc32(many[12:29])) + many[33:]
    with pytest.raises(CorruptImage, match=r"^it has more than 178,956,970 pixels$"):
        decode_eval(many, 32)
