"""Images from a real S3 server into batches, through a proxy that breaks requests; processes that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ddptrain.errors import UsageError
from ddptrain.storage.store import Location, StoreUnreachable
from ddptrain.workloads.images.data.listing import ImageSource, list_images, make_manifest
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams
from tests.conftest import PATIENCE_S
from tests.servers.faultproxy import Fault, FaultProxy, fault_proxy
from tests.servers.images_on_s3 import ImageBucket, images_on_s3
from tests.unit.worker.stubs import until

if TYPE_CHECKING:  # every test process would import torch, for 2 s
    from ddptrain.workloads.images.loader.image_loader import ImageLoader

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

    @contextmanager
    def feeder(
        self, told: list[str] | None = None, deadline_s: float = PATIENCE_S, **params: Any
    ) -> Iterator[ImageLoader]:
        import torch

        from ddptrain.workloads.images.loader.image_loader import ImageLoader

        settings = self.settings(**params)
        tell = (told if told is not None else []).append
        location = self.manifest.location(settings)
        cpu = torch.device("cpu")
        with ImageLoader(self.manifest, location, settings, cpu, 0, 1, tell, deadline_s=deadline_s) as made:
            yield made


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


def epoch(fed: ImageLoader, number: int = 1) -> dict[int, bytes]:
    """Image -> pixels."""
    return {
        int(index): image.numpy().tobytes()
        for batch in fed.train(number)
        for index, image in zip(batch.index, batch.images, strict=True)
    }


def test_broken_requests_change_neither_images_nor_their_order(served: Served) -> None:
    with served.feeder() as fed:
        expected = epoch(fed)
    assert len(expected) == N_TRAIN
    assert served.proxy.counts()["get"] >= N_TRAIN
    for faults in (
        [Fault("status", "get", share=0.2, status=503), Fault("reset", "get", share=0.1)],
        [Fault("truncate", "get", share=0.2), Fault("status", "get", share=0.1, status=500)],
        [Fault("stall", "get", share=0.1, delay_s=0.2)],
    ):
        served.proxy.inject(*faults, seed=1)
        told: list[str] = []
        with served.feeder(told) as fed:
            assert epoch(fed) == expected
        assert served.proxy.counts()["faults"] > 5 and told == []
        served.proxy.reset()


def test_second_epoch_and_another_run_with_the_cache_ask_the_store_for_nothing(served: Served, tmp_path: Path) -> None:
    cache = {"dir": str(tmp_path / "cache"), "max_gb": 1.0}
    with served.feeder(cache=cache) as fed:
        first = epoch(fed)
        validated = sum(len(batch.labels) for batch in fed.validate())
        assert served.proxy.counts()["get"] == N_TRAIN + validated == len(served.manifest.keys)
        served.proxy.reset()
        second = epoch(fed, 2)
        assert validated == sum(len(batch.labels) for batch in fed.validate())
    with served.feeder(cache=cache, loader_workers=0) as fed:
        assert epoch(fed) == first != second
    assert served.proxy.counts() == {}


def test_missing_and_damaged_images_are_named_and_replaced(served: Served, tmp_path: Path) -> None:
    gone, cut = (served.manifest.keys[served.manifest.train[place]] for place in (5, 50))
    served.proxy.inject(Fault("status", "get", match=gone, status=404), Fault("truncate", "get", match=cut))
    told: list[str] = []
    with served.feeder(told, 1, max_bad_fraction=0.05) as fed:
        batches = [*fed.train(1)]
        bad = dict(fed.bad)
    assert bad.keys() == {gone, cut} and len(told) == 2
    assert bad[gone] == "it is no longer there" and bad[cut].startswith("tried for 1 s; the last error: ")
    labels = Counter(label for batch in batches for label in batch.labels.tolist())
    assert labels == dict.fromkeys(range(5), N_TRAIN // 5), "of each class as many as before"
    assert int(sum((~batch.ok).sum() for batch in batches)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_store_that_is_away_for_long_ends_the_training_instead_of_having_images_replaced(
    served: Served, workers: int
) -> None:
    told: list[str] = []
    ok: list[bool] = []
    feeder = served.feeder(told, 1.0, loader_workers=workers, batch_size=4, requests=4)
    with feeder as fed:
        batches = fed.train(1)
        next(batches)
        served.proxy.inject(Fault("reset", share=0.5), Fault("status", status=503))
        with pytest.raises(StoreUnreachable) as caught:
            ok.extend(bool(batch.ok.all()) for batch in batches)
        assert all(ok) and fed.bad == [] and told == []
    said, shortly = str(caught.value), r"since \d\d:\d\d:\d\d \(\d+ s\); the last error: s3://images/dogs/Images/n\d+-"
    assert re.match(rf"s3://images/dogs/Images does not answer: no request has succeeded {shortly}", said)
    assert said.endswith("; when it is back, failure.max_restarts or --resume continues from the newest checkpoint")
    assert "503 SlowDown" in said or "the connection broke" in said or "no connection" in said
    assert "\n" not in said


def test_store_that_is_away_for_a_while_is_waited_for(served: Served) -> None:
    with served.feeder() as fed:
        expected = epoch(fed)
    told: list[str] = []
    with served.feeder(told, batch_size=4, requests=4) as fed:
        batches = fed.train(1)
        shown = [next(batches)]
        served.proxy.inject(Fault("reset"))

        def come_back() -> None:
            until(lambda: served.proxy.counts().get("faults", 0) > 12, "a third try of each request")
            served.proxy.reset()

        back = threading.Thread(target=come_back)
        back.start()
        shown += batches
        back.join()
    assert len(shown) == N_TRAIN // 4 and all(batch.ok.all() for batch in shown) and told == []
    found = {int(i): image.numpy().tobytes() for one in shown for i, image in zip(one.index, one.images, strict=True)}
    assert found == expected


def test_requests_are_under_way_side_by_side(served: Served) -> None:
    served.proxy.inject(at_once=16)
    with served.feeder(requests=16) as fed:
        assert len([*fed.train(1)]) == 8
    assert served.proxy.most_at_once() == 16


# A rank that feeds itself; it prints the processes that decode for it, and trains until it is killed.
RANK = """
import json, sys, torch
from ddptrain.workloads.images.loader.image_loader import ImageLoader
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams
from pathlib import Path
manifest, settings = Manifest.read(Path(sys.argv[1])), ImagesParams.model_validate(json.loads(sys.argv[2]))
feeder = ImageLoader(manifest, manifest.location(settings), settings, torch.device("cpu"), 0, 1, print)
for epoch in range(1, 1_000_000):
    for batch in feeder.train(epoch):
        if epoch == 1:
            print(json.dumps(feeder._pool.pids), flush=True)
"""


def test_decode_processes_end_with_their_rank_when_it_is_killed(served: Served, tmp_path: Path) -> None:
    served.manifest.write(tmp_path)
    settings = served.settings(loader_workers=2).model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path), settings], cwd=REPOSITORY, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        pids = json.loads(rank.stdout.readline())
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        os.kill(rank.pid, signal.SIGKILL)
        assert rank.wait(PATIENCE_S) == -signal.SIGKILL
        rank.stdout.read()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the decode processes", PATIENCE_S)


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


def test_source_that_is_not_there_is_told_by_its_name(served: Served) -> None:
    from ddptrain.workloads.images.dataset import ImageFolder

    with pytest.raises(UsageError, match="s3://images/cats"):
        ImageFolder("s3://images/cats", options=served.options)
