"""Windows of about a second."""

from __future__ import annotations

import pytest

from ddptrain.rank.steps.step_window import StepWindow, cut_mean


def test_window_has_the_steps_of_a_second_after_the_warm_up() -> None:
    window = StepWindow()
    ends = [window.add(0.1, 0.1, 0.2 * (step + 1)) for step in range(8)]
    assert ends[:7] == [None] * 7
    assert ends[7] is not None
    steps, own_s, waited_s = ends[7]
    assert steps == 5
    assert own_s == pytest.approx(0.1)
    assert waited_s == pytest.approx(0.1)
    assert window.add(0.1, 0.1, 1.8) is None


def test_long_step_is_a_window_of_its_own() -> None:
    window = StepWindow()
    for step in range(3):
        window.add(2.0, 1.0, 3.0 * step)
    assert window.add(2.0, 1.0, 9.0) == (1, 2.0, 1.0)


def test_longest_tenth_does_not_count() -> None:
    assert cut_mean([1.0] * 9 + [100.0]) == 1.0
    assert cut_mean([1.0] * 8 + [11.0]) == pytest.approx(19 / 9)
    assert cut_mean([1.0] * 18 + [10.0, 100.0]) == 1.0
