"""Random states go on where they were captured, and new ranks get their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ddptrain.rank.checkpoint import files
from ddptrain.rank.checkpoint.snapshot import from_bytes, plain_bytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    before = files.capture_random(CPU)
    yield
    files.restore_random(before, CPU)


def draws() -> list[float]:
    return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]


def test_states_go_on_where_they_were_captured_and_load_without_pickles() -> None:
    draws()
    state = from_bytes(plain_bytes(files.capture_random(CPU)))
    first = [draws(), draws()]
    files.restore_random(state, CPU)
    assert [draws(), draws()] == first


def test_new_ranks_draw_differently_but_the_same_each_time() -> None:
    state = files.capture_random(CPU)

    def first_draws(rank: int) -> list[float]:
        files.reseed_random(state, rank)
        return draws()

    assert first_draws(0) == first_draws(0)
    assert len({value for rank in range(3) for value in first_draws(rank)}) == 9


def test_new_rank_draws_known_numbers() -> None:
    files.reseed_random({"torch": torch.arange(4, dtype=torch.uint8)}, 3)
    assert draws() == pytest.approx([1.113082, 0.076317, -0.65621], abs=1e-5)


def test_states_are_plain_and_those_of_numpy_and_python_are_restored_exactly() -> None:
    random.seed(7)
    np.random.seed(7)
    random.gauss(0, 1)
    np.random.normal()
    python = random.getstate()
    numpy: Any = np.random.get_state(legacy=True)
    state = files.capture_random(CPU)
    assert (state["python"][0], state["python"][2]) == (3, python[2]) and state["cuda"] is None
    assert state["python"][1].tolist() == list(python[1])
    name, keys, *rest = state["numpy"]
    assert (name, keys.dtype, keys.tolist(), rest) == ("MT19937", torch.int64, list(numpy[1]), list(numpy[2:]))
    draws()
    files.restore_random(state, CPU)
    assert random.getstate() == python and all(map(np.array_equal, np.random.get_state(), numpy))
