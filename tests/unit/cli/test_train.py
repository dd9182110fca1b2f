"""The options of `ddptrain train` that stand for fields of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddptrain.cli import options, train
from ddptrain.cli.main import main
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.control.detach import EndedEarly
from ddptrain.errors import ConfigError


def load(tmp_path: Path, **given: Any) -> RunConfig:
    (tmp_path / "c.yaml").write_text("workload: gc:collect\ncluster: {ranks: 2}\n")
    chosen = {"ranks": None, "cluster": None, "runs_dir": None, **given}
    return train._load(str(tmp_path / "c.yaml"), ["cluster.start_timeout_s=5"], options.field_options(**chosen)).config


def test_options_win_over_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, ranks=3, cluster="tcp://host:1", runs_dir=str(tmp_path / "else where"))
    assert (config.cluster.ranks, config.cluster.backend, config.cluster.address) == (3, "address", "tcp://host:1")
    assert (config.cluster.start_timeout_s, config.results.dir) == (5.0, str(tmp_path / "else where"))


def test_wrong_option_is_named_as_it_was_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--ranks 0: cluster\.ranks: expected 'auto' or at least 1, got 0"):
        load(tmp_path, ranks=0)


def test_detached_driver_is_given_what_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workload: gc:collect\ncluster: {ranks: 2}\n")
    given: list[str] = []

    def start(arguments: Sequence[str]) -> EndedEarly:
        given.extend(arguments)
        return EndedEarly(6, "")

    monkeypatch.setattr("ddptrain.driver.control.detach.start_detached", start)
    config = str(tmp_path / "c.yaml")
    typed = ["--set", "name=a", "--allow-changes", "--set=env.A=-b", "--ranks", "3", "--resume", "auto"]
    assert main(["train", "--detach", "--output", "json", *typed, config]) == 6
    sets = ["--set", "name=a", "--set", "env.A=-b"]
    rest = ["--ranks", "3", "--resume", "auto", "--allow-changes", "--", config]
    assert given == ["train", "--output", "plain", *sets, *rest]
