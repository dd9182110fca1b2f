"""The options of `ddptrain train` that stand for fields of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from ddptrain.cli.main import main
from ddptrain.driver.control.detach import EndedEarly


def test_options_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("workload: gc:collect\ncluster: {ranks: 2}\n")
    options = ["--set", "cluster.start_timeout_s=5", "--ranks", "3", "--runs-dir", str(tmp_path / "else where")]
    assert main(["train", "--dry-run", *options, str(tmp_path / "c.yaml")]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["cluster"]["ranks"], resolved["cluster"]["start_timeout_s"]) == (3, 5)
    assert resolved["results"]["dir"] == str(tmp_path / "else where")
    assert main(["train", "--dry-run", "--ranks", "0", str(tmp_path / "c.yaml")]) == 2
    assert "--ranks 0: cluster.ranks: expected 'auto' or at least 1, got 0" in capsys.readouterr().err


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
