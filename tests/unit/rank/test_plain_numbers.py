"""Users' numbers are converted to Python numbers, and everything else is refused with its name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddptrain.rank.output import number, numbers, optional, optional_whole, whole


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (0.25, 0.25), (torch.tensor([0.5]), 0.5), (np.float32(1.5), 1.5), (np.array([[7]]), 7)],
)
def test_number_is_read_from_values_with_one_element(value: object, expected: float) -> None:
    assert number("x", value) == expected
    assert type(number("x", value)) is type(expected)


@pytest.mark.parametrize(
    "value", [True, "1", None, [1.0], torch.tensor(True), torch.zeros(2), torch.zeros(0), np.zeros(3)]
)
def test_other_values_are_refused_with_their_name(value: object) -> None:
    with pytest.raises(TypeError, match="'loss'"):
        number("loss", value)


def test_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(TypeError) as raised:
        number("loss", [0.5] * 10_000)
    assert len(str(raised.value)) < 400 and str(raised.value).endswith("... (list)")


def test_integer_that_no_event_can_hold_becomes_a_float() -> None:
    found = numbers({"fits": 2**63 - 1, "least": -(2**63), "large": 10**30, "negative": -(2**63) - 1, "huge": 10**400})
    assert found == {"fits": 2**63 - 1, "least": -(2**63), "large": 1e30, "negative": -(2.0**63), "huge": float("inf")}
    assert [type(value) for value in found.values()] == [int, int, float, float, float]
    assert number("x", -(10**400)) == float("-inf")


def test_mapping_is_converted_with_text_names() -> None:
    assert numbers({"a": torch.tensor(2.0), 3: 4}) == {"a": 2.0, "3": 4}  # type: ignore[dict-item]


def test_step_must_be_whole_and_may_be_missing() -> None:
    assert (whole("step", 7.0), whole("step", torch.tensor(8))) == (7, 8)
    assert (optional_whole("step", 7.0), optional_whole("step", None)) == (7, None)
    with pytest.raises(TypeError, match="'step' is None"):
        whole("step", None)
    with pytest.raises(TypeError, match=r"step must be a whole number, not 7\.5"):
        whole("step", 7.5)
    for value in (float("nan"), float("inf"), 10**30, 2**63):
        with pytest.raises(TypeError, match="step must be a whole number"):
            whole("step", value)
    assert (optional("epoch", 1.5), optional("epoch", None)) == (1.5, None)
