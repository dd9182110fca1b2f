"""Checkpoints in shards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddptrain.protocol import events
from ddptrain.protocol.tensor_slices import SlicesError
from ddptrain.rank.agreement import WorkerGroupStore
from ddptrain.rank.checkpoint import files, snapshot
from ddptrain.rank.checkpoint.shards import place_of
from ddptrain.rank.checkpoint.snapshot import HostBuffers, Shards, Snapshot, is_sharded, plain_bytes
from ddptrain.rank.checkpoint.writer import CheckpointWriter, PendingCheckpoint, done_key, state_key
from ddptrain.rank.output import Emitter
from ddptrain.workloads.saved_weights import read_weights
from tests.unit.rank.checkpoint.fake_ranks import CPU, Net, fake_rank, sharded, trained
from tests.unit.rank.stores import Gang
from tests.unit.specs import make_spec

# --- Checkpoints of sharded models: equal weights and optimizer state with any number of ranks ---


def reference() -> tuple[Net, torch.optim.Adam]:
    """The model and the optimizer as they are without sharding."""
    torch.manual_seed(3)
    net = Net()
    return net, trained(net)


def save(folder: Path, ranks: int, **settings: Any) -> None:
    """Write the checkpoint of a model on so many ranks into a folder."""
    for rank in range(ranks):
        with fake_rank(rank, ranks):
            torch.manual_seed(3)
            net = sharded(Net(), **settings)
            copied = HostBuffers().take(net, trained(net), {"step": 1} if rank == 0 else {})
            assert copied.shards is not None
            written = files.write_shards(folder / str(rank), copied.shards, rank)
            for file in written:
                (folder / str(rank) / file.name).rename(folder / file.name)
            if rank == 0:
                files.write_state(folder, copied)


def same_part(value: Any, whole: Tensor) -> bool:
    """Whether a rank has its part of a tensor."""
    if not isinstance(value, DTensor):
        return torch.equal(value, whole)
    size, offset = place_of(value)
    part = whole[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]
    return value.shape == whole.shape and torch.equal(value.to_local(), part)


def assert_equal(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Assert that weights and optimizer are those of the reference."""
    expected, other = reference()
    for name, value in expected.state_dict().items():
        assert same_part(net.state_dict()[name], value), name
    states: Mapping[int, Any] = optimizer.state_dict()["state"]
    assert states.keys() == other.state_dict()["state"].keys()
    for number, values in other.state_dict()["state"].items():
        assert states[number].keys() == values.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(same_part(states[number][key], value) for key, value in values.items())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "ddptrain.names" not in optimizer.param_groups[0]


@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 3), (4, 2), (1, 3), (3, 1), (8, 2)])
def test_checkpoint_is_loaded_exactly_with_any_number_of_ranks(tmp_path: Path, before: int, now: int) -> None:
    save(tmp_path, before)
    for rank in range(now):
        with fake_rank(rank, now):
            net = sharded(Net())
            optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
            state = files.read(tmp_path, net, optimizer, CPU)
            assert state["step"] == 1
            assert_equal(net, optimizer)
            assert net.tail.weight is net.head.weight


def test_ranks_of_a_hybrid_mesh_with_the_same_slices_save_them_once(tmp_path: Path) -> None:
    save(tmp_path, 4, strategy="hybrid", hosts=2, ranks_on_host=2)
    assert sorted(path.name for path in tmp_path.glob("model.*")) == [
        "model.rank-0.safetensors",
        "model.rank-1.safetensors",
    ]
    with fake_rank(2, 3):
        net = sharded(Net())
        optimizer = torch.optim.Adam(net.parameters())
        files.read(tmp_path, net, optimizer, CPU)
        assert_equal(net, optimizer)


