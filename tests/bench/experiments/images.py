"""Images from a local S3 server to batches, compared with other loaders and with decoding alone; number of requests."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from ddptrain.storage.store import Location, open_store
from ddptrain.worker.rank_environment import MALLOC_DEFAULTS
from ddptrain.workloads.images.data.listing import ImageSource, list_images, make_manifest
from ddptrain.workloads.images.params import ImagesParams
from tests.bench.measure import Experiment, Figures, Goal, NotHere, Row, Source, Variants
from tests.bench.stage import BenchError, Stage
from tests.servers.faultproxy import FaultProxy, fault_proxy
from tests.servers.s3server import RCLONE, S3Server, s3_server

_LATENCY_S = 0.025
_CLASSES = 20
_DRAWN = 40  # different photos, of which the others are copies
_RANKS = 4
# As every rank has it, for all alike; and one thread a process, as there is one that decodes.
_ENV = {**MALLOC_DEFAULTS, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A server with buckets, and a proxy that counts requests and can delay them."""

    server: S3Server
    proxy: FaultProxy

    @property
    def by_proxy(self) -> dict[str, Any]:
        """params.source_options, through the proxy."""
        return self.server.options | {"endpoint": self.proxy.url}


@contextmanager
def _served(folder: Path) -> Iterator[_Bucket]:
    """A real S3 server for `folder`/buckets, and the proxy in front of it."""
    if not RCLONE.exists():
        raise BenchError(f"no {RCLONE}: install the dev extra")
    with s3_server(folder) as server, fault_proxy(server.port) as proxy:
        yield _Bucket(server, proxy)


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


# --- batches ---


@contextmanager
def _open_feeding(stage: Stage) -> Iterator[Variants]:
    folder = stage.new_folder("images")
    photos = [_photo(seed) for seed in range(_DRAWN)]
    _draw(folder / "buckets" / "ours", stage.sizes.images, photos)
    _draw(folder / "buckets" / "theirs", stage.sizes.images_peer, photos)
    memory = folder / "memory"
    _draw(memory, _DRAWN, photos)
    with _served(folder) as bucket:
        location = Location("s3://ours", bucket.server.options)
        # One of each class is not trained on, where nothing validates: the split wants two classes at the least.
        listed = ImagesParams(source="s3://ours", source_options=bucket.server.options, train_pct=1.0)
        make_manifest(ImageSource(list_images(location)), listed, location).write(folder)

        def measured(way: str, env: dict[str, str] | None = None, **params: Any) -> Figures:
            told = json.dumps({"way": way, **params})
            program: list[str | Path] = [stage.python, stage.programs / "images.py", told]
            done = stage.run(program, env=_ENV | (env or {}))
            return {"images_per_s": json.loads(done.stdout)["images_per_s"]}

        def ours(options: dict[str, Any], latency_s: float) -> Figures:
            bucket.proxy.inject(latency_s=latency_s)
            params = {"source": "s3://ours", "source_options": options, "train_pct": 1.0, "epochs": 1}
            return measured("from_s3", manifest=str(folder), params=params)

        def cached() -> Figures:
            asked = []
            for epochs in (1, 2):
                bucket.proxy.reset()
                kept = stage.new_folder("cache")
                cache = {"dir": str(kept), "max_gb": 10.0}
                by_proxy = {"source": "s3://ours", "source_options": bucket.by_proxy, "train_pct": 1.0}
                measured("from_s3", manifest=str(folder), params=by_proxy | {"cache": cache, "epochs": epochs})
                asked.append(sum(bucket.proxy.counts().values()))
                shutil.rmtree(kept)
            return {"first_requests": asked[0], "second_requests": asked[1] - asked[0]}

        yield {
            "s3-image-folder": partial(measured, "s3_image_folder", bucket.server.environment, bucket="theirs"),
            "decoding-alone": partial(measured, "from_memory", folder=str(memory), count=stage.sizes.images),
            "images": partial(ours, bucket.server.options, 0.0),
            "images-25ms": partial(ours, bucket.by_proxy, _LATENCY_S),
            "images-cached": cached,
        }


