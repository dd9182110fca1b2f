"""The options of `ddptrain train` that stand for fields of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddptrain.cli.main import main


def test_options_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("workload: gc:collect\ncluster: {ranks: 2}\n")
    options = ["--set", "cluster.start_timeout_s=5", "--ranks", "3", "--runs-dir", str(tmp_path / "else where")]
    assert main(["train", "--dry-run", *options, str(tmp_path / "c.yaml")]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["cluster"]["ranks"], resolved["cluster"]["start_timeout_s"]) == (3, 5)
    assert resolved["results"]["dir"] == str(tmp_path / "else where")
    assert main(["train", "--dry-run", "--ranks", "0", str(tmp_path / "c.yaml")]) == 2
    assert "--ranks 0: cluster.ranks: expected 'auto' or at least 1, got 0" in capsys.readouterr().err