def test_model_that_is_not_sharded_loads_the_slices_of_all_ranks(tmp_path: Path) -> None:
    save(tmp_path, 3)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    files.read(tmp_path, net, optimizer, CPU)
    assert not is_sharded(net)
    assert_equal(net, optimizer)
    weights = read_weights(tmp_path)
    assert torch.equal(weights["tail.weight"], weights["head.weight"])


def test_sharded_model_loads_the_checkpoint_of_one_that_is_not(tmp_path: Path) -> None:
    files.write(tmp_path / "whole", HostBuffers().take(*reference(), {"step": 1}))
    with fake_rank(1, 2):
        net = sharded(Net())
        optimizer = torch.optim.Adam(net.parameters())
        files.read(tmp_path / "whole", net, optimizer, CPU)
        assert_equal(net, optimizer)


def test_snapshot_is_a_copy() -> None:
    with fake_rank(0, 2):
        net = sharded(Net())
        copied = HostBuffers().take(net, None, {})
        assert copied.shards is not None
        before = copied.shards.model["head.weight"].clone()
        with torch.no_grad():
            net.head.weight.zero_()
        assert torch.equal(copied.shards.model["head.weight"], before)


def test_model_is_saved_and_loaded_as_sharded_after_an_evaluation(tmp_path: Path) -> None:
    """FSDP keeps the weights whole after a forward pass without gradients."""
    with fake_rank(0, 1):
        torch.manual_seed(3)
        net = sharded(Net())
        optimizer = trained(net)
        with torch.no_grad():
            net(torch.ones(1, 5))
        copied = HostBuffers().take(net, optimizer, {"step": 1})
        assert copied.shards is not None and len(copied.shards.model) == len(net.state_dict()) - 1
        files.write_shards(tmp_path / "saved", copied.shards, 0)
        files.write_state(tmp_path / "saved", copied)
        with torch.no_grad():
            net(torch.ones(1, 5))
            for parameter in net.parameters():
                parameter.zero_()
        files.read(tmp_path / "saved", net, optimizer, CPU)
        assert_equal(net, optimizer)


def test_weights_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with fake_rank(0, 2):
        net = Net(6)
        net.extra = nn.Linear(1, 1)
        with pytest.raises(RuntimeError, match=r"missing: extra\.bias.*has the shape \[7, 5\] in the checkpoint"):
            files.read(tmp_path, sharded(net), None, CPU)


def test_missing_file_of_a_rank_is_an_error_and_no_part_of_a_model(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "optimizer.rank-1.safetensors").unlink()
    with fake_rank(0, 2):
        net = sharded(Net())
        with pytest.raises(SlicesError, match=r"values of .* are in the files of the ranks"):
            files.read(tmp_path, net, torch.optim.Adam(net.parameters()), CPU)


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with fake_rank(0, 2):
        net = sharded(Net())
        few = torch.optim.Adam(net.head.parameters())
        with pytest.raises(RuntimeError, match="has other parameters"):
            files.read(tmp_path, net, few, CPU)
        groups = [{"params": [each]} for each in net.parameters()]
        with pytest.raises(RuntimeError, match=r"has other parameters|1 parameter groups, this one 10"):
            files.read(tmp_path, net, torch.optim.Adam(groups), CPU)


def test_optimizer_from_before_the_model_was_sharded_is_refused() -> None:
    with fake_rank(0, 2):
        net = Net()
        early = torch.optim.Adam(net.parameters())
        with pytest.raises(TypeError, match=r"create the optimizer after ctx\.prepare"):
            HostBuffers().take(sharded(net), early, {})


def test_optimizer_state_of_another_shape_than_its_weight_is_refused() -> None:
    with fake_rank(0, 2):
        net = sharded(Net())
        optimizer = torch.optim.SGD(net.parameters())
        optimizer.state[net.head.weight]["rows"] = torch.ones(5)
        with pytest.raises(TypeError, match=r"the optimizer's rows of 'head\.weight' can't be saved"):
            HostBuffers().take(net, optimizer, {})


