"""What a snapshot copies, what it shares, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from ddptrain.rank.checkpoint.snapshot import (
    HostBuffers,
    from_bytes,
    is_sharded,
    memory_of,
    plain_bytes,
    require_savable,
    unwrapped,
)


class Settings:
    """An object that only loads by executing a pickle."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 1, r"not function \(.*pickle.*lambda"),
        (Settings(), r"not Settings \(Unsupported global: GLOBAL \S+Settings was not an allowed global"),
    ],
)
def test_state_that_needs_a_pickle_is_refused_in_plain_text(value: object, reason: str) -> None:
    with pytest.raises(TypeError, match=reason) as caught:
        HostBuffers().take(torch.nn.Linear(1, 1), None, {"extra": value})
    text = str(caught.value)
    assert text.startswith("'extra' of the checkpoint must load without executing a pickle: ")
    assert "\x1b" not in text and "\n" not in text and "weights_only" not in text
    assert caught.value.__suppress_context__


def test_state_of_a_rank_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="'rank_state' of the checkpoint must load without executing a pickle"):
        plain_bytes({"random": None, "rank_state": Settings()})


class Moving:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.numbers = [1.5]

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "mean": torch.ones(2)}


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, 1j, "text", b"bytes", torch.float16, torch.device("cpu"), torch.Size([2])],
)
def test_what_never_changes_is_not_copied(value: object) -> None:
    assert HostBuffers().plain(value) is value


@pytest.mark.parametrize(
    ("value", "kind"),
    [([1, [2]], list), ((1, (2,)), tuple), ({1, 2}, set), ({"a": {"b": 1}}, dict), (OrderedDict(a=1), OrderedDict)],
)
def test_containers_are_copied_with_their_type(value: Any, kind: type[Any]) -> None:
    copy = HostBuffers().plain(value)
    assert copy == value and copy is not value and type(copy) is kind


def test_numbers_of_numpy_and_objects_with_a_state_become_plain() -> None:
    plain = HostBuffers().plain({"n": np.float32(1.5), "o": Moving()})
    assert plain["n"] == 1.5 and type(plain["n"]) is float and plain["o"]["numbers"] == [1.5]
    assert plain["o"]["mean"].tolist() == [1.0, 1.0]


def test_copies_do_not_follow_the_training_and_memory_is_used_again() -> None:
    buffers, model = HostBuffers(), torch.nn.Linear(2, 2)
    first = buffers.take(model, None, {})
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    assert torch.equal(first.weights["weight"], before) and not first.weights["weight"].requires_grad
    memory = [tensor.data_ptr() for tensor in first.weights.values()]
    second = buffers.take(model, None, {})
    assert [tensor.data_ptr() for tensor in second.weights.values()] == memory
    assert torch.equal(second.weights["weight"], before + 1)
    third = buffers.take(torch.nn.Linear(3, 2).double(), None, {})
    assert third.weights["weight"].shape == (2, 3) and third.weights["weight"].dtype == torch.float64


def test_shared_weight_is_saved_once() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    found = HostBuffers().take(model, None, {})
    assert list(found.weights) == ["a.weight", "a.bias", "b.bias"] and found.tied == {"b.weight": "a.weight"}
    assert "model" not in found.state and found.shards is None and found.state["optimizer"] is None


def test_state_has_the_optimizer_and_what_is_no_tensor() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    found = HostBuffers().take(model, optimizer, {"step": 3})
    assert found.state["step"] == 3 and found.state["optimizer"]["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (lambda base: base, lambda base: base, True),
        (lambda base: base[:2], lambda base: base[2:], False),
        (lambda base: base[:2], lambda base: base[:3], False),
        (lambda base: base, lambda base: base.view(torch.int32), False),
        (lambda base: base.view(2, 2), lambda base: base.view(2, 2).t(), False),
    ],
)
def test_two_tensors_are_the_same_memory_only_as_a_whole(first: Any, second: Any, same: bool) -> None:
    base = torch.arange(4.0)
    assert (memory_of(first(base)) == memory_of(second(base))) is same


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_memory_of_some_tensors_is_unknown(tensor: torch.Tensor) -> None:
    assert memory_of(tensor) is None


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(1, dtype=torch.complex128), "the weight can't be saved: torch.complex128, torch.strided"),
        (torch.eye(2).to_sparse(), "the weight can't be saved: torch.float32, torch.sparse_coo"),
    ],
)
def test_weight_that_no_file_can_hold_is_refused(tensor: torch.Tensor, told: str) -> None:
    with pytest.raises(TypeError) as refused:
        require_savable("the weight", tensor)
    assert str(refused.value) == told
    require_savable("the weight", torch.zeros(1))


def test_state_of_a_rank_comes_back_from_its_bytes() -> None:
    assert from_bytes(plain_bytes({"a": (1, torch.tensor([2.0]))}))["a"][1].tolist() == [2.0]


def test_sparse_tensors_of_the_state_are_copied() -> None:
    sparse = torch.eye(2).to_sparse()
    copy = HostBuffers().plain(sparse)
    assert copy is not sparse and torch.equal(copy.to_dense(), torch.eye(2))


def test_model_of_one_process_is_not_sharded() -> None:
    model = torch.nn.Linear(1, 1)
    assert not is_sharded(model) and unwrapped(model) is model


def test_weight_that_no_file_can_hold_is_refused_with_its_name() -> None:
    model = torch.nn.Identity()
    model.register_buffer("wave", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"the weight 'wave' can't be saved: torch\.complex128"):
        HostBuffers().take(model, None, {})
