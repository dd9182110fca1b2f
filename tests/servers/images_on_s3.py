"""A folder of drawn images, one folder a class, and real S3 servers on loopback that offer it, for tests."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.servers.s3server import S3Server, s3_server

BUCKET = "images"
PREFIX = "dogs/Images"
CLASSES = (
    "n02085620-Chihuahua",
    "n02085782-Japanese_spaniel",
    "n02086240-Shih-Tzu",
    "n02088364-beagle",
    "n02099601-golden_retriever",
)
PER_CLASS = 250  # 1,250 keys: more than the 1,000 that S3 lists in one page


@dataclass(frozen=True, slots=True)
class ImageBucket:
    """The drawn images in a bucket of two servers: one takes signed requests only, the other one asks nobody."""

    folder: Path
    signed: S3Server
    anonymous: S3Server
    keys: tuple[str, ...]

    @property
    def url(self) -> str:
        """The source, for params.source."""
        return f"s3://{BUCKET}/{PREFIX}"

    def signed_options(self, endpoint: str = "") -> dict[str, Any]:
        """params.source_options for the server that wants to know who asks; `endpoint` in its place (a proxy)."""
        return self.signed.options | ({"endpoint": endpoint} if endpoint else {})

    def anonymous_options(self, endpoint: str = "") -> dict[str, Any]:
        """params.source_options for the open server; `endpoint` in its place (a proxy)."""
        return {"skip_signature": True, "endpoint": endpoint or self.anonymous.options["endpoint"]}


def draw(size: tuple[int, int] = (64, 48), seed: int | str = 0, colour: tuple[int, int, int] | None = None) -> bytes:
    """A JPEG of soft blots, mostly of one colour: quick to draw, no two alike, its class easy to see."""
    noise = random.Random(str(seed))
    base = Image.frombytes("RGB", (8, 6), noise.randbytes(8 * 6 * 3)).resize(size, Image.Resampling.BILINEAR)
    if colour is not None:
        base = Image.blend(base, Image.new("RGB", size, colour), 0.6)
    data = io.BytesIO()
    base.save(data, "JPEG", quality=80)
    return data.getvalue()


def draw_folder(
    folder: Path,
    classes: tuple[str, ...] = CLASSES,
    per_class: int = PER_CLASS,
    size: tuple[int, int] = (64, 48),
) -> tuple[str, ...]:
    """Fill `folder`/<class>/<image>.jpg; returns the keys below `folder`, sorted."""
    keys = []
    for position, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        hue = random.Random(name)
        colour = (hue.randrange(256), hue.randrange(256), 255 * position // max(1, len(classes) - 1))
        stem = name.partition("-")[0]
        for number in range(per_class):
            key = f"{name}/{stem}_{number}.jpg"
            (folder / key).write_bytes(draw(size, key, colour))
            keys.append(key)
    return tuple(sorted(keys))


@contextmanager
def images_on_s3(
    folder: Path,
    classes: tuple[str, ...] = CLASSES,
    per_class: int = PER_CLASS,
    size: tuple[int, int] = (64, 48),
) -> Iterator[ImageBucket]:
    """Draw the images below `folder` and serve them until the block ends.

    What is put there later may stay unseen: the servers remember what a folder holds.
    """
    images = folder / "buckets" / BUCKET / PREFIX
    keys = draw_folder(images, classes, per_class, size)
    with s3_server(folder) as signed, s3_server(folder, anonymous=True) as anonymous:
        yield ImageBucket(images, signed, anonymous, keys)
