from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.config.load import load_config, load_mapping
from ddptrain.errors import ConfigError
from ddptrain.protocol.rank_spec import StepProfile


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{steps: [13, 10]}", "3: profile.steps: the first step is 13, the last 10 (write the lower one first)"),
        ("{steps: [0, 3]}", "3: profile.steps[0]: expected at least 1, got 0"),
        ("{steps: [1, 101]}", "3: profile.steps: are 101 steps, of which the trace is too large"),
        ("{steps: [3]}", "3: profile.steps: expected 2 or more values"),
        ("{ranks: [0]}", "3: profile.steps: is required"),
        ("{steps: [1, 3], ranks: [0, 2]}", "3: profile.ranks: has 2, but the run has at most 2 ranks (write ranks fr"),
        ("{steps: [1, 3], ranks: [-1]}", "3: profile.ranks[0]: expected at least 0, got -1"),
        ("{steps: [1, 3], rank: 0}", "3: profile.rank: unknown key (did you mean profile.ranks?)"),
    ],
)
def test_wrong_profile_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"workload: petnames\ncluster: {{ranks: 2}}\nprofile: {text}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    ((found),) = [str(each).removeprefix(f"{path}:") for each in raised.value.problems]
    assert found.startswith(problem)


@pytest.mark.parametrize("ranks", ["auto", 8, {"min": 1, "max": 8}])
def test_ranks_that_may_exist_are_accepted(tmp_path: Path, ranks: object) -> None:
    data = {"workload": "petnames", "cluster": {"ranks": ranks}, "profile": {"steps": [10, 13], "ranks": [7]}}
    profile = load_mapping(data, tmp_path).config.profile
    assert profile is not None and profile.spec == StepProfile(10, 13, (7,))


def test_profile_without_ranks_is_of_all_ranks() -> None:
    profile = StepProfile(10, 13)
    assert profile.includes(0) and profile.includes(99) and profile.speaker == 0
    assert not StepProfile(10, 13, (2, 1)).includes(0) and StepProfile(10, 13, (2, 1)).speaker == 1
