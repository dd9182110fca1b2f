"""Decode processes that end by themselves: others do their work, and no image is lost or seen twice."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddptrain.workloads.images.loader import decode_client
from ddptrain.workloads.images.loader.decode_pool import DecodeProcessLost, ProcessDecodePool
from ddptrain.workloads.images.loader.image_loader import ImageLoader
from tests.servers.images_on_s3 import draw_folder
from tests.unit.worker.stubs import until
from tests.unit.workloads.images.loader.test_image_loader import CLASSES, PER_CLASS, Told, feeder, manifest_of, seen

MARK = b"this one kills"
# What a process does before all else; decoding an image with the mark in it calls `fatal`.
HOOK = f"""
import os, signal
from ddptrain.workloads.images.loader import decode_process, pipeline
decode, setup = pipeline.decode_pixels, decode_process.DecodeSetup
def noted(**told):
    global results_fd
    results_fd = told["results_fd"]
    return setup(**told)
decode_process.DecodeSetup = noted
pipeline.decode_pixels = lambda data, *more: (data.endswith({MARK!r}) and fatal()) or decode(data, *more)
def fatal():
"""
KILLED = "    os.kill(os.getpid(), signal.SIGKILL)\n"
# Stops to answer in the middle of a line, and goes on decoding; once.
HALF_DEAD = """
    try:
        os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
        results = os.dup(results_fd)
        os.dup2(os.open(os.devnull, os.O_WRONLY), results_fd)
        os.write(results, b"[1, 2")
        os.close(results)
    except FileExistsError:
        pass
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    draw_folder(folder, CLASSES, PER_CLASS, (24, 20))
    return folder


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has decode processes do something when they meet an image with the mark."""

    def hook(what: str) -> None:
        begin, _, rest = decode_client._PROGRAM.rpartition("; ")
        monkeypatch.setattr(decode_client, "_PROGRAM", f"{begin}\nexec({HOOK + what!r})\n{rest}")

    return hook


def mark(path: Path) -> None:
    path.write_bytes(path.read_bytes() + MARK)


def pool_of(fed: ImageLoader) -> ProcessDecodePool:
    assert isinstance(fed._pool, ProcessDecodePool)
    return fed._pool


def test_work_of_a_killed_process_is_done_again_with_the_same_pixels(images: Path) -> None:
    with feeder(images) as fed:
        expected = [seen(fed.train(epoch)) for epoch in (1, 2)]
    told: Told = []
    with feeder(images, told=told, loader_workers=2) as fed:
        pool = pool_of(fed)
        victim, spared = pool._decoders[1], pool.pids[0]
        os.kill(victim.popen.pid, signal.SIGSTOP)  # so that it has orders when it dies

        def kill() -> None:
            until(lambda: len(victim.pending) > 3, "orders")
            victim.popen.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        found = seen(fed.train(1))
        killing.join()
        later: dict[int, tuple[int, bytes]] = {}
        for number, batch in enumerate(fed.train(2)):
            later |= seen(iter([batch]))
            if number == 2:
                os.kill(pool.pids[0], signal.SIGKILL)
        assert [found, later] == expected
        seen(fed.train(3))
        until(lambda: len(told) == 2, "a word of the second")
        assert spared not in pool.pids and all(psutil.pid_exists(pid) for pid in pool.pids)
        assert fed.bad == []
    said = (
        rf"decode process 2 of 2 \(pid {victim.popen.pid}\) ended by SIGKILL; the system may have been out of memory: "
        r"lower params\.loader_workers, .*; another one takes its place, and does its \d+ images again"
    )
    assert re.fullmatch(said, told[0]) and told[1].startswith(f"decode process 1 of 2 (pid {spared}) ended by SIGKILL")


@pytest.mark.parametrize("workers", [1, 2])
def test_image_that_ends_every_process_is_a_bad_one(images: Path, hooked: Callable[[str], None], workers: int) -> None:
    hooked(KILLED)
    manifest = manifest_of(images)
    fatal = [manifest.train[1], manifest.train[12]]
    for index in fatal:
        mark(images / manifest.keys[index])
    told: Told = []
    with feeder(images, told=told, loader_workers=workers, max_bad_fraction=0.1) as fed:
        batches = [*fed.train(1)]
        bad, pids = dict(fed.bad), pool_of(fed).pids
        batches += fed.train(2)
        assert sorted(fed.bad_index) == fatal and pool_of(fed).pids == pids, "nobody tries them again"
    shown = [int(index) for batch in batches for index in batch.index[batch.ok]]
    assert sorted(shown) == sorted(2 * [*{*manifest.train} - {*fatal}])
    assert sum(batch.n_counted for batch in batches) == 2 * len(manifest.train), "others stand in"
    each = "3 decode processes ended while they decoded it"
    assert {*bad.values()} == {f"{each}; the last one, with only this image, ended by SIGKILL"}
    assert sum(line.startswith("bad image ") for line in told) == 2


def test_processes_that_only_die_end_the_training(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "_PROGRAM", "import sys; sys.exit(7)")
    told: Told = []
    with feeder(images, told=told, loader_workers=1) as fed:
        with pytest.raises(
            DecodeProcessLost, match=r"decode process 1 of 1 \(pid \d+\) ended with exit status 7.*4 in a row"
        ):
            next(fed.train(1))
        assert len(told) == 3


def test_process_that_does_not_answer_any_more_is_ended_before_another_one_writes(
    images: Path, hooked: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooked(HALF_DEAD)
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    monkeypatch.setattr(decode_client, "_END_S", 0.1)
    with feeder(images) as fed:
        expected = seen(fed.train(1))
    mark(images / manifest_of(images).keys[manifest_of(images).train[4]])
    told: Told = []
    with feeder(images, told=told, loader_workers=1) as fed:
        (half_dead,) = pool_of(fed).pids
        assert seen(fed.train(1)) == expected
        assert not psutil.pid_exists(half_dead)
    assert len(told) == 1 and f"(pid {half_dead}) did not answer any more, and was ended" in told[0]


def test_nothing_is_started_while_the_rank_ends(images: Path) -> None:
    with feeder(images, loader_workers=1) as fed:
        pool = pool_of(fed)
        (before,) = pool._decoders
    assert pool._replace(before) == [] and pool._decoders == [before]


def test_process_that_can_not_be_replaced_ends_the_training(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with feeder(images, loader_workers=1) as fed:
        monkeypatch.setattr(decode_client, "_start", refuse)
        os.kill(pool_of(fed).pids[0], signal.SIGKILL)
        with pytest.raises(
            DecodeProcessLost, match=r"SIGKILL.*no other one can be started \(.*Cannot allocate memory\)"
        ):
            [*fed.train(1), *fed.train(2)]
