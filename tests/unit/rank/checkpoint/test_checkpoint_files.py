"""Files of a checkpoint, which never hold programs."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddptrain.protocol.tensor_slices import MODEL, OPTIMIZER, shard_file
from ddptrain.rank.checkpoint import files
from ddptrain.rank.checkpoint.files import read_state
from ddptrain.rank.checkpoint.snapshot import HostBuffers, Shards, Snapshot, from_bytes
from ddptrain.rank.checkpoint.weights import load_checkpoint
from ddptrain.workloads.images.evaluate_checkpoint import _known_classes

# --- The bytes of a checkpoint's files, and which tensors are in which file ---


MIB = 1 << 20
CPU = torch.device("cpu")


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 700)  # its momentum is larger than 1 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 700)).sum().backward()
    optimizer.step()
    snapshot = HostBuffers().take(model, optimizer, {"step": 3, "extra": {"x": torch.arange(3)}})
    staged = files.write(tmp_path / "c", snapshot, [b"zero", b"one"])
    assert [file.name for file in staged] == ["model.safetensors", "tensors.safetensors", "state.pt"]
    again = torch.nn.Linear(700, 700)
    other = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
    state = files.read(tmp_path / "c", again, other, CPU)
    assert (state["step"], state["ranks"]) == (3, [b"zero", b"one"]) and state["extra"]["x"].tolist() == [0, 1, 2]
    assert torch.equal(again.weight, model.weight) and other.param_groups[0]["lr"] == 0.1
    buffers = [
        each.state[first]["momentum_buffer"] for each, first in ((optimizer, model.weight), (other, again.weight))
    ]
    assert torch.equal(*buffers) and "model" not in state
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "c", snapshot)


def test_checkpoint_without_large_tensors_has_no_file_for_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    snapshot = HostBuffers().take(model, None, {})
    assert [file.name for file in files.write(tmp_path / "c", snapshot)] == ["model.safetensors", "state.pt"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = files.read(tmp_path / "c", model, optimizer, CPU)
    assert (state["optimizer"], state["ranks"]) == (None, None) and optimizer.param_groups[0]["lr"] == 0.5
    assert files.read(tmp_path / "c", model, None, CPU).keys() == {"optimizer", "ranks"}


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    files.write(tmp_path / "c", HostBuffers().take(torch.nn.Linear(2, 1), None, {}))
    with pytest.raises(RuntimeError, match=r"Missing key.*\n?.*Unexpected key"):
        files.read(tmp_path / "c", torch.nn.Sequential(torch.nn.Linear(2, 1)), None, CPU)


class Counting(torch.nn.Linear):
    """A module with extra state, which is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_of_modules_comes_back(tmp_path: Path) -> None:
    model, again = Counting(2, 1), Counting(2, 1)
    model.count = 7
    files.write(tmp_path / "c", HostBuffers().take(model, None, {}))
    files.read(tmp_path / "c", again, None, CPU)
    assert again.count == 7 and torch.equal(again.weight, model.weight)


@pytest.mark.parametrize(
    ("rank", "model", "optimizer", "kinds"),
    [
        (0, {"w": torch.ones(2)}, {"w/m": torch.ones(2)}, [MODEL, OPTIMIZER]),
        (1, {"w": torch.ones(2)}, {}, [MODEL]),
        (1, {}, {"w/m": torch.ones(2)}, [OPTIMIZER]),
        (0, {}, {}, [MODEL]),  # it has the names of all weights
        (1, {}, {}, []),
    ],
)
def test_rank_writes_its_slices(
    tmp_path: Path, rank: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], kinds: list[str]
) -> None:
    places = dict.fromkeys((*model, *optimizer), ((4,), (2,)))
    model_places, optimizer_places = ({name: places[name] for name in part} for part in (model, optimizer))
    shards = Shards(model, model_places, optimizer, optimizer_places, {"v": "w"}, {}, None)
    staged = files.write_shards(tmp_path / "c", shards, rank)
    assert [file.name for file in staged] == [shard_file(kind, rank) for kind in kinds]
    for kind, file in zip(kinds, staged, strict=True):
        header, _ = header_of((tmp_path / "c" / file.name).read_bytes())
        told = json.dumps(header.get("__metadata__", {}))
        assert header.keys() - {"__metadata__"} == (model if kind == MODEL else optimizer).keys()
        assert ('\\"v\\"' in told or '"v"' in told) == (kind == MODEL)


def test_snapshot_without_shards_says_so() -> None:
    assert Snapshot({}, {}, {}).shards is None


# --- No reader of a checkpoint executes what is in it: whoever can write a checkpoint must not run programs ---


class Program:
    """Makes a folder when it is loaded by executing the pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "read",
    [
        read_state,
        lambda folder: from_bytes((folder / "state.pt").read_bytes()),
        lambda folder: load_checkpoint(folder, "images", lambda config: torch.nn.Linear(1, 1)),
        lambda folder: _known_classes({"a": folder}),
    ],
)
def test_program_in_a_checkpoint_is_not_executed(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    file = io.BytesIO()
    torch.save({"extra": Program(tmp_path / "executed")}, file)
    (tmp_path / "state.pt").write_bytes(file.getvalue())
    with contextlib.suppress(Exception):  # each reader has an error of its own, or none
        read(tmp_path)
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / "state.pt", weights_only=False)  # what readers must not do
    assert (tmp_path / "executed").exists()
