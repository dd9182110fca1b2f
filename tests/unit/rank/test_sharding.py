"""Which layers are sharded, with which precision, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddptrain.rank.prepare import checkpoint_activations, layers_of, prepare_model, repeated_blocks
from tests.unit.rank.ranks import CPU, Net, fake_rank


def sharded_layers(net: nn.Module) -> list[str]:
    return [name for name, layer in net.named_modules() if isinstance(layer, FSDPModule)]


def test_blocks_of_the_outermost_module_lists_are_sharded_and_the_model_itself() -> None:
    net = Net()
    net.blocks[0].experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    net.one = nn.ModuleList([nn.Linear(1, 1)])
    assert repeated_blocks(net) == list(net.blocks)
    with fake_rank(0, 2):
        ready = prepare_model(net, CPU, {"strategy": "fsdp"})
        assert sharded_layers(ready) == ["", "blocks.0", "blocks.1"]
        assert ready.state_dict().keys() == net.state_dict().keys()


def test_classes_of_layers_to_shard_can_be_named() -> None:
    with fake_rank(0, 2):
        ready = prepare_model(Net(), CPU, {"strategy": "fsdp", "shard": ["Linear"]})
        assert len(sharded_layers(ready)) == 1 + 4 + 2


def test_one_rank_trains_as_without_sharding() -> None:
    x = torch.arange(10.0).reshape(2, 5)
    torch.manual_seed(0)
    plain = Net()
    plain(x).pow(2).mean().backward()
    with fake_rank(0, 1):
        torch.manual_seed(0)
        ready = prepare_model(Net(), CPU, {"strategy": "fsdp", "activation_checkpointing": ["Block"]})
        ready(x).pow(2).mean().backward()
        for name, parameter in plain.named_parameters():
            found: Any = ready.get_parameter(name).grad
            expected: Any = parameter.grad
            assert torch.allclose(found.to_local(), expected), name


def test_bf16_computes_in_bf16_and_keeps_weights_gradients_and_output_in_fp32() -> None:
    seen: list[torch.dtype] = []
    with fake_rank(0, 1):
        ready: Any = prepare_model(Net(), CPU, {"strategy": "fsdp", "precision": "bf16"})
        ready.blocks[0].up.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
        output = ready(torch.ones(2, 5))
        output.sum().backward()
        assert (seen, output.dtype) == ([torch.bfloat16], torch.float32)
        assert {each.dtype for each in ready.parameters()} == {torch.float32}
        assert {each.grad.dtype for each in ready.parameters()} == {torch.float32}


def test_layers_are_computed_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    net = Net()
    block, forward = net.blocks[0], net.blocks[0].forward

    def counted(x: torch.Tensor) -> Any:
        calls.append(1)
        return forward(x)

    monkeypatch.setattr(block, "forward", counted)
    checkpoint_activations(net, ["Block"])
    output = net(torch.ones(1, 5))
    assert len(calls) == 1
    output.sum().backward()
    assert len(calls) == 2


def test_unknown_class_is_refused_with_the_classes_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"prepare\.shard: the model has no layer of class 'Blok'; it has Block, Lin"):
        layers_of(Net(), ["Block", "Blok"], "shard")


def test_unknown_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="precision is 'fp8': choose one of fp32, bf16, fp16"):
        prepare_model(Net(), CPU, {"precision": "fp8"})
    with pytest.raises(ValueError, match="precision fp16 needs strategy ddp"):
        prepare_model(Net(), CPU, {"strategy": "fsdp", "precision": "fp16"})
    with pytest.raises(ValueError, match="strategy is 'zero': choose one of ddp, fsdp, hybrid"):
        prepare_model(Net(), CPU, {"strategy": "zero"})
    with pytest.raises(TypeError, match=r"'bukket' is an argument neither of ctx\.prepare"):
        prepare_model(Net(), CPU, {"strategy": "fsdp"}, bukket=1)


def test_hybrid_divides_the_model_among_the_ranks_of_a_host() -> None:
    with fake_rank(3, 6):
        ready: Any = prepare_model(Net(6), CPU, {"strategy": "hybrid", "hosts": 2, "ranks_on_host": 3})
        weight = ready.head.weight
        assert (weight.device_mesh.shape, weight.to_local().shape) == ((2, 3), (2, 6))
        assert [str(each) for each in weight.placements] == ["R", "S(0)"]


def test_hybrid_refuses_hosts_with_different_numbers_of_ranks() -> None:
    with fake_rank(0, 3), pytest.raises(ValueError, match="of 3 ranks on 2 hosts 2 are on this host"):
        prepare_model(Net(), CPU, {"strategy": "hybrid", "hosts": 2, "ranks_on_host": 2})


def test_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(8, 8)
    with fake_rank(0, 1), pytest.raises(ValueError, match="is on the meta device, without weights: create it on the"):
        prepare_model(net, CPU, {"strategy": "fsdp"})
