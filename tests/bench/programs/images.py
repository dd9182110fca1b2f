"""Images a second into ready batches, from S3 in two ways, or from memory.

Prints {"images_per_s"}, from the first batch on: starting is not measured.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE, BATCH, SEED, WORKERS = 224, 64, 7, 2
LISTING = """
import json, pathlib, sys
from ddptrain.workloads.images.listing import prepare
prepare(json.loads(sys.argv[2]), pathlib.Path(sys.argv[1]), lambda _: None)
"""


def from_s3(source: str, options: dict[str, Any]) -> Iterator[int]:
    """Sizes of the batches of an epoch."""
    import torch

    from ddptrain.rank.loader import make_loader
    from ddptrain.workloads.images.data import Images
    from ddptrain.workloads.images.manifest import Manifest
    from ddptrain.workloads.images.params import ImagesParams

    params: dict[str, Any] = {"source": source, "source_options": options, "train_pct": 1.0, "image_size": SIZE}
    settings = ImagesParams(**params, epochs=1, batch_size=BATCH, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        # As the command does it, in a process of its own: one that has read from a store can't be forked.
        subprocess.run([sys.executable, "-c", LISTING, folder, json.dumps(params)], check=True)
        listed = Manifest.read(Path(folder))
    data = Images(listed, listed.train, settings, settings.augmentation, requests=settings.requests // WORKERS)
    how: Any = {"shuffle": True, "drop_last": False, "with_epoch": True, "collate_fn": lambda batch: batch}
    workers: Any = {"num_workers": WORKERS, "multiprocessing_context": "fork", "prefetch_factor": 3}
    for batch in make_loader(data, BATCH, 0, 1, torch.device("cpu"), seed=SEED, **how, **workers):
        yield len(batch.images)


def s3_image_folder(bucket: str) -> Iterator[int]:
    """Sizes of the batches of dask-pytorch-ddp's dataset, with the usual transforms."""
    from dask_pytorch_ddp.data import S3ImageFolder
    from torch.utils.data import DataLoader
    from torchvision import transforms

    crop = transforms.RandomResizedCrop(SIZE)
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    data = S3ImageFolder(bucket, "", transform=transform)
    for images, _ in DataLoader(data, batch_size=BATCH // 4, shuffle=True, num_workers=1):
        yield len(images)


def from_memory(folder: str, count: int) -> Iterator[int]:
    """Sizes of batches that this process decodes and transforms as those of S3 are, from bytes that it holds."""
    from ddptrain.workloads.images.decode import decode_pixels

    encoded = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
    draw, n_bytes = random.Random(), SIZE * SIZE * 3
    batch = memoryview(bytearray(BATCH * n_bytes))
    for number in range(count):
        place = number % BATCH
        draw.seed(number)
        batch[place * n_bytes : (place + 1) * n_bytes] = decode_pixels(
            encoded[number % len(encoded)], SIZE, "crop", draw
        )
        if place == BATCH - 1:
            yield BATCH


WAYS = {"from_s3": from_s3, "s3_image_folder": s3_image_folder, "from_memory": from_memory}


def main(way: str, **params: Any) -> None:
    """Measures one way."""
    batches: Iterator[int] = WAYS[way](**params)  # type: ignore[operator]
    next(batches)
    began = time.perf_counter()
    images = sum(batches)
    print(json.dumps({"images": images, "images_per_s": images / (time.perf_counter() - began)}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