def _rate(name: str, ours: str, peer: str, peer_name: str, bound: float, what: str) -> Row:
    sources = Source(ours, "images_per_s"), Source(peer, "images_per_s")
    return Row(name, "images/s", *sources, peer_name, Goal("ratio", ">=", bound), what)


_INTO = "JPEGs of 500 x 375 from S3 on loopback into ready batches of 224 x 224, augmented, 1 rank, 1 decode process"
FEEDING = Experiment(
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
        Row(
            name="images-cached",
            unit="requests",
            ours=Source("images-cached", "second_requests"),
            peer=Source("images-cached", "first_requests"),
            peer_name="the first epoch",
            goal=Goal("ours", "<=", 0),
            what="requests to S3 in a second epoch with the cache",
        ),
    ),
    open=_open_feeding,
)


# --- the listing ---


@contextmanager
def _open_listing(stage: Stage) -> Iterator[Variants]:
    folder = stage.new_folder("keys")
    tiny = io.BytesIO()
    Image.new("RGB", (8, 8)).save(tiny, "JPEG")
    _draw(folder / "buckets" / "keys", stage.sizes.image_keys, [tiny.getvalue()])
    with _served(folder) as bucket:

        def one_listing() -> Figures:
            bucket.proxy.reset()
            n = sum(1 for _ in open_store(Location("s3://keys", bucket.by_proxy)).listing())
            if n != stage.sizes.image_keys:
                raise BenchError(f"{n} keys listed instead of {stage.sizes.image_keys}")
            return {"requests": bucket.proxy.counts().get("list", 0)}

        def train() -> Figures:
            bucket.proxy.reset()
            params = {
                "source": "s3://keys",
                "source_options": bucket.by_proxy,
                "downsample_to": 100 / stage.sizes.image_keys,
                "image_size": 8,
                "architecture": "small_cnn",
                "epochs": 1,
            }
            config = {"name": "keys", "workload": "images", "params": params, "cluster": {"ranks": _RANKS}}
            path = stage.new_folder("keys-run") / "keys.yaml"
            path.write_text(json.dumps(config))
            stage.run([stage.command, "train", path, "--output", "plain", "--runs-dir", path.parent])
            return {"requests": bucket.proxy.counts().get("list", 0)}

        yield {"one-listing": one_listing, "train-4-ranks": train}


LISTING = Experiment(
    rows=(
        Row(
            name="images-listing",
            unit="requests",
            ours=Source("train-4-ranks", "requests"),
            peer=Source("one-listing", "requests"),
            peer_name="one pass over all pages",
            goal=Goal("ratio", "<=", 1),
            what="requests that list the bucket of 20,000 keys in a run of 4 ranks",
        ),
    ),
    open=_open_listing,
)


# --- a GPU ---


@contextmanager
def _open_gpu(stage: Stage) -> Iterator[Variants]:
    listed = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60)
    if not listed or b"GPU " not in listed.stdout:
        raise NotHere("there is no NVIDIA GPU")
    folder = stage.new_folder("gpu")
    _draw(folder / "images", stage.sizes.images, [_photo(seed) for seed in range(_DRAWN)])
    location = Location(str(folder / "images"))
    params = ImagesParams(source=location.url, train_pct=1.0)
    make_manifest(ImageSource(list_images(location)), params, location).write(folder)

    def measured(*, from_memory: bool) -> Figures:
        params = {"manifest": str(folder), "steps": stage.sizes.gpu_steps, "from_memory": from_memory}
        done = stage.run([stage.python, stage.programs / "images_gpu.py", json.dumps(params)], env=MALLOC_DEFAULTS)
        return {"images_per_s": json.loads(done.stdout)["images_per_s"]}

    variants: dict[str, Callable[[], Figures]] = {
        "gpu-memory": partial(measured, from_memory=True),
        "gpu-fed": partial(measured, from_memory=False),
    }
    yield variants


GPU = Experiment(
    rows=(
        _rate(
            "images-gpu",
            "gpu-fed",
            "gpu-memory",
            "the same loop, from memory",
            0.95,
            f"training ResNet-50 on one GPU, bf16, channels_last, fed from a folder, {os.cpu_count()} cores",
        ),
    ),
    open=_open_gpu,
)
