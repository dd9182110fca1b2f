"""Images a second of ResNet-50's training on one GPU, bf16 and channels_last: fed from a folder, or from memory."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models import resnet50

from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.image_loader import ImageLoader
from ddptrain.workloads.images.params import ImagesParams

BATCH, WARM_STEPS = 256, 10


def batches(manifest: str, *, from_memory: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels without end, pinned: read and decoded ahead, or two batches over and over."""
    listed = Manifest.read(Path(manifest))
    settings = ImagesParams(source=listed.url, batch_size=BATCH, epochs=10_000, prefetch=6)
    with ImageLoader(listed, listed.location(settings), settings, torch.device("cuda"), 0, 1, print) as feeder:
        fed = itertools.chain.from_iterable(feeder.train(epoch) for epoch in range(1, settings.epochs))
        pairs = ((batch.images, batch.labels) for batch in fed if len(batch.images) == BATCH)
        kept = [next(pairs) for _ in range(2)] if from_memory else []
        if not from_memory:
            yield from pairs
    yield from itertools.cycle(kept)


def main(manifest: str, steps: int, *, from_memory: bool) -> None:
    """Prints {"images_per_s"} of `steps` steps, after some that do not count."""
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    model = resnet50(num_classes=1000).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1) * 255
    std = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1) * 255
    began = 0.0
    for step, (images, labels) in enumerate(
        itertools.islice(batches(manifest, from_memory=from_memory), steps + WARM_STEPS)
    ):
        if step == WARM_STEPS:
            torch.cuda.synchronize()
            began = time.perf_counter()
        seen = (images.to(device, non_blocking=True).float() - mean) / std
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(seen), labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    print(json.dumps({"images_per_s": steps * BATCH / (time.perf_counter() - began)}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