def test_no_file_is_written_for_a_rank_without_slices(tmp_path: Path) -> None:
    with fake_rank(0, 2):
        shards = HostBuffers().take(sharded(Net()), None, {}).shards
    assert shards is not None
    empty = dataclasses.replace(shards, model={}, model_places={})
    assert files.write_shards(tmp_path / "1", empty, 1) == ()
    assert [file.name for file in files.write_shards(tmp_path / "0", empty, 0)] == ["model.rank-0.safetensors"]


# --- Ranks write the slices of a sharded model: the driver is told once all have done so, or not at all ---


class ShardedRank:
    """The writer of one of two ranks; each has one row of a weight."""

    def __init__(self, gang: Gang, folder: Path, rank: int, **changes: Any) -> None:
        self.rank, self.folder = rank, folder / str(rank)
        self.folder.mkdir()
        self.file = (self.folder / "events").open("ab", buffering=0)
        spec = gang.spec(rank, 2, staging=str(self.folder), **changes)
        self.store = WorkerGroupStore(spec)
        self.writer = CheckpointWriter(spec, Emitter(self.file.fileno()), self.store)

    def start(self, number: int = 1) -> None:
        row = torch.full((1, 3), float(self.rank))
        shards = Shards({"w": row}, {"w": ((2, 3), (self.rank, 0))}, {}, {}, {}, {}, None)
        snapshot = Snapshot({}, {}, {"step": number, "extra": {}, "optimizer": None}, shards)
        own = plain_bytes({"rank": self.rank})
        self.writer.start(PendingCheckpoint(number, number, None, self.staging(number), snapshot, own))

    def staging(self, number: int = 1) -> Path:
        return self.folder / f"checkpoint-{number}"

    def events(self) -> list[events.Event]:
        return [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[ShardedRank, ShardedRank]]:
    gang = Gang()
    made = ShardedRank(gang, tmp_path, 0), ShardedRank(gang, tmp_path, 1)
    yield made
    for rank in made:
        rank.file.close()


def test_rank_zero_tells_the_driver_when_the_files_of_all_ranks_are_there(
    ranks: tuple[ShardedRank, ShardedRank], tmp_path: Path
) -> None:
    first, second = ranks
    first.start()
    assert not first.writer.wait(0.3)
    assert first.events() == []
    second.start()
    assert second.writer.wait(20) and first.writer.wait(20)
    (saved,) = first.events()
    assert isinstance(saved, events.CheckpointSaved)
    assert [file.name for file in saved.files] == ["model.rank-0.safetensors", "state.pt"]
    (part,) = saved.parts
    assert (part.rank, part.staging, [file.name for file in part.files]) == (
        1,
        "checkpoint-1",
        ["model.rank-1.safetensors"],
    )
    assert second.events() == []
    together = tmp_path / "together"
    together.mkdir()
    for rank in ranks:
        for path in rank.staging().iterdir():
            path.rename(together / path.name)
    assert torch.equal(read_weights(together)["w"], torch.tensor([[0.0] * 3, [1.0] * 3]))
    assert files.read_state(together)["ranks"] == [{"rank": 0}, {"rank": 1}]


def test_nothing_is_saved_without_the_slices_of_a_rank(ranks: tuple[ShardedRank, ShardedRank]) -> None:
    first, second = ranks
    second.store.set(done_key(1), "")
    first.start()
    assert first.writer.wait(20)
    (note,) = first.events()
    assert isinstance(note, events.Note)
    assert note.message == (
        "rank 1 did not call ctx.checkpoint for step 1: no checkpoint of the sharded model is saved; "
        "all ranks must call it"
    )
    assert not first.staging().exists()


def test_rank_that_dies_while_it_writes_leaves_no_checkpoint(ranks: tuple[ShardedRank, ShardedRank]) -> None:
    first, _ = ranks
    first.start()
    assert not first.writer.wait(0.2)
    assert first.writer.wait(20, hurry=True)  # as when the worker group is stopped
    assert first.events() == []
    assert not first.staging().exists()


