"""What a snapshot refuses."""

from __future__ import annotations

import pytest
import torch

from ddptrain.rank.checkpoint.snapshot import HostBuffers, plain_bytes


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
