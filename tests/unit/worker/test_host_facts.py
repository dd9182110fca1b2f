"""Facts of a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.protocol.host_facts import HostFacts
from ddptrain.worker.host_facts import host_facts


def test_facts_of_this_host_survive_the_way_to_the_driver(tmp_path: Path) -> None:
    facts = host_facts(tmp_path, "lo")
    assert facts.cores >= 1 and facts.memory_mb > 0 and facts.open_files > 0 and facts.scratch_mb > 0
    assert HostFacts.from_json(facts.to_json()) == facts


def test_folder_that_is_missing_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    (problem,) = host_facts(tmp_path / "missing", "lo").problems
    assert problem.endswith("No such file or directory")


def test_facts_that_are_nested_without_end_are_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        HostFacts.from_json("[" * 100_000)
