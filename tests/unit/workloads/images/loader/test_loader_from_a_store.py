"""Images from a real S3 server into batches, through a proxy that breaks requests."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddptrain.storage.store import Location
from ddptrain.workloads.images.listing import ImageSource, list_images, make_manifest
from ddptrain.workloads.images.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams
from tests.conftest import PATIENCE_S
from tests.servers.faultproxy import Fault, FaultProxy, fault_proxy
from tests.servers.images_on_s3 import ImageBucket, images_on_s3
from tests.support.command import wait_until

if TYPE_CHECKING:  # every test process would import torch, for 2 s
    from ddptrain.rank.loader import RankLoader
    from ddptrain.workloads.images.data import Batch

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

REPOSITORY = Path(__file__).parents[2]
PER_CLASS = 30
N_TRAIN = 120  # of the 150 images


@dataclass(frozen=True, slots=True)
class Served:
    """A bucket of images behind a proxy, and the list of them."""

    bucket: ImageBucket
    proxy: FaultProxy
    manifest: Manifest
    options: dict[str, Any]

    def settings(self, **params: Any) -> ImagesParams:
        defaults = {"image_size": 32, "batch_size": 16, "loader_workers": 1, "epochs": 3, "requests": 16}
        return ImagesParams.model_validate(
            {"source": self.bucket.url, "source_options": self.options} | defaults | params
        )

    def loader(self, deadline_s: float = PATIENCE_S, **params: Any) -> RankLoader:
        """The loader of a single rank."""
        import torch

        from ddptrain.rank.loader import make_loader
        from ddptrain.workloads.images.data import Images

        settings = self.settings(**params)
        data = Images(self.manifest, self.manifest.train, settings, settings.augmentation, deadline_s=deadline_s)
        workers: Any = settings.loader_workers
        options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        how: Any = {"shuffle": True, "drop_last": False, "with_epoch": True, "collate_fn": lambda batch: batch}
        return make_loader(data, settings.batch_size, 0, 1, torch.device("cpu"), seed=settings.seed, **how, **options)


@pytest.fixture(scope="module")
def all_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        images_on_s3(tmp_path_factory.mktemp("s3"), per_class=PER_CLASS) as bucket,
        fault_proxy(bucket.signed.port) as proxy,
    ):
        options = bucket.signed_options(proxy.url)
        location = Location(bucket.url, options)
        manifest = make_manifest(
            ImageSource(list_images(location)), ImagesParams(source=bucket.url, source_options=options), location
        )
        yield Served(bucket, proxy, manifest, options)


@pytest.fixture
def served(all_served: Served) -> Served:
    all_served.proxy.reset()
    return all_served


def pixels(batches: Iterable[Batch]) -> dict[int, bytes]:
    """Image -> pixels; no image is bad."""
    found: dict[int, bytes] = {}
    for batch in batches:
        assert batch.bad == {}
        found |= {int(i): image.numpy().tobytes() for i, image in zip(batch.index, batch.images, strict=True)}
    return found


def test_broken_requests_change_neither_images_nor_their_order(served: Served) -> None:
    expected = pixels(served.loader())
    assert len(expected) == N_TRAIN
    assert served.proxy.counts()["get"] >= N_TRAIN
    for faults in (
        [Fault("status", "get", share=0.2, status=503), Fault("reset", "get", share=0.1)],
        [Fault("truncate", "get", share=0.2), Fault("status", "get", share=0.1, status=500)],
        [Fault("stall", "get", share=0.1, delay_s=0.2)],
    ):
        served.proxy.inject(*faults, seed=1)
        assert pixels(served.loader()) == expected
        assert served.proxy.counts()["faults"] > 5
        served.proxy.reset()


def test_store_that_does_not_answer_for_a_while_is_waited_for(served: Served) -> None:
    expected = pixels(served.loader())
    batches = iter(served.loader(batch_size=4, requests=4))
    shown = [next(batches)]
    served.proxy.inject(Fault("reset"))

    def answer_again() -> None:
        wait_until(lambda: served.proxy.counts().get("faults", 0) > 12, "a third try of each request")
        served.proxy.reset()

    back = threading.Thread(target=answer_again)
    back.start()
    shown += batches
    back.join()
    assert len(shown) == N_TRAIN // 4 and pixels(shown) == expected


def test_s3_image_folder_is_read_by_a_data_loader(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from dask_pytorch_ddp.data import S3ImageFolder
    from torch.utils.data import DataLoader
    from torchvision.transforms.functional import pil_to_tensor

    from ddptrain.workloads.images.dataset import ImageFolder

    for name, value in served.bucket.signed.environment.items():
        monkeypatch.setenv(name, value)
    bucket, _, prefix = served.bucket.url.removeprefix("s3://").partition("/")
    theirs = S3ImageFolder(bucket, prefix, transform=pil_to_tensor)
    ours = ImageFolder.of(theirs)
    loader = DataLoader(ours, batch_size=16, num_workers=1, multiprocessing_context="forkserver")
    images, labels = zip(*loader, strict=True)
    assert torch.cat(labels).tolist() == [theirs.class_to_idx[key.split("/")[-2]] for key in theirs.all_files]
    for index in (0, 77, 149):
        assert torch.equal(torch.cat(images)[index], theirs[index][0])


# What a training function does in a rank: nothing that it has done before hinders workers that are forked.
LOADS = """
import json, sys, torch
from torch.utils.data import DataLoader
from torchvision.transforms.functional import pil_to_tensor
from ddptrain.errors import UsageError
from ddptrain.workloads.images.dataset import ImageFolder
data = ImageFolder(sys.argv[1], options=json.loads(sys.argv[2]), transform=pil_to_tensor)
print(data.classes, sum(len(labels) for _, labels in DataLoader(data, batch_size=16, num_workers=1)), flush=True)
data[0]
try:
    next(iter(DataLoader(data, num_workers=1)))
except RuntimeError as error:
    print("forkserver" in str(error))
"""


def test_image_folder_is_listed_without_hindering_a_fork(served: Served) -> None:
    program = [sys.executable, "-c", LOADS, served.bucket.url, json.dumps(served.options)]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [f"{[*served.manifest.classes]} 150", "True"], done.stderr
    assert served.proxy.counts()["list"] == 1
