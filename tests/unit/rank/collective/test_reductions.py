"""Values over all ranks, with known contributions of the other rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

from ddptrain.rank.collective.calls import CollectiveCalls
from ddptrain.rank.collective.reductions import CollectiveValues
from ddptrain.rank.emitter import Emitter
from tests.unit.specs import make_spec

MEAN, ALL_FINITE = 1.0, 2.0  # the codes by which ranks compare their calls


@pytest.fixture
def values() -> CollectiveValues:
    """Rank 0 of 2."""
    spec = make_spec(world_size=2)
    calls = CollectiveCalls(spec, Emitter(-1))
    calls._thread = object()  # type: ignore[assignment]  # no thread that watches
    return CollectiveValues(spec, calls)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the other rank adds to the sums."""

    def add(code: float, first: float, second: float) -> None:
        def all_reduce(sums: torch.Tensor, group: Any) -> None:
            assert group == "gloo group"
            sums += torch.tensor([code, code * code, first, second], dtype=torch.float64)

        monkeypatch.setattr(distributed, "new_group", lambda backend, **_: f"{backend} group")
        monkeypatch.setattr(distributed, "all_reduce", all_reduce)

    return add


def test_mean_is_weighted(values: CollectiveValues, other: Callable[..., None]) -> None:
    other(MEAN, 5.0 * 3, 3.0)
    assert values.mean(2.0, 1.0) == (2.0 + 15.0) / 4
    assert values.mean(torch.tensor([1.0, 3.0]), 1.0) == (2.0 + 15.0) / 4
    other(MEAN, 0.0, 0.0)
    assert math.isnan(values.mean(2.0, 0.0))


def test_value_is_finite_only_if_it_is_finite_on_all_ranks(
    values: CollectiveValues, other: Callable[..., None]
) -> None:
    other(ALL_FINITE, 0.0, 0.0)
    assert values.all_finite(1.0) is True
    assert values.all_finite(math.inf) is False
    assert values.all_finite(torch.tensor([1.0, math.nan])) is False
    other(ALL_FINITE, 1.0, 0.0)
    assert values.all_finite(1.0) is False


def test_ranks_in_different_calls_are_an_error(values: CollectiveValues, other: Callable[..., None]) -> None:
    other(ALL_FINITE, 0.0, 0.0)
    with pytest.raises(RuntimeError, match=r"rank 0 is in ctx\.mean, other ranks are in another call"):
        values.mean(1.0, 1.0)
