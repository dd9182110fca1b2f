"""The inputs of predict are read by many threads, and come in their order with their image or the reason."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from ddptrain.workloads.images import predict
from ddptrain.workloads.images.data.predict_inputs import InputProblem, PredictInput
from ddptrain.workloads.images.predict import decoded


def picture(path: Path, red: int) -> PredictInput:
    data = io.BytesIO()
    Image.new("RGB", (12, 10), (red, 0, 0)).save(data, "PNG")
    path.write_bytes(data.getvalue())
    return PredictInput(str(path))


def test_images_and_reasons_come_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    os.mkfifo(tmp_path / "fifo.png")
    inputs: list[PredictInput | InputProblem] = [
        picture(tmp_path / "one.png", 10),
        InputProblem("missing", "no such file or folder"),
        PredictInput(str(tmp_path / "broken.png")),
        PredictInput(str(tmp_path / "fifo.png")),
        PredictInput(str(tmp_path / "gone.png")),
        picture(tmp_path / "two.png", 20),
    ]
    found = [*decoded(inputs, size=8, ahead=2)]
    assert [one for one, _ in found] == inputs
    results = [image if isinstance(image, str) else (image.shape, int(image[0, 0, 0])) for _, image in found]
    assert results == [
        ((3, 8, 8), 10),
        "no such file or folder",
        "not an image of a known format (JPEG, PNG, BMP, GIF, WEBP, TIFF)",
        "is not a regular file",
        "No such file or directory",
        ((3, 8, 8), 20),
    ]


def test_pillow_does_not_warn_about_an_image_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # above it pillow warns, above twice as many it refuses
    ((_, image),) = decoded([picture(tmp_path / "one.png", 10)], 8, 1)
    assert not isinstance(image, str)


def test_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = picture(tmp_path / "one.png", 10)
    size = os.path.getsize(one.name)
    monkeypatch.setattr(predict, "_MOST_BYTES", size)
    ((_, image),) = decoded([one], 8, 1)
    assert not isinstance(image, str)
    monkeypatch.setattr(predict, "_MOST_BYTES", size - 1)
    assert [*decoded([one], 8, 1)] == [(one, f"has {size:,} bytes, which is too large for an image")]


def test_no_more_inputs_are_taken_than_are_read_ahead(tmp_path: Path) -> None:
    one, taken = picture(tmp_path / "one.png", 10), 0

    def inputs() -> Iterator[PredictInput]:
        nonlocal taken
        for _ in range(20):
            taken += 1
            yield one

    images = decoded(inputs(), 8, ahead=5)
    next(images)
    assert taken == 6
    assert len([*images]) == 19


def test_bug_while_an_image_is_read_is_raised_and_threads_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes, size: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(predict, "decode_eval", fail)
    with pytest.raises(ZeroDivisionError):
        next(decoded([picture(tmp_path / "one.png", 10)], 8, 1))
    for thread in threading.enumerate():
        if thread.name == "ddptrain-predict":
            thread.join(30)
            assert not thread.is_alive()
