"""Random states go on where they were captured, and new ranks get their own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ddptrain.rank.checkpoint import random_state
from ddptrain.rank.checkpoint.snapshot import from_bytes, plain_bytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    before = random_state.capture(CPU)
    yield
    random_state.restore(before, CPU)


def draws() -> list[float]:
    return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]


def test_states_go_on_where_they_were_captured_and_load_without_pickles() -> None:
    draws()
    state = from_bytes(plain_bytes(random_state.capture(CPU)))
    first = [draws(), draws()]
    random_state.restore(state, CPU)
    assert [draws(), draws()] == first


def test_new_ranks_draw_differently_but_the_same_each_time() -> None:
    state = random_state.capture(CPU)

    def first_draws(rank: int) -> list[float]:
        random_state.reseed(state, rank)
        return draws()

    assert first_draws(0) == first_draws(0)
    assert len({value for rank in range(3) for value in first_draws(rank)}) == 9
