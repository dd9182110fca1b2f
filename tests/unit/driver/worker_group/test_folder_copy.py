"""The pieces in which the files of a folder are sent to a worker."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.worker_group import folder_copy
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.errors import ClusterError
from ddptrain.file_ops import sha256
from ddptrain.worker import driver_calls


class Hosts:
    """A client whose workers have real folders: a scratch folder each, or one for all workers of a host."""

    def __init__(self, root: Path, scratch: dict[str, str], sees_driver: set[str]) -> None:
        self.root, self.scratch, self.sees_driver = root, scratch, sees_driver
        self.copied: list[str] = []

    def run(self, function: Any, *call: Any, workers: list[str], on_error: str = "raise") -> dict[str, Any]:
        return {worker: self._answer(function.__name__, worker, *call) for worker in workers}

    def _answer(self, name: str, worker: str, *call: Any) -> Any:
        own = self.root / self.scratch[worker]
        if name == "holds_file":
            path, text = call
            visible = Path(path).is_relative_to(own) or worker in self.sees_driver
            return visible and Path(path).exists() and Path(path).read_text() == text
        _, path, _, data = call
        self.copied.append(worker)
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_bytes(data)
        return str(own / path)


def test_a_host_gets_one_copy_for_all_workers_that_see_it(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "manifest").write_text("text")
    scratch = {"a1": "a", "a2": "a", "b1": "b1", "b2": "b2", "here": "here"}  # the workers of b are containers
    client: Any = Hosts(tmp_path, scratch, {"here"})
    client.scheduler = SimpleNamespace(address="tcp://s:1")
    group = WorkerGroup(client, "r", queue.SimpleQueue())
    places = []
    for rank, worker in enumerate(["a1", "a2", "b1", "b2", "here", "a1"]):
        slot = Slot(worker, worker[0], 0, False, True)
        places.append(RankPlace(rank, 0, 1, 0, slot, "h", tmp_path, shared=False))
    found = group.place(places, folder, ["manifest"], "manifest", "the checkpoint")
    assert sorted(client.copied) == ["a1", "b1", "b2"] and found[4] == str(folder)
    assert found[0] == found[1] == found[5] and len({*found}) == 4
    client.run = lambda *_, **__: (_ for _ in ()).throw(OSError("cut"))
    with pytest.raises(ClusterError, match=f"could not copy the checkpoint {folder} to the workers: cut"):
        group.place(places, folder, ["manifest"], "manifest", "the checkpoint")


class Client:
    """A client whose worker writes below /scratch."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.lost: dict[str, Exception] = {}

    def run(self, *call: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        self.sent.append((*call, workers))
        return {worker: self.lost.get(worker, f"/scratch/{call[2]}") for worker in workers}


def test_each_file_is_sent_in_pieces_and_an_empty_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_copy, "READ_LIMIT_BYTES", 4)
    contents = {"empty": b"", "short": b"abc", "whole": b"abcd", "long": b"abcdefghi"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    client: Any = Client()
    copy = f"brought-{sha256(str(tmp_path).encode()).hexdigest()[:8]}-{tmp_path.name}"
    assert folder_copy.copy_folder(client, "r", ["w"], tmp_path, list(contents)) == {"w": f"/scratch/{copy}"}
    expected = [("empty", 0, b""), ("short", 0, b"abc"), ("whole", 0, b"abcd")]
    expected += [("long", 0, b"abcd"), ("long", 4, b"efgh"), ("long", 8, b"i")]
    assert client.sent == [
        (driver_calls.write_spool, "r", f"{copy}/{name}", offset, data, ["w"]) for name, offset, data in expected
    ]


def test_folders_of_the_same_name_have_copies_of_their_own(tmp_path: Path) -> None:
    copies = []
    for parent in ("a", "b"):
        folder = tmp_path / parent / "step-1"
        folder.mkdir(parents=True)
        (folder / "f").write_bytes(b"x")
        client: Any = Client()
        copies.append(folder_copy.copy_folder(client, "r", ["w"], folder, ["f"])["w"])
    assert copies[0] != copies[1] and all(copy.endswith("-step-1") for copy in copies)


def test_worker_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    client: Any = Client()
    client.lost["b"] = OSError("no space left")
    with pytest.raises(ClusterError, match="b: no space left"):
        folder_copy.copy_folder(client, "r", ["a", "b"], tmp_path, ["f"])
