"""Checkpoints in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddptrain.protocol.tensor_slices import SlicesError
from ddptrain.rank.checkpoint import files
from ddptrain.rank.checkpoint.shards import place_of
from ddptrain.rank.checkpoint.snapshot import HostBuffers, is_sharded
from ddptrain.rank.checkpoint.weights import read_weights
from tests.unit.rank.ranks import CPU, Gang, MakeRank, Net, Rank, fake_rank, make_rank, sharded, trained

__all__ = ["make_rank"]

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
            written = files.write(folder / str(rank), copied, rank)
            for file in written:
                (folder / str(rank) / file.name).rename(folder / file.name)
            if rank == 0:
                files.write_state(folder, copied.state)


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


@pytest.mark.parametrize(("before", "now"), [(2, 3), (4, 2), (1, 3), (3, 1)])
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
    copied = HostBuffers().take(*reference(), {"step": 1})
    files.write(tmp_path / "whole", copied)
    files.write_state(tmp_path / "whole", copied.state)
    with fake_rank(1, 2):
        net = sharded(Net())
        optimizer = torch.optim.Adam(net.parameters())
        files.read(tmp_path / "whole", net, optimizer, CPU)
        assert_equal(net, optimizer)


def test_model_is_saved_and_loaded_as_sharded_after_an_evaluation(tmp_path: Path) -> None:
    """FSDP keeps the weights whole after a forward pass without gradients."""
    with fake_rank(0, 1):
        torch.manual_seed(3)
        net = sharded(Net())
        optimizer = trained(net)
        with torch.no_grad():
            net(torch.ones(1, 5))
        copied = HostBuffers().take(net, optimizer, {"step": 1})
        assert len(copied.weights) == len(net.state_dict()) - 1
        files.write(tmp_path / "saved", copied, 0)
        files.write_state(tmp_path / "saved", copied.state)
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
        with pytest.raises(
            RuntimeError, match=r'(?s)Missing key.*"extra.bias".*shape torch.Size\(\[7, 5\]\) from checkpoint'
        ):
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
        with pytest.raises(RuntimeError, match="other parameters or groups"):
            files.read(tmp_path, net, few, CPU)
        groups = [{"params": [each]} for each in net.parameters()]
        with pytest.raises(RuntimeError, match="other parameters or groups"):
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
        with pytest.raises(TypeError, match=r"the optimizer's 'head\.weight/rows' can't be saved"):
            HostBuffers().take(net, optimizer, {})


# --- Ranks write the slices of a sharded model: the driver gets the event once all have done so, or not at all ---


@pytest.fixture
def ranks(make_rank: MakeRank) -> Iterator[list[Rank]]:
    """Two ranks with a store; their process groups exchange nothing."""
    worker_group = Gang()
    yield [make_rank(worker_group.spec(number, 2)) for number in range(2)]  # noqa: PT022  # the store must stay


def checkpoint(rank: Rank) -> None:
    with fake_rank(rank.context.rank, 2):
        torch.manual_seed(3)
        net = sharded(Net())
        assert rank.context.checkpoint(model=net, optimizer=trained(net), step=1, rank_state=rank.context.rank)


def test_rank_0_announces_the_checkpoint_when_the_files_of_all_ranks_exist(ranks: list[Rank], tmp_path: Path) -> None:
    checkpoint(ranks[0])
    assert not ranks[0].context.close(0.3)
    checkpoint(ranks[1])
    assert ranks[1].events() == []
    (saved,) = ranks[0].events()
    assert {file.name for file in saved.files} > {"model.rank-0.safetensors", "state.pt"}
    (part,) = saved.parts
    assert (part.rank, part.staging) == (1, "checkpoint-0")
    assert [file.name for file in part.files] == ["model.rank-1.safetensors", "optimizer.rank-1.safetensors"]
    together = tmp_path / "together"
    together.mkdir()
    for rank in ranks:
        for path in (rank.folder / "staging" / "checkpoint-0").iterdir():
            path.rename(together / path.name)
    net, _ = reference()
    weights = read_weights(together)
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert [state["rank_state"] for state in files.read_state(together)["ranks"]] == [0, 1]


def test_nothing_is_saved_without_the_slices_of_a_rank(ranks: list[Rank]) -> None:
    checkpoint(ranks[0])
    ranks[1].context.close()
    (note,) = ranks[0].events()
    assert note.message == (
        "rank 1 did not call ctx.checkpoint for step 1: no checkpoint of the sharded model is saved; "
        "all ranks must call it"
    )
    assert list((ranks[0].folder / "staging").iterdir()) == []


def test_rank_that_dies_while_it_writes_leaves_no_checkpoint(ranks: list[Rank]) -> None:
    checkpoint(ranks[0])
    assert not ranks[0].context.close(0.2)
    assert ranks[0].context.close(10, failed=True)  # as when the worker group is stopped
    assert ranks[0].events() == [] and list((ranks[0].folder / "staging").iterdir()) == []