# --- What rank 0 does about the states of other ranks: gathered, late, missing, or in a hurry ---


class Group:
    """Rank 0 of two, and the store through which rank 1 leaves its state."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        worker_group = Gang()
        self.worker_group, self.folder = worker_group, folder
        self.file = (folder / "events").open("ab", buffering=0)
        spec = worker_group.spec(0, 2, staging=str(folder), **changes)
        self.store, self.other = WorkerGroupStore(spec), WorkerGroupStore(worker_group.spec(1, 2))
        self.saver = CheckpointWriter(spec, Emitter(self.file.fileno()), self.store)

    def start(self, number: int) -> None:
        folder = self.folder / f"checkpoint-{number}"
        own = plain_bytes({"rank": 0})
        self.saver.start(
            PendingCheckpoint(number, 10 * number, None, folder, Snapshot({}, {}, {"step": 10 * number}), own)
        )

    def states(self, number: int) -> Any:
        """The states of all ranks in a checkpoint."""
        return files.read_state(self.folder / f"checkpoint-{number}")["ranks"]

    def events(self) -> list[events.Event]:
        told = [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]
        return [event for event in told if not isinstance(event, events.Timed)]  # they depend on the machine's speed


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.file.close()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Group]:
    """A group whose ranks wait for each other for 0.2 s."""
    made = Group(tmp_path, timeout_s=0.2)
    yield made
    made.file.close()


def test_state_of_each_rank_is_in_the_checkpoint_and_its_key_is_deleted(group: Group) -> None:
    for number in (1, 2):
        group.other.set(state_key(number, 1), plain_bytes({"rank": 1, "number": number}))
        group.start(number)
        assert group.saver.wait(60)
        assert group.states(number) == [{"rank": 0}, {"rank": 1, "number": number}]
        assert not group.store.has(state_key(number, 1)), "the store would keep every state of the run"
    assert [type(event) for event in group.events()] == [events.CheckpointSaved, events.CheckpointSaved]


def test_late_rank_does_not_drop_the_checkpoint_and_is_named_once(impatient: Group) -> None:
    for number in (1, 2):
        impatient.start(number)
        assert impatient.saver.wait(60)
        assert impatient.states(number) == [{"rank": 0}, None]
    note, first, second = impatient.events()
    assert isinstance(note, events.Note) and note.level == "warning"
    assert note.message.startswith("rank 1 did not call ctx.checkpoint for step 10: its random state is not saved")
    assert isinstance(first, events.CheckpointSaved) and isinstance(second, events.CheckpointSaved)
    assert (first.step, second.step) == (10, 20)


def test_rank_that_is_done_is_not_waited_for_but_its_last_state_counts(group: Group) -> None:
    group.other.set(state_key(1, 1), plain_bytes({"rank": "last"}))
    group.other.set(done_key(1), "")
    for number in (1, 2):
        began = time.monotonic()
        group.start(number)
        assert group.saver.wait(60)
        assert time.monotonic() - began < 10, "the time limit of the group is 20 s"
    assert (group.states(1), group.states(2)) == ([{"rank": 0}, {"rank": "last"}], [{"rank": 0}, None])


def test_wait_reports_that_a_checkpoint_is_still_being_written(group: Group) -> None:
    group.start(1)
    assert not group.saver.wait(0.05)
    group.other.set(state_key(1, 1), snapshot.plain_bytes({}))
    assert group.saver.wait(60)


# --- without a group ---


class Told:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def test_error_of_a_checkpoint_is_raised_once() -> None:
    writer = CheckpointWriter(make_spec(), None, None)  # type: ignore[arg-type]
    assert writer.wait()
    writer.error = RuntimeError("store")
    with pytest.raises(RuntimeError, match="store"):
        writer.wait()
    assert writer.wait()
