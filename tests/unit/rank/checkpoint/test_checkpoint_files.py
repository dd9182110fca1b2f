"""The bytes of a checkpoint's files, and which tensors are in which file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddptrain.protocol.tensor_slices import MODEL, OPTIMIZER, shard_file
from ddptrain.rank.checkpoint import file_format
from ddptrain.rank.checkpoint.snapshot import HostBuffers, Shards, Snapshot

MIB = 1 << 20
CPU = torch.device("cpu")


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_file_of_tensors_has_wide_types_first_and_no_gaps() -> None:
    tensors = {
        "b": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "d": torch.tensor([[1.0], [2.0]], dtype=torch.float32),
        "c": torch.tensor(5, dtype=torch.int64),
        "a": torch.tensor([7.0], dtype=torch.float32),
    }
    data = b"".join(file_format._safetensors(tensors, {"tied": "a"}))
    header, body = header_of(data)
    assert header.pop("__metadata__") == {"tied": "a"}
    assert header == {
        "c": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        "d": {"dtype": "F32", "shape": [2, 1], "data_offsets": [12, 20]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [20, 23]},
    }
    assert list(header) == ["c", "a", "d", "b"] and len(body) == 23
    assert body[:8] == (5).to_bytes(8, "little") and body[20:] == b"\x01\x02\x03"
    assert "__metadata__" not in header_of(b"".join(file_format._safetensors({}, {})))[0]


@pytest.mark.parametrize(
    ("tensor", "aside"),
    [
        (torch.zeros(MIB, dtype=torch.uint8), True),
        (torch.zeros(MIB // 4, dtype=torch.float32), True),
        (torch.zeros(MIB - 1, dtype=torch.uint8), False),
        (torch.zeros(MIB // 4 - 1, dtype=torch.float32), False),
        (torch.zeros(MIB // 8, dtype=torch.complex128), False),  # no type of safetensors
        (torch.zeros(1024, 1024).to_sparse(), False),
    ],
)
def test_large_tensors_of_the_state_have_a_file_of_their_own(tensor: Tensor, aside: bool) -> None:
    large: dict[str, Tensor] = {"0": torch.zeros(1)}
    told = file_format._refer_if_large(tensor, large)
    assert (told == {"ddptrain.tensor": "1"} and large["1"] is tensor) if aside else told is tensor
    assert len(large) == (2 if aside else 1)
    if aside:
        assert file_format._resolved(told, large) is tensor
        assert file_format._resolved({**told, "more": 1}, large) == {**told, "more": 1}


def test_each_container_is_searched_and_keeps_its_type() -> None:
    given = {"a": [1, (2, "x")], "b": {3}, 4: {"c": 5}}
    assert file_format._map(given, int, lambda number: 10 * number) == {"a": [10, (20, "x")], "b": {30}, 4: {"c": 50}}
    seen: list[Any] = []

    def count(item: dict[str, Any]) -> int:
        seen.append(dict(item))
        return len(seen)

    file_format._map({"a": {"b": {}}}, dict, count)
    assert seen == [{}, {"b": 1}, {"a": 2}], "items before their container"


@pytest.mark.parametrize("size", [0, 1, 4 * MIB, 4 * MIB + 1, 9 * MIB])
def test_file_has_all_bytes_and_their_hash(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    pieces = [memoryview(b"head"), memoryview(data)]
    staged = file_format._write_file(tmp_path / "f", pieces)
    written = (tmp_path / "f").read_bytes()
    assert written == b"head" + data
    assert (staged.name, staged.size_bytes, staged.sha256) == ("f", size + 4, hashlib.sha256(written).hexdigest())
    assert (tmp_path / "f").stat().st_mode & 0o022 == 0
    with pytest.raises(FileExistsError):
        file_format._write_file(tmp_path / "f", pieces)


def test_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 700)  # its momentum is larger than 1 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 700)).sum().backward()
    optimizer.step()
    snapshot = HostBuffers().take(model, optimizer, {"step": 3, "extra": {"x": torch.arange(3)}})
    staged = file_format.write(tmp_path / "c", snapshot, [b"zero", b"one"])
    assert [file.name for file in staged] == ["model.safetensors", "tensors.safetensors", "state.pt"]
    again = torch.nn.Linear(700, 700)
    other = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
    state = file_format.read(tmp_path / "c", again, other, CPU)
    assert (state["step"], state["ranks"]) == (3, [b"zero", b"one"]) and state["extra"]["x"].tolist() == [0, 1, 2]
    assert torch.equal(again.weight, model.weight) and other.param_groups[0]["lr"] == 0.1
    buffers = [
        each.state[first]["momentum_buffer"] for each, first in ((optimizer, model.weight), (other, again.weight))
    ]
    assert torch.equal(*buffers) and "model" not in state
    with pytest.raises(FileExistsError):
        file_format.write(tmp_path / "c", snapshot)


def test_checkpoint_without_large_tensors_has_no_file_for_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    snapshot = HostBuffers().take(model, None, {})
    assert [file.name for file in file_format.write(tmp_path / "c", snapshot)] == ["model.safetensors", "state.pt"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = file_format.read(tmp_path / "c", model, optimizer, CPU)
    assert (state["optimizer"], state["ranks"]) == (None, None) and optimizer.param_groups[0]["lr"] == 0.5
    assert file_format.read(tmp_path / "c", model, None, CPU).keys() == {"optimizer", "ranks"}


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file_format.write(tmp_path / "c", HostBuffers().take(torch.nn.Linear(2, 1), None, {}))
    with pytest.raises(RuntimeError, match=r"Missing key.*\n?.*Unexpected key"):
        file_format.read(tmp_path / "c", torch.nn.Sequential(torch.nn.Linear(2, 1)), None, CPU)


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
    file_format.write(tmp_path / "c", HostBuffers().take(model, None, {}))
    file_format.read(tmp_path / "c", again, None, CPU)
    assert again.count == 7 and torch.equal(again.weight, model.weight)


@pytest.mark.parametrize(
    ("rank", "model", "optimizer", "files"),
    [
        (0, {"w": torch.ones(2)}, {"w/m": torch.ones(2)}, [MODEL, OPTIMIZER]),
        (1, {"w": torch.ones(2)}, {}, [MODEL]),
        (1, {}, {"w/m": torch.ones(2)}, [OPTIMIZER]),
        (0, {}, {}, [MODEL]),  # it has the names of all weights
        (1, {}, {}, []),
    ],
)
def test_rank_writes_its_slices(
    tmp_path: Path, rank: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], files: list[str]
) -> None:
    places = dict.fromkeys((*model, *optimizer), ((4,), (2,)))
    model_places, optimizer_places = ({name: places[name] for name in part} for part in (model, optimizer))
    shards = Shards(model, model_places, optimizer, optimizer_places, {"v": "w"}, {}, None)
    staged = file_format.write_shards(tmp_path / "c", shards, rank)
    assert [file.name for file in staged] == [shard_file(kind, rank) for kind in files]
    for kind, file in zip(files, staged, strict=True):
        header, _ = header_of((tmp_path / "c" / file.name).read_bytes())
        told = json.dumps(header.get("__metadata__", {}))
        assert header.keys() - {"__metadata__"} == (model if kind == MODEL else optimizer).keys()
        assert ('\\"v\\"' in told or '"v"' in told) == (kind == MODEL)


def test_snapshot_without_shards_says_so() -> None:
    assert Snapshot({}, {}, {}).shards is None
